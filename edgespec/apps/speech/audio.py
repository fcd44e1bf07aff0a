"""Read sound from files and pipes as Whisper takes it: one channel, 16,000 samples a second, floats.

    WAV, raw samples from a pipe                 here
    flac, mp3, m4a, ogg, the sound of films      PyAV, which the extra `edgespec[audio]` brings

A file that is cut off, and samples that are no numbers, do not end the work: the readable samples
are returned, and a message says what was wrong.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edgespec.apps.speech.mel import SAMPLE_RATE, Floats
from edgespec.errors import EdgespecError, MessageFn, UsageError, silent
from edgespec.platform.files import expand_user

# ---- WAV files ----
#
#     "RIFF", length, "WAVE", chunks;   chunk = name, length, bytes, a zero byte if the length is odd
#     "fmt "  = format, channels, samples a second, bytes a second, bytes of all channels, bits, ...
#     "data"  = samples, channel after channel
#
# The standard library's `wave` knows no floats. Lengths are not trusted: programs that write to a pipe give
# none, and a recording that was cut off has less than it says. What is there is read.

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BLOCK = 1 << 20  # bytes read at once
_LONGEST_CHUNK = 1 << 16  # bytes of a description
_MOST_RATE, _MOST_CHANNELS = 768_000, 1024
_UNKNOWN = (0, 0x7FFFF000, 0xFFFFFFFF)  # lengths that programs write who cannot know it


class WavError(Exception):
    """The file is no readable WAV file; `str(error)` says why."""


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


def read_format(file: BinaryIO) -> WavFormat:
    """Read a WAV file from byte 12 up to its first sample; return the samples' form. Raises WavError."""
    found: WavFormat | None = None
    while len(chunk := _read(file, 8)) == 8:
        name, length = chunk[:4], struct.unpack("<I", chunk[4:])[0]
        if name == b"data":
            if found is None:
                raise WavError("its samples come before their description")
            return replace(found, n_bytes=None if length in _UNKNOWN else length)
        if name == b"fmt ":
            if length > _LONGEST_CHUNK:
                raise WavError("its description is damaged")
            found = _parse_format(_read(file, length + length % 2))
        else:
            _read(file, length + length % 2)
    raise WavError("it ends before its first sample")


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


def read_blocks(file: BinaryIO, form: WavFormat, start: bytes = b"") -> Iterator[Floats]:
    """Yield the samples as they come, the mean of the channels, in [-1, 1], shape (n,).

    `start`: the first bytes of the samples, if they were read before.
    """
    left, data = form.n_bytes, start
    while True:
        whole = len(data) - len(data) % form.frame_bytes
        if whole:
            samples = decode_samples(data[:whole], form)
            yield samples.reshape(-1, form.n_channels).mean(1, dtype=np.float32)
        # Of a pipe, what is there: without waiting for the rest of a block.
        more = getattr(file, "read1", file.read)(_BLOCK if left is None else min(_BLOCK, left))
        if not more:
            return
        left = None if left is None else left - len(more)
        data = data[whole:] + more


def decode_samples(data: bytes, form: WavFormat) -> Floats:
    """Return samples of all channels as floats in [-1, 1]; `data` ends with a whole sample."""
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


def _read(file: BinaryIO, n: int) -> bytes:
    """Read `n` bytes, fewer only at the end of the file; a pipe delivers them in pieces."""
    parts = []
    while n > 0 and (part := file.read(min(n, _BLOCK))):
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


# ---- tracks of films and compressed files ----

_LEAST_GAP_S = 0.25  # frames' times are rounded, and jump a little
_MOST_GAP_S = 600.0  # where a file does not know how long it is


def import_av(name: str) -> Any:  # noqa: ANN401 - a library that may be missing
    """Return PyAV for the file called `name`. Raises EdgespecError if it is missing."""
    try:
        import av
        import av.error
    except ImportError:
        raise EdgespecError(f"{name}: no WAV file; others need PyAV: pip install 'edgespec[audio]'") from None
    av.logging.set_level(av.logging.PANIC)  # what is wrong is said in one line of ours
    return av


def silence(n: int) -> Iterator[Floats]:
    """Yield `n` samples of silence, at most a minute at a time."""
    for start in range(0, n, 60 * SAMPLE_RATE):
        yield np.zeros(min(n - start, 60 * SAMPLE_RATE), np.float32)


def _to_floats(frame: Any) -> Floats:  # noqa: ANN401
    samples: Floats = frame.to_ndarray()[0].astype(np.float32)
    return samples / np.float32(1 << 15)


STDIN = "-"
RAW = WavFormat(SAMPLE_RATE, 1, 16, is_float=False)
"""Raw samples from a pipe unless another form is named: `arecord -t raw -f S16_LE -r 16000`."""

# How files begin that nobody means as raw samples: ID3, MPEG frames, FLAC, Ogg, Matroska, ADTS.
_COMPRESSED = (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"\xff\xf1")

SILENCE = 1e-4
"""Amplitude below which a sound is silence: -80 dB of full scale, three steps of 16 bits."""


