"""Measures a Whisper model on recordings: plain decoding, drafts and beams in turns, with their word errors.

Everything is decoded at temperature 0 without fallback, and loading is not counted. Each run begins with
fresh drafts, as a new process would.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgespec.apps.bench.peers import TIMEOUT_S, run_program
from edgespec.apps.bench.runs import PLAIN, HeardRecording, Run, rotated, text_hash
from edgespec.apps.bench.variants import names_in
from edgespec.apps.speech.audio import read_audio
from edgespec.apps.speech.drafts import ModelDrafts, SpeechDraftCosts, joined
from edgespec.apps.speech.languages import language_code
from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.apps.speech.options import MAX_BEAM, SpeechOptions
from edgespec.apps.speech.transcriber import Samples, Transcriber
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import Prompt
from edgespec.platform.closing import Closing
from edgespec.platform.files import why_no_file
from edgespec.platform.messages import MessageFn
from edgespec.platform.metering import Meter

SpeechDrafting = Literal["none", "auto", "suffix", "model"]

_BEAM = re.compile(r"beam-([0-9]{1,2})")
_NAMES: dict[str, SpeechDrafting] = {"auto": "auto", "suffix": "suffix", "model": "model"}
_INDEPENDENT = "independent"


@dataclass(frozen=True, slots=True)
class SpeechVariant:
    """One way to hear a recording."""

    name: str
    drafting: SpeechDrafting = "none"
    """Source of drafts: "auto", as in `edgespec transcribe`; "suffix", text heard before; "model", the draft
    model, in every window."""
    beam: int | None = None
    independent: bool = False

    @property
    def writes_plain_text(self) -> bool:
        """Whether its text has to be plain decoding's."""
        return self.beam is None and not self.independent


PLAIN_HEARING = SpeechVariant(PLAIN)


def parse_speech_variants(text: str) -> tuple[SpeechVariant, ...]:
    """Return the variants named in `text`, separated by commas. Raises UsageError."""
    variants = []
    for name in names_in(text, "variants"):
        found = _BEAM.fullmatch(name)
        if name not in (*_NAMES, _INDEPENDENT) and not (found and 1 <= int(found[1]) <= MAX_BEAM):
            problem = f"of recordings: {', '.join(_NAMES)}, {_INDEPENDENT}, or beam-1 to beam-{MAX_BEAM}"
            raise UsageError(problem, field="variants", value=name)
        beam = int(found[1]) if found else None
        variants.append(SpeechVariant(name, _NAMES.get(name, "none"), beam, name == _INDEPENDENT))
    return tuple(variants)


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """The settings that all runs over recordings share."""

    variants: tuple[SpeechVariant, ...]
    """The variants measured in addition to plain decoding."""
    language: str | None = None
    """None or "auto": detected in each recording. Otherwise as in SpeechOptions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", language_code(self.language) if self.language else None)

    def facts(self) -> dict[str, str | int | float]:
        """Return the settings as an outcome stores them."""
        names = ", ".join(variant.name for variant in self.variants)
        return {"variants": names, "language": self.language or "detected", "temperature": 0.0}


class SpeechBench:
    """A Whisper model, what drafts for it, and the recordings of a suite."""

    def __init__(
        self,
        target: SpeechModel,
        draft: SpeechModel | None,
        settings: SpeechSettings,
        folder: Path,
        meter: Meter,
    ) -> None:
        """Hear recordings, whose ids are paths below `folder`. Raises UsageError if `target` cannot."""
        self._target, self._draft, self._settings = target, draft, settings
        self._folder, self._meter = folder, meter
        self._sound: dict[str, Samples] = {}
        self._known: SpeechDraftCosts | None = None  # of the draft, as runs before have seen it
        for variant in settings.variants:
            if variant.drafting == "model" and draft is None:
                raise UsageError(
                    "needs --draft NAME, a smaller Whisper model", field="variants", value="model"
                )
            self._transcriber(variant)

    def read(self, prompts: Sequence[Prompt], on_message: MessageFn) -> None:
        """Read all recordings into memory. Raises EdgespecError for one that cannot be read."""
        for prompt in prompts:
            self._sound[prompt.id] = read_audio(str(self.path(prompt)), on_message=on_message)

    def path(self, prompt: Prompt) -> Path:
        """Return the file of a recording."""
        return (self._folder / prompt.id).absolute()

    def seconds(self, prompt: Prompt) -> float:
        """Return the length of a recording that was read."""
        return len(self._sound[prompt.id]) / SAMPLE_RATE

    @property
    def language(self) -> str | None:
        """The language that is spoken; None: detected."""
        return self._settings.language

    @property
    def beams(self) -> tuple[int, ...]:
        """The numbers of beams of all variants, the greedy ones' 1 first."""
        return tuple(dict.fromkeys((1, *(one.beam for one in self._settings.variants if one.beam))))

    def warm_up(self) -> None:
        """Hear the shortest recording once in every variant, to make the graphs and read the weights."""
        shortest = min(self._sound.values(), key=len)
        for variant in (PLAIN_HEARING, *self._settings.variants):
            self._transcriber(variant).transcribe(shortest)

    def turns(self, prompt: Prompt, round_: int, place: int) -> Iterator[Run]:
        """Yield a run of every variant over a recording; which comes first depends on round and place."""
        for variant in rotated((PLAIN_HEARING, *self._settings.variants), round_ + place):
            yield self._hear(prompt, variant, round_)

    def _transcriber(self, variant: SpeechVariant) -> Transcriber:
        target, draft = self._target, self._draft
        options = SpeechOptions(
            language=self._settings.language,
            temperatures=(0.0,),
            beam=variant.beam,
            independent=variant.independent,
            condition=not variant.independent,
        )
        drafts = None
        if variant.drafting == "model":
            drafts = ModelDrafts(target, draft, repeats=False, always=True)
        elif variant.drafting != "none":
            known = self._known if self._known and not self._known.is_due else None
            tries = variant.drafting == "auto" and (known is None or known.gain_s > 0.0)
            drafts = ModelDrafts(target, draft, known=known) if tries else ModelDrafts(target)
        return Transcriber(target.model, target.tokenizer, options, drafts=drafts)

    def _hear(self, prompt: Prompt, variant: SpeechVariant, round_: int) -> Run:
        transcriber = self._transcriber(variant)
        window = self._meter.begin()
        transcript = transcriber.transcribe(self._sound[prompt.id])
        energy = window.end()
        if variant.drafting == "auto" and isinstance(transcriber.drafts, ModelDrafts):
            self._known = joined(self._known, transcriber.drafts.seen())
        stats = transcript.stats
        tokens = [token for segment in transcript.segments for token in segment.tokens]
        steps = tuple((drafted, accepted, n) for (drafted, accepted), n in sorted(stats.steps.items()))
        return Run(
            prompt=prompt.id,
            category=prompt.category,
            variant=variant.name,
            round=round_,
            prompt_tokens=0,
            tokens=stats.n_tokens,
            total_s=stats.total_s,
            ttft_s=None,
            prefill_s=None,
            n_emitted=sum(n * (accepted + 1) for _, accepted, n in steps),
            histogram=steps,
            text_sha256=text_hash(tokens) if variant.writes_plain_text else None,
            energy=energy,
            heard=compared_with_known(
                prompt,
                transcript.text,
                stats.audio_s,
                encode_s=stats.encode_s + stats.draft_encode_s,
                decode_s=stats.decode_s,
            ),
        )


