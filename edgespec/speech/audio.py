"""Read sound from files and pipes as Whisper takes it: one channel, 16,000 samples a second, floats.

    WAV, raw samples from a pipe                 here and in wav.py
    flac, mp3, m4a, ogg, the sound of films      PyAV, which the extra `edgespec[audio]` brings

A file that is cut off, and samples that are no numbers, do not end the work: what can be heard is returned,
and a message says what was wrong.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user
from edgespec.platform.messages import MessageFn, silent
from edgespec.speech.mel import SAMPLE_RATE
from edgespec.speech.wav import WavError, WavFormat, read_blocks, read_format, read_some

Floats = npt.NDArray[np.float32]

STDIN = "-"
RAW = WavFormat(SAMPLE_RATE, 1, 16, is_float=False)
"""Raw samples from a pipe unless another form is named: `arecord -t raw -f S16_LE -r 16000`."""

# How files begin that nobody means as raw samples: ID3, MPEG frames, FLAC, Ogg, Matroska, ADTS.
_COMPRESSED = (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"\xff\xf1")


@dataclass
class SoundReader:
    """Turns one file or stream into samples, a block at a time."""

    name: str
    """The name that messages give it."""
    on_message: MessageFn = silent
    most_s: float = math.inf
    """Longest sound that is read, in seconds."""
    _n_bad: int = field(default=0, init=False)

    def read(self, file: BinaryIO, *, raw: WavFormat | None = None) -> Floats:
        """Return all samples, shape (n,). Raises EdgespecError if there is no sound that can be read.

        `raw`: the form of samples without a header; None if the file has to say what it is.
        """
        blocks, n = [], 0
        for block in self.blocks(file, raw=raw):
            blocks.append(block)
            n += len(block)
            if n > self.most_s * SAMPLE_RATE:
                raise EdgespecError(f"{self.name}: longer than {self.most_s:g} s; cut it into parts")
        if not blocks:
            raise EdgespecError(f"{self.name}: no sound in it, not one sample")
        return np.concatenate(blocks)

    def blocks(self, file: BinaryIO, *, raw: WavFormat | None = None) -> Iterator[Floats]:
        """Yield the samples as they come; errors and `raw` as in `read`."""
        start = _first_bytes(file)
        if not start:
            raise EdgespecError(f"{self.name}: empty, 0 bytes")
        if start[:4] == b"RIFF":
            yield from self._wav(file, start)
        elif raw is not None and not _is_compressed(start):
            yield from resampled(self._finite(_raw_blocks(file, start, raw)), raw.rate)
        else:
            yield from self._finite(self._decoded(file, start))
        if self._n_bad:
            self.on_message(f"{self.name}: {self._n_bad:,} samples are no numbers; taken as silence")

    def _wav(self, file: BinaryIO, start: bytes) -> Iterator[Floats]:
        try:
            form = read_format(file, start)
        except WavError as error:
            if "compressed" in str(error) and file.seekable():
                file.seek(0)
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
            self._say_cut(n / form.rate, form.n_bytes / form.frame_bytes / form.rate)

    def _say_cut(self, here_s: float, expected_s: float) -> None:
        self.on_message(
            f"{self.name}: cut off after {here_s:.1f} s of {expected_s:.1f} s; what is there is used"
        )

    def _finite(self, blocks: Iterable[Floats]) -> Iterator[Floats]:
        """Make samples that are no numbers silence, and count them."""
        for block in blocks:
            good = np.isfinite(block)
            if not good.all():
                self._n_bad += int(block.size - np.count_nonzero(good))
            yield np.clip(np.where(good, block, np.float32(0.0)), -1.0, 1.0)

    def _decoded(self, file: BinaryIO, start: bytes) -> Iterator[Floats]:
        """Yield what PyAV makes of a file of any other form."""
        av = _pyav(self.name)
        if file.seekable():
            file.seek(0)
        else:  # containers need to look back
            file = io.BytesIO(start + file.read())
        n_s = 0.0
        try:
            with av.open(file, mode="r", metadata_errors="ignore") as container:
                if not container.streams.audio:
                    raise EdgespecError(f"{self.name}: no sound in it, only pictures or text")
                stream = container.streams.audio[0]
                expected_s = float(stream.duration * stream.time_base) if stream.duration else 0.0
                for block in _frames(av, container, stream, self._say_broken):
                    n_s += len(block) / SAMPLE_RATE
                    yield block
        except av.error.FFmpegError as error:
            if not n_s:
                reason = error.strerror or type(error).__name__
                raise EdgespecError(f"{self.name}: not a recording that can be read: {reason}") from None
            self._say_broken(n_s, str(error.strerror))
            return
        if n_s < expected_s - 1.0:
            self._say_cut(n_s, expected_s)

    def _say_broken(self, after_s: float, reason: str) -> None:
        self.on_message(f"{self.name}: damaged after {after_s:.1f} s ({reason}); what can be read is used")


def read_audio(source: str | Path | BinaryIO, *, on_message: MessageFn = silent) -> Floats:
    """Return the samples of a recording: mono, 16 kHz, in [-1, 1], shape (n,).

    `source`: a path, "-" for standard input (WAV, or samples in the form `RAW`), or an open file. Raises
    UsageError for a missing file, EdgespecError for one without sound and where PyAV is missing.
    """
    if source == STDIN:
        if sys.stdin.isatty():
            raise UsageError(
                "-: standard input is a terminal; pipe a recording into it, such as from arecord"
            )
        return SoundReader("standard input", on_message).read(sys.stdin.buffer, raw=RAW)
    if not isinstance(source, str | Path):
        return SoundReader("the recording", on_message).read(source)
    path = expand_user(source)
    try:
        with path.open("rb") as file:
            return SoundReader(str(source), on_message).read(file)
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None


def stream_audio(file: BinaryIO, *, on_message: MessageFn = silent) -> Iterator[Floats]:
    """Yield the samples of a pipe as they come, as `read_audio` returns them: WAV, or samples as in `RAW`."""
    return SoundReader("standard input", on_message).blocks(file, raw=RAW)


def resampled(blocks: Iterable[Floats], rate: int) -> Iterator[Floats]:
    """Yield blocks of one channel at `rate` samples a second with 16,000 instead; all are numbers."""
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


def _first_bytes(file: BinaryIO) -> bytes:
    start = b""
    while len(start) < 12 and (part := file.read(12 - len(start))):
        start += part
    return start


def _is_compressed(start: bytes) -> bool:
    return start.startswith(_COMPRESSED) or start[4:8] == b"ftyp"


def _raw_blocks(file: BinaryIO, start: bytes, form: WavFormat) -> Iterator[Floats]:
    return read_blocks(_JoinedFile(io.BytesIO(start), file), form)


class _JoinedFile:
    """Bytes read before, then the rest of a file."""

    def __init__(self, start: io.BytesIO, rest: BinaryIO) -> None:
        self._start, self._rest = start, rest

    def read1(self, n: int) -> bytes:
        if data := self._start.read(n):
            return data
        return read_some(self._rest, n)


def _pyav(name: str) -> Any:  # noqa: ANN401 - a library that may be missing
    try:
        import av
        import av.error
    except ImportError:
        raise EdgespecError(f"{name}: no WAV file; others need PyAV: pip install 'edgespec[audio]'") from None
    av.logging.set_level(av.logging.PANIC)  # what is wrong is said in one line of ours
    return av


def _frames(
    av: Any,  # noqa: ANN401
    container: Any,  # noqa: ANN401
    stream: Any,  # noqa: ANN401
    say_broken: Callable[[float, str], None],
) -> Iterator[Floats]:
    """Yield the decoded samples of a stream; packets that are damaged are left out, and told of once."""
    # As OpenAI decodes: of floats, ffmpeg would add up channels to more than 1.
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    n, is_told = 0, False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError as error:
            if not is_told:
                say_broken(n / SAMPLE_RATE, str(error.strerror))
            is_told = True
            continue
        for frame in frames:
            for done in resampler.resample(frame):
                block = _to_floats(done)
                n += len(block)
                yield block
    with suppress(av.error.FFmpegError):  # nothing was decoded
        for done in resampler.resample(None):
            yield _to_floats(done)


def _to_floats(frame: Any) -> Floats:  # noqa: ANN401
    samples: Floats = frame.to_ndarray().reshape(-1).astype(np.float32)
    return samples / np.float32(1 << 15)