@dataclass
class SoundReader:
    """Turns one file or stream into samples, a block at a time."""

    name: str
    """The name that messages give it."""
    on_message: MessageFn = silent
    most_s: float = math.inf
    """Longest sound that is read, in seconds."""
    track: int | None = None
    """The track of sound in a film, from 1; None: the first that is not silent."""
    _n_bad: int = field(default=0, init=False)
    _end_s: float = field(default=0.0, init=False)  # of what PyAV decoded

    def read(self, file: BinaryIO, *, raw: WavFormat | None = None) -> Floats:
        """Return all samples, shape (n,). Raises EdgespecError if there is no readable sound.

        `raw`: the form of samples without a header; None: the file has a header.
        """
        blocks, n = [], 0
        for block in self.blocks(file, raw=raw):
            blocks.append(block)
            n += len(block)
            if n > self.most_s * SAMPLE_RATE:
                raise EdgespecError(f"{self.name}: longer than {self.most_s:g} s; cut it into parts")
        return np.concatenate(blocks)

    def blocks(self, file: BinaryIO, *, raw: WavFormat | None = None) -> Iterator[Floats]:
        """Yield the samples as they come, one block or more; errors and `raw` as in `read`."""
        start = _read(file, 12)
        if not start:
            raise EdgespecError(f"{self.name}: empty, 0 bytes")
        if start[:4] == b"RIFF" and start[8:] == b"WAVE":
            found = self._wav(file)
        elif raw is not None and not (start.startswith(_COMPRESSED) or start[4:8] == b"ftyp"):
            self.check_only_track()
            found = resampled(self._finite(read_blocks(file, raw, start)), raw.rate)
        else:
            found = self._decoded(file, start)
        is_empty = True
        for block in found:
            is_empty = False
            yield block
        if is_empty:
            raise EdgespecError(f"{self.name}: no sound in it, not one sample")
        if self._n_bad:
            self.on_message(f"{self.name}: {self._n_bad:,} samples are no numbers; taken as silence")

    def check_only_track(self) -> None:
        """Raise UsageError for a track other than the first: raw and WAV files have only one."""
        if self.track not in (None, 1):
            raise UsageError(f"{self.name} has 1", field="track", value=self.track)

    def _wav(self, file: BinaryIO) -> Iterator[Floats]:
        self.check_only_track()
        try:
            form = read_format(file)
        except WavError as error:
            if "compressed" in str(error) and file.seekable():
                yield from self._decoded(file, b"")
                return
            raise EdgespecError(f"{self.name}: a WAV file that cannot be read: {error}") from None
        n = 0

        def counted() -> Iterator[Floats]:
            nonlocal n
            for block in read_blocks(file, form):
                n += len(block)
                yield block

        yield from resampled(self._finite(counted()), form.rate)
        if form.n_bytes is not None and n < form.n_bytes // form.frame_bytes:
            self._warn_cut(n / form.rate, form.n_bytes / form.frame_bytes / form.rate)

    def _warn_cut(self, here_s: float, expected_s: float) -> None:
        self.on_message(
            f"{self.name}: cut off after {here_s:.1f} s of {expected_s:.1f} s; what is there is used"
        )

    def _finite(self, blocks: Iterable[Floats]) -> Iterator[Floats]:
        for block in blocks:
            good = np.isfinite(block)
            if not good.all():
                self._n_bad += int(block.size - np.count_nonzero(good))
            yield np.clip(np.where(good, block, np.float32(0.0)), -1.0, 1.0)

    def _decoded(self, file: BinaryIO, start: bytes) -> Iterator[Floats]:
        """Yield the samples of any other file, read by PyAV: of the first track that is not silent."""
        av = import_av(self.name)
        if not file.seekable():  # containers need to look back
            file = io.BytesIO(start + file.read())
        number, n_silent = self.track or 1, 0
        while True:
            n, n_tracks, blocks = 0, 1, self._of_track(av, file, number)
            for n_tracks, block in blocks:
                if self.track is None and n_tracks > 1:
                    if is_silent(block):
                        n += len(block)
                        continue
                    others = "; those before it are silent" if number > 1 else ""
                    self.on_message(f"{self.name}: track {number} of {n_tracks} is transcribed{others}")
                yield from silence(n)
                yield block
                yield from (one for _, one in blocks)
                return
            n_silent, number = n_silent or n, number + 1
            if self.track or number > n_tracks:
                yield from silence(n_silent)
                return

    def _of_track(self, av: Any, file: BinaryIO, number: int) -> Iterator[tuple[int, Floats]]:  # noqa: ANN401
        """Yield the number of tracks with each block of samples of track `number`, counted from 1."""
        file.seek(0)
        self._end_s = expected_s = 0.0
        try:
            with av.open(file, mode="r", metadata_errors="ignore") as container:
                streams = container.streams.audio
                if not streams:
                    raise EdgespecError(f"{self.name}: no sound in it, only pictures or text")
                if not 1 <= number <= len(streams):
                    raise UsageError(f"{self.name} has {len(streams)}", field="track", value=number)
                stream = streams[number - 1]
                origin_s, file_s = (
                    (one or 0) / av.time_base for one in (container.start_time, container.duration)
                )
                if stream.duration:
                    end = (stream.start_time or 0) + stream.duration
                    expected_s = float(end * stream.time_base) - origin_s
                elif not container.streams.video:
                    expected_s = file_s
                frames = self._frames(av, container, stream)
                yield from ((len(streams), one) for one in self._resampled(av, frames, origin_s, file_s))
        except av.error.FFmpegError as error:
            if not self._end_s:
                reason = error.strerror or type(error).__name__
                raise EdgespecError(f"{self.name}: not a recording that can be read: {reason}") from None
            self._warn_broken(error)
            return
        if self._end_s < expected_s - min(1.0, 0.1 + 0.1 * expected_s):
            self._warn_cut(self._end_s, expected_s)

    def _frames(self, av: Any, container: Any, stream: Any) -> Iterator[Any]:  # noqa: ANN401
        """Yield the decodable frames; damaged packets are left out, and a message names the first of them."""
        is_told = False
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
            except av.error.InvalidDataError as error:
                if not is_told:
                    self._warn_broken(error)
                is_told = True

    def _resampled(
        self,
        av: Any,  # noqa: ANN401
        frames: Iterator[Any],
        origin_s: float,
        file_s: float,
    ) -> Iterator[Floats]:
        """Yield one channel of 16 kHz, mixed by PyAV. Times are the file's: its gaps become silence."""
        resampler = None
        for frame in frames:
            start_s = float((frame.pts or 0) * (frame.time_base or 0)) - origin_s
            if self._end_s + _LEAST_GAP_S <= start_s <= (file_s or self._end_s + _MOST_GAP_S):
                yield from map(_to_floats, resampler.resample(None) if resampler else ())
                yield from silence(round((start_s - self._end_s) * SAMPLE_RATE))
                resampler, self._end_s = None, start_s
            self._end_s += frame.samples / frame.sample_rate
            # As OpenAI decodes: of floats, ffmpeg would add up channels to more than 1.
            resampler = resampler or av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
            yield from map(_to_floats, resampler.resample(frame))
        yield from map(_to_floats, resampler.resample(None) if resampler else ())

    def _warn_broken(self, error: Any) -> None:  # noqa: ANN401
        self.on_message(
            f"{self.name}: damaged after {self._end_s:.1f} s ({error.strerror}); what can be read is used"
        )