def compared_with_known(
    prompt: Prompt,
    text: str,
    audio_s: float,
    *,
    encode_s: float | None = None,
    decode_s: float | None = None,
) -> HeardRecording:
    """Return the record of a recording, with its word errors if the words said in it are known."""
    errors = word_errors(prompt.text, text) if prompt.text else None
    return HeardRecording(
        audio_s,
        text,
        n_words=errors.n_words if errors else None,
        n_errors=errors.n_errors if errors else None,
        encode_s=encode_s,
        decode_s=decode_s,
    )


# ---- word errors: lower case, without punctuation, numbers as they are written ----


class WordErrors(NamedTuple):
    """Errors in what was heard of a known text."""

    n_errors: int
    """Words replaced, missing or added."""
    n_words: int
    """Words of the known text."""


def require_counting(field: str) -> None:
    """Raise EdgespecError if jiwer, which `field` needs, is missing."""
    try:
        importlib.import_module("jiwer")
    except ImportError:
        raise EdgespecError("word errors need jiwer: pip install 'edgespec[bench]'", field=field) from None


def plain_words(text: str) -> str:
    """Return a text in lower case, without punctuation."""
    return " ".join(re.findall(r"[\w']+", text.lower()))


def word_errors(known: str, heard: str) -> WordErrors:
    """Count the errors in `heard`, where `known` is said, by the least edits that make one of the other."""
    import jiwer

    found = jiwer.process_words(plain_words(known), plain_words(heard))
    n_wrong = found.substitutions + found.deletions
    return WordErrors(n_wrong + found.insertions, n_wrong + found.hits)


# ---- faster-whisper and whisper.cpp on the same recordings, greedy and with the variants' beams ----
#
#     faster-whisper   in a Python that has it, int8 weights, loaded once
#     whisper.cpp      whisper-cli, a process for each recording; its own time for loading is taken off
#
# Both decode at temperature 0 without fallback.


WHISPER_CPP_PROGRAM = "whisper-cli"

_FASTER_WHISPER = """
import json, sys, time
import faster_whisper
model = faster_whisper.WhisperModel(
    sys.argv[1], device="cpu", compute_type="int8", cpu_threads=int(sys.argv[2]), local_files_only=True
)
print(json.dumps(faster_whisper.__version__), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began = time.perf_counter()
    segments, _ = model.transcribe(
        asked["file"], language=asked["language"], beam_size=asked["beam"], temperature=0.0
    )
    text = "".join(segment.text for segment in segments)
    print(json.dumps({"seconds": time.perf_counter() - began, "text": text.strip()}), flush=True)
"""
_TIMES = re.compile(r"(load|total) time = +([\d.]+) ms")
_TIMESTAMPS = re.compile(r"^\[[^\]]*\]")


