"""The outcome of a transcription: segments and words with their times, and statistics."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edgespec.apps.speech.options import TranscriptFormat
from edgespec.platform.metering import Measurement


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word, with the space before it, and when it was spoken."""

    text: str
    start_s: float
    end_s: float
    probability: float
    """Mean probability of its tokens."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech, mostly a sentence or a part of one."""

    id: int
    start_s: float
    end_s: float
    text: str
    """Its text, which mostly begins with a space."""
    tokens: tuple[int, ...]
    """Its tokens, timestamps among them."""
    temperature: float
    avg_logprob: float
    """Mean logprob of the tokens of its window, under the rules."""
    compression_ratio: float
    """Bytes of the window's text over those of its compressed form."""
    no_speech_prob: float
    """Probability that nobody speaks in the window; NaN where the model has no word for it."""
    seek_s: float
    """Start of its window."""
    words: tuple[SpokenWord, ...] = ()


@dataclass(frozen=True, slots=True)
class Doubt:
    """A stretch of sound whose text is uncertain, or was left out."""

    start_s: float
    end_s: float
    reason: str
    kept: bool
    """Whether the transcript has the text."""
    text: str


@dataclass(slots=True)
class SpeechStats:
    """Counts and seconds of a transcription, added up over its windows."""

    audio_s: float = 0.0
    """Length of the sound."""
    transcribed_s: float = 0.0
    """Length of what was transcribed of it so far."""
    total_s: float = 0.0
    mel_s: float = 0.0
    encode_s: float = 0.0
    """Time of the target's encoder."""
    decode_s: float = 0.0
    """Time in which tokens were decoded: target, draft and rules."""
    words_s: float = 0.0
    draft_encode_s: float = 0.0
    """Time of the draft's encoder."""
    n_windows: int = 0
    n_decodings: int = 0
    """Decodings, those at higher temperatures among them."""
    n_tokens: int = 0
    """Emitted tokens, timestamps among them."""
    n_steps: int = 0
    """Passes of the target over a window's text."""
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Passes of the exact loop by (drafted, accepted) tokens, those over prompts left out."""

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of sound transcribed per second of work."""
        return self.transcribed_s / self.total_s if self.total_s else None

    @property
    def n_drafted(self) -> int:
        """Tokens that were drafted."""
        return sum(n * drafted for (drafted, _), n in self.steps.items())

    @property
    def n_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(n * accepted for (_, accepted), n in self.steps.items())

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def tau(self) -> float | None:
        """Tokens emitted for each pass of the target."""
        return self.n_tokens / self.n_steps if self.n_steps else None


@dataclass(slots=True)
class Transcript:
    """The text of a recording, so far or in all."""

    language: str
    """Code of the language, as given or detected."""
    language_probability: float | None = None
    """Probability of the language, where it was detected."""
    segments: list[Segment] = field(default_factory=list)
    stats: SpeechStats = field(default_factory=SpeechStats)
    complete: bool = False
    """Whether the sound was transcribed to its end."""
    energy: Measurement | None = None
    doubts: list[Doubt] = field(default_factory=list)
    """Stretches whose text is uncertain, or was left out."""
    silent: bool = False
    """Whether all of the recording so far is silence."""

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(segment.text for segment in self.segments).strip()


def as_object(segment: Segment, *, words: bool) -> dict[str, Any]:
    """Return a segment as an object for JSON, with OpenAI's names."""
    found: dict[str, Any] = {
        "id": segment.id,
        "seek": round(100 * segment.seek_s),
        "start": round(segment.start_s, 2),
        "end": round(segment.end_s, 2),
        "text": segment.text,
        "tokens": list(segment.tokens),
        **{name: getattr(segment, name) for name in ("temperature", "avg_logprob", "compression_ratio")},
        "no_speech_prob": None if math.isnan(segment.no_speech_prob) else segment.no_speech_prob,
    }
    if words:
        found["words"] = [
            {
                "word": word.text,
                "start": round(word.start_s, 2),
                "end": round(word.end_s, 2),
                "probability": word.probability,
            }
            for word in segment.words
        ]
    return found


def write_transcript(transcript: Transcript, form: TranscriptFormat, *, words: bool = False) -> str:
    """Return the whole transcript in a form; ends with a newline unless it is empty.

    `words`: whether JSON has the words, and subtitles a cue for each of them.
    """
    if form == "json":
        return json.dumps(transcript_object(transcript, words=words), ensure_ascii=False) + "\n"
    return opening(form) + "".join(cues(transcript.segments, form, words=words))


