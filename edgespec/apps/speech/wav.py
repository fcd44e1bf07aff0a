"""Read WAV files and streams block by block: whole numbers of 8 to 32 bits, floats, any number of channels.

    "RIFF", length, "WAVE", chunks;   chunk = name, length, bytes, a zero byte if the length is odd
    "fmt "  = format, channels, samples a second, bytes a second, bytes of all channels, bits, ...
    "data"  = samples, channel after channel

The standard library's `wave` knows no floats. Lengths are not trusted: programs that write to a pipe give
none, and a recording that was cut off has less than it says. What is there is read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BLOCK = 1 << 20  # bytes read at once
_LONGEST_CHUNK = 1 << 16  # bytes of a description
_MOST_RATE, _MOST_CHANNELS = 768_000, 1024
_CANCELLED = 0.1  # of the power that channels with nothing in common have together
_UNKNOWN = (0, 0x7FFFF000, 0xFFFFFFFF)  # lengths that programs write who cannot know it


@runtime_checkable
class BlockFile(Protocol):
    """A file that gives what it has, without waiting for more."""

    def read1(self, n: int, /) -> bytes:
        """Return up to `n` bytes; none at the end."""


class WavError(Exception):
    """The file is no WAV that can be read here; `str(error)` says why."""


@dataclass(frozen=True, slots=True)
class WavFormat:
    """The form of the samples in a file."""

    rate: int
    """Samples of a channel in a second."""
    n_channels: int
    n_bits: int
    """Bits of a sample: 8, 16, 24, 32 or 64."""
    is_float: bool
    n_bytes: int | None = None
    """Bytes of all samples as the file says; None if it does not know."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of all channels."""
        return self.n_channels * self.n_bits // 8


def read_format(file: BinaryIO, start: bytes = b"") -> WavFormat:
    """Read up to the first sample and return the form of what follows. Raises WavError.

    `start`: bytes of the file that were read before.
    """
    head = start + _read(file, 12 - len(start))
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        raise WavError("it does not begin as a WAV file does")
    found: WavFormat | None = None
    while True:
        chunk = _read(file, 8)
        if len(chunk) < 8:
            raise WavError("it ends before its first sample")
        name, length = chunk[:4], struct.unpack("<I", chunk[4:])[0]
        if name == b"data":
            if found is None:
                raise WavError("its samples come before their description")
            return WavFormat(
                found.rate,
                found.n_channels,
                found.n_bits,
                found.is_float,
                None if length in _UNKNOWN else length,
            )
        if name == b"fmt ":
            if length > _LONGEST_CHUNK:
                raise WavError("its description is damaged")
            found = _parse_format(_read(file, length + length % 2))
        else:
            _skip(file, length + length % 2)


def _parse_format(data: bytes) -> WavFormat:
    if len(data) < 16:
        raise WavError("it ends within its description")
    kind, n_channels, rate, _, frame, n_bits = struct.unpack("<HHIIHH", data[:16])
    if kind == _EXTENSIBLE and len(data) >= 26:
        kind = struct.unpack("<H", data[24:26])[0]
    if kind not in (_PCM, _FLOAT):
        raise WavError(f"compressed samples (format {kind:#x})")
    if not (1 <= n_channels <= _MOST_CHANNELS and 1 <= rate <= _MOST_RATE):
        raise WavError(f"{n_channels} channels of {rate} samples a second")
    n_bits = 8 * frame // n_channels  # 20 bits lie in 24, or in 32
    if n_bits not in ((32, 64) if kind == _FLOAT else (8, 16, 24, 32)):
        raise WavError(f"samples of {n_bits} bits")
    return WavFormat(rate, n_channels, n_bits, kind == _FLOAT)


def read_blocks(file: BinaryIO | BlockFile, form: WavFormat, mixer: Mixer) -> Iterator[Floats]:
    """Yield the samples as they come, mixed to one channel, in [-1, 1], shape (n,)."""
    left, rest = form.n_bytes, b""
    while left is None or left > 0:
        data = read_some(file, _BLOCK if left is None else min(_BLOCK, left))
        if not data:
            return
        left = None if left is None else left - len(data)
        data = rest + data
        whole = len(data) - len(data) % form.frame_bytes
        data, rest = data[:whole], data[whole:]
        if data:
            samples = decode_samples(data, form)
            yield samples if form.n_channels == 1 else mixer.mix(samples.reshape(-1, form.n_channels))


def decode_samples(data: bytes, form: WavFormat) -> Floats:
    """Return samples of all channels as floats in [-1, 1]; `data` holds whole ones."""
    if form.is_float:
        return np.frombuffer(data, f"<f{form.n_bits // 8}").astype(np.float32)
    if form.n_bits == 8:  # the only ones without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128.0) / 128.0
    if form.n_bits == 24:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0].astype(np.float32) / np.float32(1 << 31)
    numbers = np.frombuffer(data, f"<i{form.n_bits // 8}").astype(np.float32)
    return numbers / np.float32(1 << (form.n_bits - 1))


class Mixer:
    """Mixes channels to one. Where they cancel each other out, the loudest is heard alone."""

    def __init__(self) -> None:
        self.alone: int | None = None
        """The channel that was heard alone first, from 0."""

    def mix(self, channels: Floats, mono: Floats | None = None) -> Floats:
        """Return one channel of `channels`, shape (n, n_channels): their mean, or `mono` if it is given."""
        mean = channels.mean(1, dtype=np.float32)
        loud = np.einsum("nc,nc->c", channels, channels)
        n = len(loud)
        # For channels that have nothing in common this is 1, and n for those that are alike.
        if n > 1 and n * n * float(mean @ mean) < _CANCELLED * float(loud.sum()):
            channel = int(loud.argmax())
            self.alone = channel if self.alone is None else self.alone
            return np.ascontiguousarray(channels[:, channel])
        return mean if mono is None else mono


def _read(file: BinaryIO, n: int) -> bytes:
    """Read `n` bytes, fewer only at the end; a pipe gives them in pieces."""
    parts = []
    while n > 0 and (part := file.read(n)):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def read_some(file: BinaryIO | BlockFile, n: int) -> bytes:
    """Read what is there, up to `n` bytes, without waiting for all of them where the file can do so."""
    return file.read1(n) if isinstance(file, BlockFile) else file.read(n)


def _skip(file: BinaryIO, n: int) -> None:
    while n > 0 and (part := file.read(min(n, _BLOCK))):
        n -= len(part)