def _run(
    peer: str, hears: SpeechBench, prompt: Prompt, beam: int, round_: int, told: tuple[float, str]
) -> Run:
    """Return the record of one recording that a peer heard: `told` are its seconds and the text."""
    seconds, text = told
    return Run(
        prompt=prompt.id,
        category=prompt.category,
        variant=peer if beam == 1 else f"{peer} beam-{beam}",
        round=round_,
        prompt_tokens=0,
        tokens=0,
        total_s=seconds,
        ttft_s=None,
        prefill_s=None,
        heard=compared_with_known(prompt, text, hears.seconds(prompt)),
    )


class FasterWhisper(Closing):
    """faster-whisper in its own process, a peer of `measure_rounds`. A context manager, which ends it."""

    def __init__(self, command: str, hears: SpeechBench, n_threads: int) -> None:
        """Start it. `command`: the folder of its model, with a Python that has it before, if not this one.

        Raises UsageError for a folder or a Python that is not there, EdgespecError if it does not start.
        """
        self._hears = hears
        python, folder = faster_whisper(command)
        arguments = [python, "-c", _FASTER_WHISPER, str(folder), str(n_threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.name = f"faster-whisper {self._answer()} (int8)"
            """Name and version."""
        except BaseException:
            self.close()
            raise

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a greedy run, and one for each number of beams. Raises EdgespecError."""
        for beam in self._hears.beams:
            asked = {"file": str(self._hears.path(prompt)), "language": self._hears.language, "beam": beam}
            assert self._child.stdin is not None  # noqa: S101 - for the type checker
            try:
                self._child.stdin.write(json.dumps(asked) + "\n")
                self._child.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: the answer says why
            told = self._answer()
            yield _run("faster-whisper", self._hears, prompt, beam, round_, (told["seconds"], told["text"]))

    def _answer(self) -> Any:  # noqa: ANN401 - its version, or seconds and text
        """The next line that it prints. Raises EdgespecError with its last line if it has ended."""
        assert self._child.stdout is not None  # noqa: S101 - for the type checker
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise EdgespecError(f"faster-whisper ended: {lines[-1] if lines else 'it said nothing'}")
        return json.loads(line)

    def close(self) -> None:
        """Kill the child that runs it, and wait for its end."""
        self._child.kill()
        self._child.communicate()
        self._log.close()


class WhisperCpp:
    """whisper.cpp's program as a peer of `bench.measure_rounds`."""

    def __init__(self, command: str, hears: SpeechBench, n_threads: int) -> None:
        """Take its model from `command`, with its program before, if that is not on the PATH.

        Raises UsageError if one of them is not there.
        """
        program, model = whisper_cpp(command)
        self._hears = hears
        self._command = [program, "-m", str(model.absolute()), "-t", str(n_threads)]
        self._command += ["-l", hears.language or "auto", "-nf"]
        self.name = f"whisper.cpp, {model.name}"
        """Name and model."""

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a greedy run, and one for each number of beams. Raises EdgespecError."""
        for beam in self._hears.beams:
            n = str(beam)
            command = [*self._command, "-bs", n, "-bo", n, str(self._hears.path(prompt))]
            began = time.perf_counter()
            done = run_program(command, TIMEOUT_S)
            whole_s = time.perf_counter() - began
            times = dict(_TIMES.findall(done.stderr))
            seconds = (float(times["total"]) - float(times["load"])) / 1e3 if len(times) == 2 else whole_s
            text = " ".join(_TIMESTAMPS.sub("", line).strip() for line in done.stdout.splitlines())
            yield _run("whisper.cpp", self._hears, prompt, beam, round_, (seconds, text.strip()))


def faster_whisper(command: str) -> tuple[str, Path]:
    """Return the Python that has it, and the folder of its model. Raises UsageError."""
    python, folder = _program_and_model(command, sys.executable, "faster_whisper")
    if not folder.is_dir():
        raise UsageError("no such folder; name a model of CTranslate2", field="faster_whisper", value=folder)
    return python, folder


def whisper_cpp(command: str) -> tuple[str, Path]:
    """Return its program and the file of its model. Raises UsageError."""
    program, model = _program_and_model(command, shutil.which(WHISPER_CPP_PROGRAM), "whisper_cpp")
    if why := why_no_file(model):
        raise UsageError(f"{why}; name a model of whisper.cpp", field="whisper_cpp", value=model)
    return program, model


def _program_and_model(command: str, default: str | None, field: str) -> tuple[str, Path]:
    """Return a peer's program and model, as a user writes them. Raises UsageError."""
    parts = shlex.split(command)
    if len(parts) == 1 and default:
        parts = [default, *parts]
    if len(parts) != 2:
        problem = (
            "must be its program and its model" if default else "is not on the PATH: name it before its model"
        )
        raise UsageError(problem, field=field, value=command)
    program = shutil.which(parts[0])
    if program is None:
        raise UsageError("cannot be run: no such program", field=field, value=parts[0])
    return program, Path(parts[1]).expanduser()
