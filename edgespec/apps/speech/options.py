"""Options of a transcription; defaults and meaning are openai-whisper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from edgespec.apps.speech.choices import SpeechTask
from edgespec.apps.speech.languages import language_code
from edgespec.decoding.choices import Rule
from edgespec.errors import UsageError, check_number, check_text, whole_number

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures tried one after the other, until a window's text is good enough."""

MAX_BEAM = 15
"""Most beams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOptions:
    """The options of a transcription. Raises UsageError, which names the field."""

    language: str | None = None
    """Language that is spoken, by its code, a region or a name ("en", "en-US", "English"), which becomes the
    code; None or "auto": as detected in the first window."""
    task: SpeechTask = "transcribe"
    prompt: str | None = None
    """Text that stands before the first window's: names and words to expect, spelling, style."""
    condition: bool = True
    """Whether a window is given the text before it, as long as that seems right."""
    temperatures: tuple[float, ...] = TEMPERATURES
    max_compression: float | None = 2.4
    """Text that can be compressed further than this repeats itself; the next temperature is tried."""
    min_logprob: float | None = -1.0
    """Mean logprob of a token below which the next temperature is tried."""
    max_no_speech: float | None = 0.6
    """Probability that nobody speaks, above which a window with a low logprob is left out."""
    beam: int | None = None
    """Beams of the search at temperature 0; None: greedy."""
    patience: float = 1.0
    """Texts that the search waits for, times the number of beams."""
    length_penalty: float | None = None
    """Exponent of Google's length penalty, 0 to 1; None: the mean logprob decides between beams."""
    timestamps: bool = True
    words: bool = False
    """Whether each word gets its times."""
    max_initial_timestamp: float | None = 1.0
    """Latest first timestamp of a window, in seconds."""
    seed: int | None = None
    """Seed of temperatures above 0. Fallbacks always have one (0), so that a file gives the same text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(self.temperatures))
        object.__setattr__(self, "language", language_code(self.language) if self.language else None)
        if self.task not in get_args(SpeechTask):
            problem = f"must be one of {', '.join(get_args(SpeechTask))}"
            raise UsageError(problem, field="task", value=self.task)
        for name in ("beam", "seed"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(name, given))
        for name in ("language", "prompt"):
            if (given := getattr(self, name)) is not None:
                check_text(name, given)
        if not self.temperatures:
            raise UsageError("needs one temperature or more", field="temperatures")
        for temperature in self.temperatures:
            check_number("temperatures", temperature)
            if not (temperature == 0 or 1e-3 <= temperature <= 5.0):
                raise UsageError("must be 0, or 0.001 to 5", field="temperatures", value=temperature)
        beams, penalty = self.beam, self.length_penalty
        for name, value, good, wanted in (
            ("beam", beams, beams is None or 1 <= beams <= MAX_BEAM, f"1 to {MAX_BEAM}"),
            ("patience", self.patience, 0.0 < self.patience <= 10.0, "above 0 and at most 10"),
            ("length_penalty", penalty, penalty is None or 0.0 <= penalty <= 1.0, "0 to 1"),
            ("seed", self.seed, self.seed is None or 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
        ):
            if not good:
                raise UsageError(f"must be {wanted}", field=name, value=value)
        if self.words and not self.timestamps:
            raise UsageError("needs timestamps", field="words")

    def rule(self, temperature: float) -> Rule:
        """Return the rule that accepts drafts: by blocks only where nothing has to be repeatable."""
        is_asked_for = self.temperatures == (temperature,)
        return "block" if temperature > 0 and is_asked_for and self.seed is None else "match"