def read_audio(
    source: str | Path | BinaryIO, *, track: int | None = None, on_message: MessageFn = silent
) -> Floats:
    """Return the samples of a recording: mono, 16 kHz, in [-1, 1], shape (n,).

    `source`: a path, "-" for standard input (WAV, or samples in the form `RAW`), or an open file. `track`: as
    in `SoundReader`. Raises UsageError for a missing file, EdgespecError for one without sound and if PyAV is
    missing.
    """
    if source == STDIN:
        return SoundReader("standard input", on_message, track=track).read(_stdin(), raw=RAW)
    if not isinstance(source, str | Path):
        return SoundReader("the recording", on_message, track=track).read(source)
    with _opened(source) as file:
        return SoundReader(str(source), on_message, track=track).read(file)


def check_audio(source: str, *, track: int | None = None) -> None:
    """Raise what `read_audio` would for a path or "-", after its first samples at most; no pipe is read."""
    if source == STDIN:
        file, reader = _stdin(), SoundReader("standard input", track=track)
        reader.check_only_track()
        if file.seekable():
            place = file.tell()
            next(reader.blocks(file, raw=RAW))
            file.seek(place)
        return
    path = expand_user(source)
    if not path.exists() or path.is_file() or path.is_dir():
        with _opened(source) as file:
            next(SoundReader(source, track=track).blocks(file))


@contextmanager
def _opened(source: str | Path) -> Iterator[BinaryIO]:
    try:
        with expand_user(source).open("rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "-: standard input is a terminal; pipe sound into it, as in "
            "`arecord -f S16_LE -r 16000 | edgespec transcribe -`"
        )
    return sys.stdin.buffer


def stream_audio(file: BinaryIO, *, on_message: MessageFn = silent) -> Iterator[Floats]:
    """Yield the samples of a pipe as they come, as `read_audio` returns them: WAV, or samples as in `RAW`."""
    return SoundReader("standard input", on_message).blocks(file, raw=RAW)


def resampled(blocks: Iterable[Floats], rate: int) -> Iterator[Floats]:
    """Yield blocks of one channel, resampled from `rate` to 16,000 samples a second; all are finite."""
    if rate == SAMPLE_RATE:
        yield from blocks
        return
    import soxr

    stream = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    for block in blocks:
        done: Floats = stream.resample_chunk(np.ascontiguousarray(block))
        if len(done):
            yield done
    last: Floats = stream.resample_chunk(np.empty(0, np.float32), last=True)
    if len(last):
        yield last


def is_silent(samples: Floats) -> bool:
    """Whether all samples are silence, for which a model would make up a text."""
    return not len(samples) or float(np.abs(samples).max()) < SILENCE
