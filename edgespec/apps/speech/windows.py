"""Windows of a recording: which 30 seconds come next, and the segments that a window's tokens say.

As openai-whisper's transcribe.py: a window ends where its last complete segment ends, and the next begins
there. Frames are those of the spectrogram, 10 ms each; a timestamp's step is two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    n_heard: int
    """Frames after which the next window begins."""
    ends_with_speech: bool
    """Whether the last segment may go on in the next window."""


def split_window(
    tokens: Sequence[int], *, first_timestamp: int, n_frames: int, to_end: bool = False
) -> Split:
    """Return the segments of a window's `tokens` (without the end) that has `n_frames` of sound.

    Where two timestamps stand side by side one segment ends and another begins. Text after the last pair is
    left to the next window, unless a single timestamp ends it: then nobody speaks in the rest. `to_end`: no
    window hears it again, so that it is a segment up to the window's end. Segments end with the sound.
    """
    is_time = [token >= first_timestamp for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    single_end = is_time[-2:] == [False, True]
    if not ends:
        return _undivided(tokens, first_timestamp, n_frames)
    if single_end:
        ends.append(len(tokens))
    pieces, last = [], 0
    for end in ends:
        part = tuple(tokens[last:end])
        start_step, end_step = part[0] - first_timestamp, part[-1] - first_timestamp
        pieces.append(_piece(_FRAMES_PER_STEP * start_step, _FRAMES_PER_STEP * end_step, part, n_frames))
        last = end
    rest = tokens[last:]
    to_end = to_end and not all(is_time[last:])
    if to_end:
        pieces.append(_piece(_FRAMES_PER_STEP * (rest[0] - first_timestamp), n_frames, rest, n_frames))
    n_heard = n_frames if single_end or to_end else min(n_frames, pieces[-1].end)
    return Split(tuple(pieces), n_heard, not single_end)


def _piece(start: int, end: int, tokens: Sequence[int], n_frames: int) -> Piece:
    """Return a piece that ends with the sound at the latest; without length it stays so."""
    if start < end:
        end = min(end, n_frames)
        start = min(start, max(0, end - _FRAMES_PER_STEP))
    return Piece(start, end, tuple(tokens))


def _undivided(tokens: Sequence[int], first_timestamp: int, n_frames: int) -> Split:
    """Return the window as one segment, up to its last timestamp if it has one."""
    steps = [token - first_timestamp for token in tokens if token >= first_timestamp]
    end = _FRAMES_PER_STEP * steps[-1] if steps and steps[-1] else n_frames
    return Split((_piece(0, end, tokens, n_frames),), n_frames, False)
