"""The work of `edgespec bench`: measures texts or recordings, and writes the results."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgespec.apps.bench import clients
from edgespec.apps.bench.bench import (
    BenchLimits,
    BenchListener,
    BenchProgress,
    BenchSettings,
    Peer,
    measure,
    measure_rounds,
    unfit,
)
from edgespec.apps.bench.clients import Measured, prompts_for
from edgespec.apps.bench.commands.tables import write_results
from edgespec.apps.bench.machine import facts
from edgespec.apps.bench.peers import LlamaCpp, LlamaCppPeer, context_for
from edgespec.apps.bench.runs import BenchmarkOutcome, Cell, PassTime, Run, Throughput
from edgespec.apps.bench.speech import (
    FasterWhisper,
    SpeechBench,
    SpeechSettings,
    WhisperCpp,
    parse_speech_variants,
    require_counting,
)
from edgespec.apps.speech.choices import DEFAULT_MODEL
from edgespec.apps.speech.speech_model import pull_speech, speech_model, speech_ref
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.cli.console import INTERRUPTED, err, line_of, message
from edgespec.cli.options import Compute, ModelChoice
from edgespec.cli.progress import WorkDisplay
from edgespec.engine.engine import Engine
from edgespec.engine.model_choice import ChosenModels
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import read_header
from edgespec.models.draft_records import paired_draft
from edgespec.models.quantizations import FileFacts, model_file
from edgespec.models.registry import load_registry
from edgespec.models.resolve import resolve
from edgespec.models.suites import Prompt, Suite
from edgespec.platform.cpu import default_threads
from edgespec.platform.files import expand_user
from edgespec.platform.machine import MachineWatch
from edgespec.platform.memory import peak_rss_bytes
from edgespec.platform.metering import choose_meter
from edgespec.platform.plugins import part

if TYPE_CHECKING:
    from edgespec.apps.bench.commands.bench_options import RecordingChoice, ReportOutputs, SuiteChoice

_PEER_GAMMA = 3  # llama.cpp's default


class BenchModels(NamedTuple):
    """The models that are measured, the target first."""

    facts: Sequence[FileFacts]
    n_threads: int
    kernels: str
    """The kernels' instruction set, or "stock"."""


class BenchRunner(ABC):
    """A benchmark under way: its runs so far, and the warnings about them."""

    def __init__(
        self,
        suite: Suite,
        settings: BenchSettings | SpeechSettings,
        limits: BenchLimits,
        peers: Sequence[Peer],
        models: BenchModels,
    ) -> None:
        """Measure `models` and `peers` on a suite."""
        self._suite, self._limits, self._models = suite, limits, models
        self._facts = settings.facts()
        self._prompts: Sequence[Prompt] = suite.interleaved()
        self._peers = list(peers)
        self._peer_names = ", ".join(peer.name for peer in peers)  # also of those that will fail
        self._warnings: list[str] = []
        self._runs: list[Run] = []
        self._throughput: list[Throughput] = []
        self._passes: list[PassTime] = []
        self._watch = MachineWatch(n_threads=models.n_threads)

    @abstractmethod
    def _measure(self, display: WorkDisplay) -> str:
        """Measure until a limit is reached; return in words which limit."""

    def run(self, outputs: ReportOutputs) -> int:
        """Measure, and write the results, even if Ctrl-C or a failure ends it early.

        Returns the exit code; raises the failure.
        """
        failure: EdgespecError | None = None
        code = 0
        try:
            with WorkDisplay() as display:
                ended = self._measure(display)
        except KeyboardInterrupt:
            ended, code = "interrupted", INTERRUPTED
        except EdgespecError as error:
            ended, failure = f"failed: {line_of(error)}", error
        if self._runs or self._throughput:
            write_results(self._outcome(ended), outputs)
        for line in self._warnings:
            message(f"warning: {line}")
        if failure:
            raise failure
        message(ended)
        return code

    def _listener(self, display: WorkDisplay, noun: str) -> BenchListener:
        """Return callbacks that keep the runs and show the progress; `noun` names several prompts."""

        def keep(run: Run) -> None:
            self._runs.append(run)
            self._watch.sample()

        def show(progress: BenchProgress) -> None:
            detail = f", {progress.done + 1} of {progress.total} {noun}"
            if progress.noise is not None:
                detail += f", interval {progress.noise:.1%}"
            display.show(f"round {progress.round + 1}", progress.spent_s, self._limits.budget_s, detail)

        return BenchListener(keep, show, self._warnings.append)

    def _outcome(self, ended: str) -> BenchmarkOutcome:
        n_answered = len({run.prompt for run in self._runs})
        if n_answered < len(self._prompts) and not self._throughput:
            self._warnings.append(
                f"only {n_answered} of {len(self._prompts)} prompts had their turn; give more time "
                "(--budget) or take fewer (--per-category)"
            )
        self._warnings += self._watch.warnings()
        models = self._models.facts
        cell = Cell(
            target=models[0].name,
            draft=models[1].name if len(models) > 1 else None,
            kernels=self._models.kernels,
            runs=tuple(self._runs),
            peak_rss_bytes=peak_rss_bytes(),
            throughput=tuple(self._throughput),
            passes=tuple(self._passes),
        )
        return BenchmarkOutcome(
            kind="bench",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=facts(),
            settings={
                **self._facts,
                "threads": self._models.n_threads,
                "budget_s": self._limits.budget_s,
                "precision": self._limits.precision,
                **({"peers": self._peer_names} if self._peer_names else {}),
                "ended": ended,
            },
            suite={"name": self._suite.name, "sha256": self._suite.sha256, "prompts": self._suite.categories},
            models={model.name: model for model in models},
            cells=(cell,),
            warnings=tuple(self._warnings),
        )


