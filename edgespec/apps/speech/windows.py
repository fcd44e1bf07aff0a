"""Windows of a recording: which 30 seconds come next, the segments of a window's tokens, times of words.

As openai-whisper's transcribe.py: a window ends where its last complete segment ends, and the next begins
there. Frames are those of the spectrogram, 10 ms each; a timestamp's step is two of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import SpeechRules, TimestampState, log_total
from edgespec.apps.speech.tokenizer import SECONDS_PER_TIMESTAMP, WhisperTokenizer
from edgespec.apps.speech.transcript import Segment, SpokenWord
from edgespec.apps.speech.whisper_model import DecoderCache, SequenceBatch
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows

# ---- beam search over a window's text, as openai-whisper's: all beams in one pass of the decoder ----


@dataclass(slots=True)
class Beam:
    """One of the texts that a beam search continues."""

    tokens: list[int]
    logprob: float
    """Sum over its tokens."""
    position: TimestampState


class Decoded(NamedTuple):
    """One decoding of a window."""

    tokens: list[int]
    """The tokens without the end."""
    avg_logprob: float
    ended: bool
    """Whether the model ended it; else the limit of its tokens did."""
    n_tokens: int
    """Tokens of the longest text that was looked at."""
    n_passes: int


class BeamSearch:
    """Searches for the likeliest text of one window."""

    def __init__(
        self, cache: DecoderCache, rules: SpeechRules, options: SpeechOptions, *, n_ctx: int
    ) -> None:
        """Search the texts that `rules` allow, in `cache`, whose sequence 0 holds the prompt."""
        self._cache = cache
        self._rules = rules
        self._n_beams = options.beam or 1
        self._n_wanted = max(1, round(self._n_beams * options.patience))
        self._penalty = options.length_penalty
        self._n_ctx = n_ctx
        self._finished: dict[tuple[int, ...], float] = {}
        self._n_passes = 1
        self._sampler = SamplingParams(temperature=0.0).sampler(rules.tokens.n_vocab, 0)

    def run(self, row: Rows, n_prompt: int) -> Decoded:
        """Return the best text after a prompt of `n_prompt` tokens; `row`: the logits after it."""
        end = self._rules.tokens.end
        beams = [Beam([], 0.0, TimestampState(self._rules.tokens))]
        rows: Sequence[Rows] = [row]
        for n_written in range(1, self._n_ctx // 2 + 1):
            beams, sources = self._next(beams, rows)
            is_full = n_written == self._n_ctx // 2 or n_prompt + n_written > self._n_ctx
            if is_full or not beams or len(self._finished) >= self._n_wanted:
                break
            self._cache.reorder(sources)
            batch = [SequenceBatch(i, [beam.tokens[-1]]) for i, beam in enumerate(beams)]
            rows = [found[0] for found in self._cache.forward(batch)]
            self._n_passes += 1
        if len(self._finished) < self._n_beams:
            for beam in sorted(beams, key=lambda beam: beam.logprob, reverse=True):
                if len(self._finished) >= self._n_beams:
                    break
                self._finished[(*beam.tokens, end)] = beam.logprob
        best = max(self._finished, key=self._score)
        tokens = list(best[:-1])
        longest = max(map(len, self._finished))
        ended = len(tokens) < self._n_ctx // 2
        return Decoded(tokens, self._finished[best] / (len(tokens) + 1), ended, longest, self._n_passes)

    def _score(self, text: tuple[int, ...]) -> float:
        """Return the score of a finished text: its logprob over its length, without the end token."""
        n = len(text) - 1
        length = n if self._penalty is None else ((5 + n) / 6) ** self._penalty
        logprob = self._finished[text]
        return logprob / length if length else -math.inf

    def _next(self, beams: Sequence[Beam], rows: Sequence[Rows]) -> tuple[list[Beam], list[int]]:
        """Return the best continuations, and which beam each comes from; store those that are finished."""
        candidates: list[tuple[float, int, int]] = []  # logprob, beam, token
        for i, (beam, row) in enumerate(zip(beams, rows, strict=True)):
            self._rules.forbid(row, beam.position)
            for token, probability in self._sampler.likeliest(row, self._n_beams + 1):
                if probability > 0.0:
                    candidates.append((beam.logprob + math.log(probability), i, token))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        following: list[Beam] = []
        sources: list[int] = []
        ended: list[tuple[tuple[int, ...], float]] = []
        for logprob, i, token in candidates:
            tokens = [*beams[i].tokens, token]
            if token == self._rules.tokens.end:
                ended.append((tuple(tokens), logprob))
                continue
            following.append(Beam(tokens, logprob, beams[i].position.after(token)))
            sources.append(i)
            if len(following) == self._n_beams:
                break
        for text, logprob in ended:
            if len(self._finished) >= self._n_wanted:
                break
            self._finished[text] = logprob
        return following, sources


WINDOW_FRAMES = 3000
FRAME_S = 0.01
_FRAMES_PER_STEP = 2


class Piece(NamedTuple):
    """A segment of a window's text."""

    start: int
    """Frames after the window's start."""
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The segments of a window, and where the next window begins."""

    pieces: tuple[Piece, ...]
    n_read: int
    """Frames after which the next window begins."""
    ends_with_speech: bool
    """Whether the last segment may continue in the next window."""


def split_window(tokens: Sequence[int], *, first_timestamp: int, n_frames: int) -> Split:
    """Return the segments of a window's `tokens` (without the end) that has `n_frames` of sound.

    Where two timestamps stand side by side one segment ends and another begins. Text after the last pair is
    left to the next window, unless a single timestamp ends it: then nobody speaks in the rest. Segments end
    with the sound.
    """
    is_time = [token >= first_timestamp for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    single_end = is_time[-2:] == [False, True]
    if not ends:
        steps = [token - first_timestamp for token in tokens if token >= first_timestamp]
        end = _FRAMES_PER_STEP * steps[-1] if steps and steps[-1] else n_frames
        return Split((_piece(0, end, tokens, n_frames),), n_frames, False)
    if single_end:
        ends.append(len(tokens))
    pieces, last = [], 0
    for end in ends:
        part = tuple(tokens[last:end])
        start_step, end_step = part[0] - first_timestamp, part[-1] - first_timestamp
        pieces.append(_piece(_FRAMES_PER_STEP * start_step, _FRAMES_PER_STEP * end_step, part, n_frames))
        last = end
    n_read = n_frames if single_end else min(n_frames, pieces[-1].end)
    return Split(tuple(pieces), n_read, not single_end)


def _piece(start: int, end: int, tokens: Sequence[int], n_frames: int) -> Piece:
    """Return a piece cut to the end of the sound; one without length stays so."""
    if start < end:
        end = min(end, n_frames)
        start = min(start, max(0, end - _FRAMES_PER_STEP))
    return Piece(start, end, tuple(tokens))


# ---- times of words: where in the sound the alignment heads listen while each word is written ----
# One pass of the decoder over a window's text gives their attention, and dynamic time warping the best path
# through it. The rules after that (long words at pauses, punctuation) are openai-whisper's timing.py.

Path = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]

_MEDIAN_WIDTH = 7
_OPENING = "\"'“¿([{-"
_WIDE = "\u3002\uff0c\uff01\uff1f\uff1a\u3001"  # stop, comma, exclamation, question, colon, list comma
_CLOSING = f"\"'.,!?:”)]}}{_WIDE}"
_SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
_LONGEST_MEDIAN_S = 0.7
_LEAST = np.float32(1e-20)  # that is divided by
_FRAMES_PER_POSITION = 2


@dataclass(slots=True)
class _Timed:
    """A word, before it belongs to a segment."""

    text: str
    tokens: list[int]
    start: float
    """Seconds after the window's start."""
    end: float
    probability: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class WordTimer:
    """Finds the times of words, window after window of one recording."""

    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        """Split text into words with `tokenizer`."""
        self._tokenizer = tokenizer
        self._last_end_s = 0.0  # of speech so far

    def time(
        self,
        segments: Sequence[Segment],
        cache: DecoderCache,
        start: Sequence[int],
        n_frames: int,
        language: str,
    ) -> list[Segment]:
        """Return a window's segments with their words, whose times replace the segments' where they differ.

        `start`: the tokens that begin the window's text. `n_frames`: its length in frames of 10 ms.
        """
        if not segments:
            return []
        texts = [[token for token in one.tokens if token < self._tokenizer.eot] for one in segments]
        words = self._align([token for text in texts for token in text], cache, start, n_frames, language)
        durations = [word.duration for word in words if word.duration]
        median = min(_LONGEST_MEDIAN_S, float(np.median(durations))) if durations else 0.0
        if durations:
            shorten_at_sentence_ends(words, 2 * median)
        merge_punctuation(words)
        found, at = [], 0
        for segment, text in zip(segments, texts, strict=True):
            own, n_tokens = [], 0
            while at < len(words) and n_tokens < len(text):
                n_tokens += len(words[at].tokens)
                if words[at].text:
                    own.append(words[at])
                at += 1
            found.append(self._placed(segment, own, median, segment.seek_s + n_frames * FRAME_S))
        return found

    def _align(
        self, text: Sequence[int], cache: DecoderCache, start: Sequence[int], n_frames: int, language: str
    ) -> list[_Timed]:
        """Return the words of `text` and when they are spoken, seconds after the window's start."""
        if not text:
            return []
        tokens = [*start, self._tokenizer.no_timestamps, *text, self._tokenizer.eot]
        n_start = len(start)
        weights, logits = cache.cross_attention(tokens, len(text) + 2)
        weights = weights[:, :, : max(1, n_frames // _FRAMES_PER_POSITION)]
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), _LEAST)  # of the sound alone
        cost = -sharpened(weights)[n_start:-1]
        rows, columns = warp(cost)
        words, tokens_of = self._tokenizer.split_to_words([*text, self._tokenizer.eot], language)
        if len(words) <= 1:
            return []
        below_end = logits[: len(text), : self._tokenizer.eot]
        chances = [
            math.exp(float(row[token]) - log_total(row)) for row, token in zip(below_end, text, strict=True)
        ]
        bounds = np.cumsum([0, *(len(one) for one in tokens_of[:-1])])
        moves = np.diff(rows, prepend=-1) > 0
        times = columns[moves] * SECONDS_PER_TIMESTAMP
        return [
            _Timed(word, list(ids), float(times[a]), float(times[b]), float(np.mean(chances[a:b])))
            for word, ids, a, b in zip(words, tokens_of, bounds[:-1], bounds[1:], strict=False)
        ]

    def _placed(self, segment: Segment, words: list[_Timed], median: float, latest_s: float) -> Segment:
        """Return `segment` with its words, timed from the recording's start, none after `latest_s`.

        The first words after a pause, and the last, are shortened where they are implausibly long, or the
        segment's own times contradict them.
        """
        if not words:
            return segment
        offset = segment.seek_s
        for word in words:
            word.start, word.end = round(offset + word.start, 2), round(offset + word.end, 2)
        self._cut_after_pause(words, median)
        first, last = words[0], words[-1]
        start, end = segment.start_s, segment.end_s
        if start < first.end and start - 0.5 > first.start:
            first.start = max(0.0, min(first.end - median, start))
        else:
            start = first.start
        if end > last.start and end + 0.5 < last.end:
            last.end = max(last.start + median, end)
        else:
            end = last.end
        for word in words:
            word.end = min(word.end, latest_s)
            word.start = min(word.start, word.end)
        start, end = min(start, latest_s), min(end, latest_s)
        self._last_end_s = end
        spoken = tuple(SpokenWord(word.text, word.start, word.end, word.probability) for word in words)
        return replace(segment, start_s=start, end_s=end, words=spoken)

    def _cut_after_pause(self, words: list[_Timed], median: float) -> None:
        first, longest = words[0], 2 * median
        if first.end - self._last_end_s <= 4 * median:
            return
        second = words[1] if len(words) > 1 else None
        if first.duration > longest or (second and second.end - first.start > 2 * longest):
            if second and second.duration > longest:
                first.end = second.start = max(second.end / 2, second.end - longest)
            first.start = max(0.0, first.end - longest)


