"""Measures a Whisper model on recordings: plain decoding, drafts and beams in turns, with their word errors.

Everything is decoded at temperature 0 without fallback, and loading is not counted. Each run begins with
fresh drafts, as a new process would.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from edgespec.apps.bench.runs import PLAIN, HeardRecording, Run, rotated, text_hash
from edgespec.apps.speech.audio import read_audio
from edgespec.apps.speech.draft_costs import SpeechDraftCosts, joined
from edgespec.apps.speech.drafts import ModelDrafts
from edgespec.apps.speech.languages import language_code
from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.apps.speech.options import MAX_BEAM, SpeechOptions
from edgespec.apps.speech.transcriber import Samples, Transcriber
from edgespec.apps.speech.transcript import Transcript
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import Prompt
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
    variants: dict[str, SpeechVariant] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name in variants:
            raise UsageError(f"{name} is named twice", field="variants")
        found = _BEAM.fullmatch(name)
        if name not in (*_NAMES, _INDEPENDENT) and not (found and 1 <= int(found[1]) <= MAX_BEAM):
            problem = f"of recordings: {', '.join(_NAMES)}, {_INDEPENDENT}, or beam-1 to beam-{MAX_BEAM}"
            raise UsageError(problem, field="variants", value=name)
        variants[name] = SpeechVariant(
            name,
            _NAMES.get(name, "none"),
            beam=int(found[1]) if found else None,
            independent=name == _INDEPENDENT,
        )
    if not variants:
        raise UsageError("name at least one, such as auto", field="variants")
    return tuple(variants.values())


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
            heard=_heard(prompt, transcript),
        )


def _heard(prompt: Prompt, transcript: Transcript) -> HeardRecording:
    stats = transcript.stats
    return compared_with_known(
        prompt,
        transcript.text,
        stats.audio_s,
        encode_s=stats.encode_s + stats.draft_encode_s,
        decode_s=stats.decode_s,
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
