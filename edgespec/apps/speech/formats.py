"""Forms of a transcript: plain text, subtitles (SubRip, WebVTT), JSON with OpenAI's names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from edgespec.apps.speech.choices import TranscriptFormat
from edgespec.apps.speech.transcript import Segment, Transcript, as_object


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
        yield f"{head}\n{_cue_text(text, form)}\n\n"


def _timed(segments: Iterable[Segment], *, words: bool) -> Iterator[tuple[float, float, str]]:
    for segment in segments:
        if words and segment.words:
            yield from ((word.start_s, word.end_s, word.text) for word in segment.words)
        else:
            yield segment.start_s, segment.end_s, segment.text


def _cue_text(text: str, form: TranscriptFormat) -> str:
    line = one_line(text).replace("-->", "->")
    if form == "vtt":
        line = line.replace("&", "&amp;").replace("<", "&lt;")
    return line


def one_line(text: str) -> str:
    """Return text without line breaks and space around it."""
    return " ".join(text.split())


def clock(seconds: float, form: TranscriptFormat) -> str:
    """Return a time as subtitles have it: 00:01:02,345 in SubRip, 00:01:02.345 in WebVTT."""
    ms = max(0, round(1000 * seconds))
    rest, ms = divmod(ms, 1000)
    minutes, whole_s = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole_s:02}{',' if form == 'srt' else '.'}{ms:03}"


def transcript_object(transcript: Transcript, *, words: bool = False) -> dict[str, Any]:
    """Return the transcript as JSON has it: OpenAI's `verbose_json` without the task."""
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": round(transcript.stats.audio_s, 2),
        "segments": [as_object(segment, words=words) for segment in transcript.segments],
    }


def remarks(transcript: Transcript) -> list[str]:
    """Return in a line each why there is no text, which text is uncertain, and what was left out."""
    length = f"{transcript.stats.heard_s:.1f} s"
    found = []
    if transcript.silent and transcript.complete:
        found.append(f"silent: no sound above -80 dB in {length}")
    elif transcript.complete and not transcript.segments and not transcript.doubts:
        found.append(f"no speech was heard in {length} of sound")
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
                "reason": doubt.reason,
                "kept": doubt.kept,
                "text": doubt.text,
            }
            for doubt in transcript.doubts
        ],
        "seconds": stats.total_s,
        "real_time_factor": stats.real_time_factor,
        "mel_s": stats.mel_s,
        "encode_s": stats.encode_s,
        "decode_s": stats.decode_s,
        "words_s": stats.words_s,
        "draft_encode_s": stats.draft_encode_s,
        "windows": stats.n_windows,
        "decodings": stats.n_decodings,
        "tokens": stats.n_tokens,
        "passes": stats.n_steps,
        "tau": stats.tau,
        "n_drafted": stats.n_drafted,
        "n_accepted": stats.n_accepted,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "draft_notes": stats.draft_notes,
        "energy": transcript.energy.facts(stats.n_tokens) if transcript.energy else None,
    }