def sharpened(weights: Floats) -> Floats:
    """Return attention weights (n_heads, n_tokens, n) as one matrix (n_tokens, n) that follows the sound.

    Each position's weights are normalised over the tokens, smoothed by a median, and averaged over the heads.
    """
    mean = weights.mean(axis=1, keepdims=True)
    deviation = weights.std(axis=1, keepdims=True)
    normalised = (weights - mean) / np.maximum(deviation, _LEAST)
    return np.asarray(median_filter(normalised, _MEDIAN_WIDTH).mean(axis=0), np.float32)


def median_filter(values: Floats, width: int) -> Floats:
    """Return the running median over the last dimension; the ends are mirrored."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.asarray(np.partition(windows, half, axis=-1)[..., half], np.float32)


def warp(cost: Floats) -> Path:
    """Return the cheapest path through `cost` (n_tokens, n) from corner to corner: rows and columns.

    Dynamic time warping; steps are one down, one right or both. The table is filled diagonal by diagonal, so
    that numpy computes each of them at once.
    """
    n, m = cost.shape
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0.0
    came = np.zeros((n + 1, m + 1), np.int8)
    came[0, :], came[:, 0] = 2, 1
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = cost[i - 1, j - 1] + np.choose(step, [both, down, right])
        came[i, j] = step
    rows, columns, i, j = [], [], n, m
    while i > 0 or j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        step_here = came[i, j]
        i -= step_here != 2
        j -= step_here != 1
    return np.array(rows[::-1]), np.array(columns[::-1])


def shorten_at_sentence_ends(words: Sequence[_Timed], longest: float) -> None:
    """Cut words that last longer than `longest` seconds at the end of a sentence: they hold a pause."""
    for before, word in itertools.pairwise(words):
        if word.duration <= longest:
            continue
        if word.text in _SENTENCE_ENDS:
            word.end = word.start + longest
        elif before.text in _SENTENCE_ENDS:
            word.start = word.end - longest


def merge_punctuation(words: Sequence[_Timed]) -> None:
    """Join punctuation to the word that it opens or closes; the joined entries are left empty."""
    following = len(words) - 1
    for i in range(len(words) - 2, -1, -1):
        word = words[i]
        if word.text.startswith(" ") and word.text.strip() in _OPENING:
            _move(word, words[following], before=True)
        else:
            following = i
    previous = 0
    for i in range(1, len(words)):
        if not words[previous].text.endswith(" ") and words[i].text in _CLOSING:
            _move(words[i], words[previous], before=False)
        else:
            previous = i


def _move(word: _Timed, into: _Timed, *, before: bool) -> None:
    if before:
        into.text, into.tokens = word.text + into.text, word.tokens + into.tokens
    else:
        into.text, into.tokens = into.text + word.text, into.tokens + word.tokens
    word.text, word.tokens = "", []