class RunningBench(BenchRunner):
    """One pair on a suite of texts."""

    def __init__(
        self,
        engine: Engine,
        suite: Suite,
        settings: BenchSettings,
        limits: BenchLimits,
        peers: Sequence[LlamaCppPeer],
    ) -> None:
        """Leave out prompts that do not fit. Raises EdgespecError if none is left."""
        self._engine, self._settings = engine, settings
        facts_of = _models(engine, [peer.programs.draft for peer in peers])
        models = BenchModels(facts_of, engine.n_threads, engine.kernels)
        super().__init__(suite, settings, limits, peers, models)
        too_long = unfit(engine, suite.prompts, settings.n_predict)
        self._warnings += too_long.values()
        self._prompts = [prompt for prompt in self._prompts if prompt.id not in too_long]
        if not self._prompts:
            raise EdgespecError(f"{self._warnings[0]}; no prompt is left")
        if settings.clients:
            self._prompts = prompts_for(self._prompts, settings.clients)

    def _measure(self, display: WorkDisplay) -> str:
        if self._settings.clients:
            return self._measure_clients(display)
        return measure(
            self._engine,
            self._prompts,
            self._settings,
            limits=self._limits,
            listener=self._listener(display, "prompts"),
            peers=self._peers,
        )

    def _measure_clients(self, display: WorkDisplay) -> str:
        """Measure concurrent requests until a limit is reached; return in words which limit."""

        def keep(measured: Measured) -> None:
            if isinstance(measured, PassTime):
                self._passes.append(measured)
            else:
                self._throughput.append(measured)
            self._watch.sample()

        def show(progress: BenchProgress) -> None:
            detail = f", {progress.done} of {progress.total}"
            display.show(f"round {progress.round + 1}", progress.spent_s, self._limits.budget_s, detail)

        return clients.measure_clients(
            self._engine,
            self._prompts,
            self._settings,
            limits=self._limits,
            on_measured=keep,
            on_progress=show,
        )


def _models(engine: Engine, of_peers: Iterable[Path | None]) -> list[FileFacts]:
    """Return the facts of the target, its draft, and what else drafts for peers.

    Under different names even if the files' are equal.
    """
    names = [engine.target_name]
    if engine.draft and engine.draft_name and not engine.draft.is_mtp:
        names.append(engine.draft_name)
        names += {str(path) for path in of_peers if path not in (None, engine.draft.path)}
    models = hashed(names)
    if len({model.name for model in models}) < len({model.sha256 for model in models}):
        return [replace(model, name=name) for model, name in zip(models, names, strict=True)]
    return models


def hashed(names: Iterable[str]) -> list[FileFacts]:
    """Return the facts of models, whose files are hashed unless their hash is known."""
    with err.status("hashing the models"):
        return [model_file(name).facts() for name in names]


def draft_of_peers(models: ChosenModels) -> Path | None:
    """Return the file of the model that drafts for llama.cpp's programs.

    They run no heads: where the draft is one, it is the pair's small model, or none. Raises EdgespecError: it
    is not on this machine, and nobody asked for it by name.
    """
    target, draft = models
    for name in (draft, paired_draft(target, writes=True)) if draft else ():
        if not name:
            continue
        header = read_header(resolve(name, pull_missing=False))
        if not header.only_drafts:
            return header.path
    return None


def llama_cpp(
    folder: Path, engine: Engine, draft: Path | None, suite: Suite, settings: BenchSettings
) -> LlamaCppPeer:
    """Return llama.cpp's programs on the engine's target; they draft as many tokens as the variants, or 3."""
    longest = max(len(engine.prompt_tokens(prompt.text)) for prompt in suite.prompts)
    programs = LlamaCpp(
        folder,
        engine.target.path,
        draft,
        n_threads=engine.n_threads,
        n_ctx=min(context_for(longest, settings.n_predict), engine.target.n_ctx_train),
    )
    gammas = sorted({variant.gamma for variant in settings.variants if variant.gamma}) or [_PEER_GAMMA]
    return LlamaCppPeer(programs, engine, settings, gammas if draft else ())


# ---- recordings, which a Whisper model hears ----


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
            meter = stack.enter_context(choose_meter(assume_watts=watts, on_message=message))
            part("energy.know_idle")(meter)
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
