"""Voice activity: where somebody speaks, the joined sound of those spans, and their times in the recording.

The detector is WebRTC's (the extra `edgespec[vad]`): 85 kB, 10 us for 30 ms of sound. Silero's finds speech
in noise better, but its packages bring an onnxruntime, or a second ggml of the same name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import SAMPLE_RATE, Floats
from edgespec.errors import EdgespecError

_FRAME = 480  # samples: 30 ms
_STRICTNESS = 2  # of 0 to 3
_SMOOTHED = 11  # frames of which a majority has speech
_PAD_S = 0.4  # kept around speech
_LONGEST_PAUSE_S = 2.0  # that is kept within speech
_SHORTEST_S = 0.25
_PAUSE_S = 1.0  # between joined parts
_NEAR_S = 1e-3


class Span(NamedTuple):
    """A stretch of samples in which somebody speaks."""

    start: int
    end: int


def check_detector() -> None:
    """Raise EdgespecError if the detector is not installed."""
    if importlib.util.find_spec("webrtcvad") is None:
        raise EdgespecError("--vad needs webrtcvad: pip install 'edgespec[vad]'")


def speech_spans(samples: Floats) -> list[Span]:
    """Return where somebody speaks in `samples` (16 kHz, shape (n,)), with a little before and after.

    Raises EdgespecError if the detector is not installed.
    """
    check_detector()
    import webrtcvad

    detector = webrtcvad.Vad(_STRICTNESS)
    n_frames = len(samples) // _FRAME
    data = (np.clip(samples[: n_frames * _FRAME], -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    size = 2 * _FRAME
    found = [detector.is_speech(data[i * size : (i + 1) * size], SAMPLE_RATE) for i in range(n_frames)]
    return spans_of(np.array(found, np.bool_), len(samples))


def spans_of(is_speech: npt.NDArray[np.bool_], n_samples: int) -> list[Span]:
    """Return the spans of `n_samples` in which frames of 30 ms have speech: smoothed, padded and joined."""
    if not is_speech.any():
        return []
    smooth = np.convolve(is_speech, np.ones(_SMOOTHED), mode="same") > _SMOOTHED / 2
    edges = np.flatnonzero(np.diff(smooth, prepend=False, append=False))
    pad, longest = round(_PAD_S * SAMPLE_RATE), round(_LONGEST_PAUSE_S * SAMPLE_RATE)
    spans: list[Span] = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if (last - first) * _FRAME < _SHORTEST_S * SAMPLE_RATE:
            continue
        start, end = max(0, int(first) * _FRAME - pad), min(n_samples, int(last) * _FRAME + pad)
        if spans and start - spans[-1].end < longest - 2 * pad:
            spans[-1] = Span(spans[-1].start, end)
        else:
            spans.append(Span(start, end))
    return spans


class SpokenParts:
    """The spoken parts of a recording with short pauses between them, and when each of them was."""

    def __init__(self, samples: Floats, spans: Sequence[Span]) -> None:
        """Join the `spans` of `samples` with pauses, which show the model that something else begins."""
        pause = np.zeros(round(_PAUSE_S * SAMPLE_RATE), np.float32)
        parts = [part for start, end in spans for part in (samples[start:end], pause)]
        self.samples: Floats = np.concatenate(parts[:-1]) if parts else samples[:0]
        """The joined sound."""
        self._lengths_s = np.array([end - start for start, end in spans], np.float64) / SAMPLE_RATE
        self._begins_s = np.array([start for start, _ in spans], np.float64) / SAMPLE_RATE  # in the recording
        whole = self._lengths_s + _PAUSE_S
        self._starts_s = np.cumsum(whole) - whole  # in the joined sound

    def start_s(self, joined_s: float) -> float:
        """Return the time in the recording, in seconds, of a beginning at `joined_s` in the joined sound."""
        if not len(self._starts_s):
            return joined_s
        part = self._part(joined_s + _NEAR_S)
        within = joined_s - float(self._starts_s[part])
        if within > self._lengths_s[part] - _NEAR_S and part + 1 < len(self._starts_s):
            return float(self._begins_s[part + 1])  # in the pause
        return float(self._begins_s[part]) + within

    def end_s(self, joined_s: float) -> float:
        """Return the time in the recording, in seconds, of an end at `joined_s` in the joined sound."""
        if not len(self._starts_s):
            return joined_s
        part = self._part(joined_s - _NEAR_S)
        within = min(joined_s - float(self._starts_s[part]), float(self._lengths_s[part]))
        return float(self._begins_s[part]) + within

    def _part(self, joined_s: float) -> int:
        return max(0, int(np.searchsorted(self._starts_s, joined_s, "right")) - 1)
