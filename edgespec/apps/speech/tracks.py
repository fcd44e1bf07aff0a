"""The tracks of sound in films and compressed files, which PyAV decodes, each sample at its time.

A track that begins later than the file, and a gap in it, become silence: times are those of the film.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.apps.speech.wav import Mixer
from edgespec.errors import EdgespecError

Floats = npt.NDArray[np.float32]

BrokenFn = Callable[[float, str], None]
"""Told after how many seconds something is damaged, and what."""

_LEAST_GAP_S = 0.25  # frames' times are rounded, and jump a little
_MOST_GAP_S = 600.0  # where a file does not know how long it is
_BLOCK = SAMPLE_RATE  # samples that are mixed at once
_DURATION = re.compile(r"(\d+):(\d+):(\d+(?:\.\d+)?)")


def import_av(name: str) -> Any:  # noqa: ANN401 - a library that may be missing
    """Return PyAV for the file called `name`. Raises EdgespecError if it is missing."""
    try:
        import av
        import av.error
    except ImportError:
        raise EdgespecError(f"{name}: no WAV file; others need PyAV: pip install 'edgespec[audio]'") from None
    av.logging.set_level(av.logging.PANIC)  # what is wrong is said in one line of ours
    return av


class Track:
    """One track of sound of an open container."""

    def __init__(self, av: Any, container: Any, stream: Any, mixer: Mixer, on_broken: BrokenFn) -> None:  # noqa: ANN401
        """Decode `stream`; packets that are damaged are left out, and `on_broken` is told of the first."""
        self._av, self._container, self._stream = av, container, stream
        self._mixer, self._on_broken = mixer, on_broken
        self._origin_s = container.start_time / av.time_base if container.start_time else 0.0
        self._file_s = container.duration / av.time_base if container.duration else None
        self._resamplers: list[Any] = []
        self.end_s = 0.0
        """Time up to which it was decoded."""

    @property
    def expected_s(self) -> float:
        """Time at which the track ends, as the file says; 0 if it does not."""
        stream = self._stream
        if found := _DURATION.fullmatch(stream.metadata.get("DURATION", "")):  # Matroska's
            hours, minutes, seconds = map(float, found.groups())
            return 3600 * hours + 60 * minutes + seconds - self._origin_s
        if stream.duration:
            start = stream.start_time or 0
            return float((start + stream.duration) * stream.time_base) - self._origin_s
        return 0.0 if self._container.streams.video else self._file_s or 0.0

    def blocks(self) -> Iterator[Floats]:
        """Yield the samples: one channel, 16 kHz."""
        parts: list[list[Floats]] = []
        for frame in self._frames():
            gap_s = self._gap_s(frame)
            if gap_s:
                yield from self._mixed(parts + self._flushed())
                parts = []
                yield from silence(round(gap_s * SAMPLE_RATE))
                self.end_s += gap_s
            self.end_s += frame.samples / frame.sample_rate
            parts += self._resampled(frame)
            if sum(len(part[0]) for part in parts) >= _BLOCK:
                yield from self._mixed(parts)
                parts = []
        yield from self._mixed(parts + self._flushed())

    def _frames(self) -> Iterator[Any]:
        is_told = False
        for packet in self._container.demux(self._stream):
            try:
                yield from packet.decode()
            except self._av.error.InvalidDataError as error:
                if not is_told:
                    self._on_broken(self.end_s, str(error.strerror))
                is_told = True

    def _gap_s(self, frame: Any) -> float:  # noqa: ANN401
        """Return the seconds between what was decoded and `frame`; 0 where its time cannot be right."""
        if frame.pts is None or frame.time_base is None:
            return 0.0
        start_s = float(frame.pts * frame.time_base) - self._origin_s
        most_s = self.end_s + _MOST_GAP_S if self._file_s is None else self._file_s
        gap_s = start_s - self.end_s
        return gap_s if gap_s >= _LEAST_GAP_S and start_s <= most_s else 0.0

    def _resampled(self, frame: Any) -> list[list[Floats]]:  # noqa: ANN401
        """Return what is done of a frame: one channel, and the channels of it, if there are several."""
        if not self._resamplers:
            # As OpenAI decodes: of floats, ffmpeg would add up channels to more than 1.
            layouts = ["mono"] + ([frame.layout.name] if frame.layout.nb_channels > 1 else [])
            self._resamplers = [
                self._av.AudioResampler(format="s16", layout=layout, rate=SAMPLE_RATE) for layout in layouts
            ]
        done = zip(*(one.resample(frame) for one in self._resamplers), strict=True)
        return [[_to_floats(one) for one in together] for together in done]

    def _flushed(self) -> list[list[Floats]]:
        """Return what the resamplers hold back, and end them."""
        rest: list[list[Floats]] = []
        with suppress(self._av.error.FFmpegError):  # nothing was decoded
            rest = self._resampled(None) if self._resamplers else []
        self._resamplers = []
        return rest

    def _mixed(self, parts: list[list[Floats]]) -> Iterator[Floats]:
        if not parts:
            return
        mono, *channels = map(np.concatenate, zip(*parts, strict=True))
        yield self._mixer.mix(channels[0], mono[:, 0]) if channels else mono[:, 0]


def silence(n: int) -> Iterator[Floats]:
    """Yield `n` samples of silence, a minute at once."""
    for start in range(0, n, 60 * SAMPLE_RATE):
        yield np.zeros(min(n - start, 60 * SAMPLE_RATE), np.float32)


def _to_floats(frame: Any) -> Floats:  # noqa: ANN401
    """Return samples, shape (n, n_channels)."""
    samples: Floats = frame.to_ndarray().reshape(-1, frame.layout.nb_channels).astype(np.float32)
    return samples / np.float32(1 << 15)


# ---- files that end early ----


def ends_early(file: BinaryIO) -> bool:
    """Return whether an Ogg or Matroska file (webm) is cut off, which its length does not tell."""
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(4)
    if start == b"OggS":
        return _ogg_ends_early(file, size)
    return start == b"\x1aE\xdf\xa3" and _matroska_ends_early(file, size)


def _ogg_ends_early(file: BinaryIO, size: int) -> bool:
    """Return whether the last page is none that ends a stream, or is not complete."""
    file.seek(max(0, size - (1 << 17)))  # a page has at most 65,307 bytes
    tail = file.read()
    at = tail.rfind(b"OggS")
    page = tail[at:] if at >= 0 else b""
    if len(page) < 27 or len(page) < 27 + page[26]:
        return True
    length = 27 + page[26] + sum(page[27 : 27 + page[26]])
    return not page[5] & 4 or length > len(page)


_SEGMENT, _CLUSTER = b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75"


def _matroska_ends_early(file: BinaryIO, size: int) -> bool:
    """Return whether an element goes on after the file's end. Those of unknown length are looked into."""
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(12)
        n_id = 9 - head[0].bit_length()
        if n_id > 4 or len(head) <= n_id:
            return n_id <= 4  # no element at all is other damage
        n_length = 9 - head[n_id].bit_length()
        if n_length > 8 or len(head) < n_id + n_length:
            return n_length <= 8
        value = int.from_bytes(head[n_id : n_id + n_length], "big") & ((1 << 7 * n_length) - 1)
        at += n_id + n_length
        if value == (1 << 7 * n_length) - 1:
            if head[:n_id] not in (_SEGMENT, _CLUSTER):
                return False
        else:
            at += value
    return at > size
