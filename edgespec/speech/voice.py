"""Voice activity: where somebody speaks, the sound of those places joined, and their times in the recording.

The detector is WebRTC's (the extra `edgespec[vad]`): 85 kB, 10 us for 30 ms of sound. Silero's finds speech
in noise better, but its packages bring an onnxruntime, or a ggml whose name is that of the one here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError
from edgespec.speech.mel import SAMPLE_RATE

Samples = npt.NDArray[np.float32]

_FRAME = 480  # samples: 30 ms
_STRICTNESS = 2  # of 0 to 3
_SMOOTHED = 11  # frames of which a majority has speech
_PAD_S = 0.4  # kept around speech
_LONGEST_PAUSE_S = 2.0  # that is kept within speech
_SHORTEST_S = 0.25


class Span(NamedTuple):
    """A stretch of samples in which somebody speaks."""

    start: int
    end: int


def check_detector() -> None:
    """Raise EdgespecError if the detector is not installed."""
    if importlib.util.find_spec("webrtcvad") is None:
        raise EdgespecError("--vad needs webrtcvad: pip install 'edgespec[vad]'")


def speech_spans(samples: Samples) -> list[Span]:
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
    """The spoken parts of a recording, one after the other, and when each of them was."""

    def __init__(self, samples: Samples, spans: Sequence[Span]) -> None:
        """Join the `spans` of `samples`."""
        parts = [samples[start:end] for start, end in spans]
        self.samples: Samples = np.concatenate(parts) if parts else samples[:0]
        """The joined sound."""
        lengths = np.array([len(part) for part in parts], np.int64)
        self._starts_s = (np.cumsum(lengths) - lengths) / SAMPLE_RATE  # of each part in the joined sound
        self._shifts_s = np.array([start for start, _ in spans]) / SAMPLE_RATE - self._starts_s

    def start_s(self, joined_s: float) -> float:
        """Return when something begins in the recording that begins at `joined_s` of the joined sound."""
        return self._restored(joined_s, "right")

    def end_s(self, joined_s: float) -> float:
        """Return when something ends in the recording that ends at `joined_s` of the joined sound."""
        return self._restored(joined_s, "left")

    def _restored(self, joined_s: float, side: str) -> float:
        if not len(self._starts_s):
            return joined_s
        at = np.searchsorted(self._starts_s, joined_s + (1e-3 if side == "right" else -1e-3), "right")
        return joined_s + float(self._shifts_s[max(0, int(at) - 1)])