def opening(form: TranscriptFormat) -> str:
    """The beginning of a file of this form."""
    return "WEBVTT\n\n" if form == "vtt" else ""


def cues(
    segments: Iterable[Segment], form: TranscriptFormat, *, words: bool = False, first: int = 1
) -> Iterator[str]:
    """Yield each segment, or each of its `words`, in a form; cues are numbered from `first`."""
    if form == "txt":
        for segment in segments:
            yield f"{one_line(segment.text)}\n"
        return
    for n, (start_s, end_s, text) in enumerate(_timed(segments, words=words), first):
        times = f"{clock(start_s, form)} --> {clock(end_s, form)}"
        head = f"{n}\n{times}" if form == "srt" else times
        line = one_line(text).replace("-->", "->")
        if form == "vtt":
            line = line.replace("&", "&amp;").replace("<", "&lt;")
        yield f"{head}\n{line}\n\n"


def _timed(segments: Iterable[Segment], *, words: bool) -> Iterator[tuple[float, float, str]]:
    for segment in segments:
        if words and segment.words:
            yield from ((word.start_s, word.end_s, word.text) for word in segment.words)
        else:
            yield segment.start_s, segment.end_s, segment.text


def one_line(text: str) -> str:
    """Return text without line breaks and space around it."""
    return " ".join(text.split())


def clock(seconds: float, form: TranscriptFormat) -> str:
    """Return a time in the form of subtitles: 00:01:02,345 in SubRip, 00:01:02.345 in WebVTT."""
    ms = max(0, round(1000 * seconds))
    rest, ms = divmod(ms, 1000)
    minutes, whole_s = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole_s:02}{',' if form == 'srt' else '.'}{ms:03}"


def transcript_object(transcript: Transcript, *, words: bool = False) -> dict[str, Any]:
    """Return the transcript as an object for JSON: OpenAI's `verbose_json` without the task."""
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": round(transcript.stats.audio_s, 2),
        "segments": [as_object(segment, words=words) for segment in transcript.segments],
    }


def remarks(transcript: Transcript) -> list[str]:
    """Return lines: why there is no text, which text is uncertain, and what was left out."""
    length = f"{transcript.stats.transcribed_s:.1f} s"
    found = []
    if transcript.silent and transcript.complete:
        found.append(f"silent: no sound above -80 dB in {length}")
    elif transcript.complete and not transcript.segments and not transcript.doubts:
        found.append(f"no speech in {length} of sound")
    for kept, what in ((True, "uncertain"), (False, "left out")):
        spans: list[list[Any]] = []
        for doubt in transcript.doubts:
            if (
                doubt.kept == kept
                and spans
                and spans[-1][2] == doubt.reason
                and doubt.start_s - spans[-1][1] < 1
            ):
                spans[-1][1] = doubt.end_s
            elif doubt.kept == kept:
                spans.append([doubt.start_s, doubt.end_s, doubt.reason])
        if spans:
            times = (f"{clock(a, 'vtt')} to {clock(b, 'vtt')} ({reason})" for a, b, reason in spans)
            found.append(f"{what}: {', '.join(times)}")
    return found


_SAME_NAME = (
    *("real_time_factor", "mel_s", "encode_s", "decode_s", "words_s", "draft_encode_s"),
    *("tau", "n_drafted", "n_accepted", "draft_acceptance_rate"),
)


def stats_object(transcript: Transcript) -> dict[str, Any]:
    """The statistics of a transcription, for `--json`."""
    stats = transcript.stats
    return {
        "complete": transcript.complete,
        "language_probability": transcript.language_probability,
        "silent": transcript.silent,
        "doubts": [
            {
                "start": round(doubt.start_s, 2),
                "end": round(doubt.end_s, 2),
                **{name: getattr(doubt, name) for name in ("reason", "kept", "text")},
            }
            for doubt in transcript.doubts
        ],
        "seconds": stats.total_s,
        "windows": stats.n_windows,
        "decodings": stats.n_decodings,
        "tokens": stats.n_tokens,
        "passes": stats.n_steps,
        **{name: getattr(stats, name) for name in _SAME_NAME},
        "energy": transcript.energy.facts(stats.n_tokens) if transcript.energy else None,
    }
