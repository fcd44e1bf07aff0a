"""The work of `edgespec bench` on recordings, which a Whisper model hears."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.bench.bench import BenchLimits, Peer, measure_rounds
from edgespec.apps.bench.commands.bench_options import RecordingChoice, ReportOutputs, SuiteChoice
from edgespec.apps.bench.commands.bench_runs import BenchModels, BenchRunner, hashed
from edgespec.apps.bench.speech import SpeechBench, SpeechSettings, parse_speech_variants
from edgespec.apps.bench.speech_peers import FasterWhisper, WhisperCpp
from edgespec.apps.bench.word_errors import require_counting
from edgespec.apps.energy import EnergyMeter
from edgespec.apps.energy.commands.energy import know_idle
from edgespec.apps.speech.choices import DEFAULT_MODEL
from edgespec.apps.speech.loading import SpeechModel
from edgespec.apps.speech.speech_model import pull_speech, speech_model, speech_ref
from edgespec.cli.console import err, message
from edgespec.cli.options import Compute, ModelChoice
from edgespec.cli.progress import WorkDisplay
from edgespec.errors import UsageError
from edgespec.models.registry import load_registry
from edgespec.platform.cpu import default_threads
from edgespec.platform.files import expand_user


@dataclass(frozen=True)
class RecordingBench:
    """A benchmark of a Whisper model, as asked for."""

    models: ModelChoice
    suite: SuiteChoice
    variants: str
    recordings: RecordingChoice
    outputs: ReportOutputs

    def run(self, compute: Compute, limits: BenchLimits, watts: float | None) -> int:
        """Measure, write the results, and return the exit code."""
        self.outputs.check()
        settings = SpeechSettings(parse_speech_variants(self.variants), self.recordings.language)
        suite = self.suite.load_recordings()
        if any(prompt.text for prompt in suite.prompts):
            require_counting("suite")
        names = self._names()
        self.recordings.check()
        pull_speech(names[0], names[1] if len(names) > 1 else "none")
        threads = compute.threads or default_threads()
        with ExitStack() as stack:
            meter = stack.enter_context(EnergyMeter.choose(assume_watts=watts, on_message=message))
            know_idle(meter)
            with err.status("loading the models"):
                models = [
                    stack.enter_context(
                        SpeechModel(
                            speech_model(name), name=name, n_threads=threads, kernels=compute.kernels != "off"
                        )
                    )
                    for name in names
                ]
            draft = models[1] if len(models) > 1 else None
            bench = SpeechBench(models[0], draft, settings, self._folder(), meter)
            bench.read(suite.prompts, message)
            peers = self._peers(bench, threads, stack)
            loaded = BenchModels(hashed(names), threads, models[0].model.kernels)
            running = _RunningSpeechBench(suite, settings, limits, peers, loaded)
            return running.hear(bench, self.outputs)

    def _names(self) -> list[str]:
        """Return the names of the model, and of what drafts for it if that was named. Raises UsageError."""
        names = [
            speech_ref(name) for name in (self.models.target or DEFAULT_MODEL, self.models.draft) if name
        ]
        for option, name in zip(("--target", "--draft"), names, strict=False):
            entry = load_registry().entries.get(name)
            if entry and not entry.speech:
                raise UsageError(
                    f"{option} {name}: writes text, and --suite {self.suite.suite} holds recordings; "
                    f"choose a Whisper model, such as {DEFAULT_MODEL}"
                )
        return names

    def _folder(self) -> Path:
        root = expand_user(self.suite.suite)
        return root if root.is_dir() else root.parent

    def _peers(self, bench: SpeechBench, threads: int, stack: ExitStack) -> list[Peer]:
        found: list[Peer] = []
        if self.recordings.faster_whisper:
            started = FasterWhisper(self.recordings.faster_whisper, bench, threads)
            found.append(stack.enter_context(started))
        if self.recordings.whisper_cpp:
            found.append(WhisperCpp(self.recordings.whisper_cpp, bench, threads))
        return found


class _RunningSpeechBench(BenchRunner):
    """A Whisper model on a suite of recordings."""

    _bench: SpeechBench

    def hear(self, bench: SpeechBench, outputs: ReportOutputs) -> int:
        """Measure `bench`, write the results, and return the exit code; as `run`."""
        self._bench = bench
        return self.run(outputs)

    def _measure(self, display: WorkDisplay) -> str:
        began = time.monotonic()
        self._bench.warm_up()
        return measure_rounds(
            self._prompts,
            self._bench.turns,
            limits=self._limits,
            listener=self._listener(display, "recordings"),
            peers=self._peers,
            began=began,
        )
