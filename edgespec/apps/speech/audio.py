"""Read sound from files and pipes as Whisper takes it: one channel, 16,000 samples a second, floats.

    WAV, raw samples from a pipe                 here
    flac, mp3, m4a, ogg, the sound of films      PyAV, which the extra `edgespec[audio]` brings

A file that is cut off, and samples that are no numbers, do not end the work: what can be heard is returned,
and a message says what was wrong.
"""

from __future__ import annotations

import io
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user
from edgespec.platform.messages import MessageFn, silent

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
            return replace(found, n_bytes=None if length in _UNKNOWN else length)
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


# ---- tracks of films and compressed files ----
#
# A track that begins later than the file, and a gap in it, become silence: times are those of the film.

BrokenFn = Callable[[float, str], None]
"""Told after how many seconds something is damaged, and what."""

_LEAST_GAP_S = 0.25  # frames' times are rounded, and jump a little
_MOST_GAP_S = 600.0  # where a file does not know how long it is
_MIXED_BLOCK = SAMPLE_RATE  # samples that are mixed at once
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
            if sum(len(part[0]) for part in parts) >= _MIXED_BLOCK:
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
        """The channels of a frame that are read: one, and all of them if there are several."""
        if not self._resamplers:
            # As OpenAI decodes: of floats, ffmpeg would add up channels to more than 1.
            layouts = ["mono"] + ([frame.layout.name] if frame.layout.nb_channels > 1 else [])
            self._resamplers = [
                self._av.AudioResampler(format="s16", layout=layout, rate=SAMPLE_RATE) for layout in layouts
            ]
        done = zip(*(one.resample(frame) for one in self._resamplers), strict=True)
        return [[_to_floats(one) for one in together] for together in done]

    def _flushed(self) -> list[list[Floats]]:
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
    """Whether an Ogg or Matroska file (webm) is cut off, which its length does not tell."""
    size = file.seek(0, 2)
    file.seek(0)
    start = file.read(4)
    if start == b"OggS":
        return _ogg_ends_early(file, size)
    return start == b"\x1aE\xdf\xa3" and _matroska_ends_early(file, size)


def _ogg_ends_early(file: BinaryIO, size: int) -> bool:
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
    """Whether an element goes on after the file's end. Those of unknown length are looked into."""
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


Floats = npt.NDArray[np.float32]

STDIN = "-"
RAW = WavFormat(SAMPLE_RATE, 1, 16, is_float=False)
"""Raw samples from a pipe unless another form is named: `arecord -t raw -f S16_LE -r 16000`."""

# How files begin that nobody means as raw samples: ID3, MPEG frames, FLAC, Ogg, Matroska, ADTS.
_COMPRESSED = (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"\xff\xf1")


SILENCE = 1e-4
"""Amplitude below which a sound is silence: -80 dB of full scale, three steps of 16 bits."""

NO_SOUND = "{}: no sound in it, not one sample"


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
    _mixer: Mixer = field(default_factory=Mixer, init=False)

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
            raise EdgespecError(NO_SOUND.format(self.name))
        return np.concatenate(blocks)

    def blocks(self, file: BinaryIO, *, raw: WavFormat | None = None) -> Iterator[Floats]:
        """Yield the samples as they come; errors and `raw` as in `read`."""
        start = _read(file, 12)
        if not start:
            raise EdgespecError(f"{self.name}: empty, 0 bytes")
        if start[:4] == b"RIFF" and start[8:] == b"WAVE":
            self.check_only_track()
            yield from self._wav(file, start)
        elif raw is not None and not _is_compressed(start):
            self.check_only_track()
            joined = _JoinedFile(io.BytesIO(start), file)
            yield from resampled(self._finite(read_blocks(joined, raw, self._mixer)), raw.rate)
        else:
            yield from self._finite(self._decoded(file, start))
        if self._n_bad:
            self.on_message(f"{self.name}: {self._n_bad:,} samples are no numbers; taken as silence")
        if self._mixer.alone is not None:
            self.on_message(
                f"{self.name}: its channels cancel each other out where they have opposite signs; there the "
                f"loudest is heard alone, first channel {self._mixer.alone + 1}"
            )

    def check_only_track(self) -> None:
        """Raise UsageError for another track than the first, of samples that have no tracks."""
        if self.track not in (None, 1):
            raise UsageError(f"{self.name} has 1", field="track", value=self.track)

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
            for block in read_blocks(file, form, self._mixer):
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
        for block in blocks:
            good = np.isfinite(block)
            if not good.all():
                self._n_bad += int(block.size - np.count_nonzero(good))
            yield np.clip(np.where(good, block, np.float32(0.0)), -1.0, 1.0)

    def _decoded(self, file: BinaryIO, start: bytes) -> Iterator[Floats]:
        """Yield what PyAV makes of a file of any other form: of the first track that is not silent."""
        av = import_av(self.name)
        if not file.seekable():  # containers need to look back
            file = io.BytesIO(start + file.read())
        number, n_silent = self.track or 1, 0
        while True:
            heard, n, n_tracks = False, 0, 1
            for n_tracks, block in self._of_track(av, file, number):
                if not heard and n_tracks > 1 and self.track is None and is_silent(block):
                    n += len(block)
                    continue
                if not heard and n_tracks > 1 and self.track is None:
                    others = "; those before it are silent" if number > 1 else ""
                    self.on_message(f"{self.name}: track {number} of {n_tracks} is heard{others}")
                    yield from silence(n)
                heard = True
                yield block
            n_silent = n_silent or n
            if heard or self.track or number >= n_tracks:
                if not heard:
                    yield from silence(n_silent)
                return
            number += 1

    def _of_track(self, av: Any, file: BinaryIO, number: int) -> Iterator[tuple[int, Floats]]:  # noqa: ANN401
        """Yield the number of tracks, and a block of samples of one of them, which count from 1."""
        file.seek(0)
        track: Track | None = None
        try:
            with av.open(file, mode="r", metadata_errors="ignore") as container:
                streams = container.streams.audio
                if not streams:
                    raise EdgespecError(f"{self.name}: no sound in it, only pictures or text")
                if not 1 <= number <= len(streams):
                    problem = f"{self.name} has {len(streams)}"
                    raise UsageError(problem, field="track", value=number)
                track = Track(av, container, streams[number - 1], self._mixer, self._say_broken)
                for block in track.blocks():
                    yield len(streams), block
                expected_s = track.expected_s
        except av.error.FFmpegError as error:
            if track is None or not track.end_s:
                reason = error.strerror or type(error).__name__
                raise EdgespecError(f"{self.name}: not a recording that can be read: {reason}") from None
            self._say_broken(track.end_s, str(error.strerror))
            return
        if track.end_s < expected_s - min(1.0, 0.1 + 0.1 * expected_s):
            self._say_cut(track.end_s, expected_s)
        elif ends_early(file):
            self.on_message(f"{self.name}: cut off after {track.end_s:.1f} s; what is there is used")

    def _say_broken(self, after_s: float, reason: str) -> None:
        self.on_message(f"{self.name}: damaged after {after_s:.1f} s ({reason}); what can be read is used")


def read_audio(
    source: str | Path | BinaryIO, *, track: int | None = None, on_message: MessageFn = silent
) -> Floats:
    """Return the samples of a recording: mono, 16 kHz, in [-1, 1], shape (n,).

    `source`: a path, "-" for standard input (WAV, or samples in the form `RAW`), or an open file. `track`: as
    in `SoundReader`. Raises UsageError for a missing file, EdgespecError for one without sound and where PyAV
    is missing.
    """
    if source == STDIN:
        return SoundReader("standard input", on_message, track=track).read(_stdin(), raw=RAW)
    if not isinstance(source, str | Path):
        return SoundReader("the recording", on_message, track=track).read(source)
    path = expand_user(source)
    try:
        with path.open("rb") as file:
            return SoundReader(str(source), on_message, track=track).read(file)
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None


def check_audio(source: str, *, track: int | None = None) -> None:
    """Raise what `read_audio` raises for a path or "-", as far as the first samples tell; no pipe is read."""
    if source == STDIN:
        file, reader = _stdin(), SoundReader("standard input", track=track)
        reader.check_only_track()
        if file.seekable():
            place = file.tell()
            _need_sound(reader.blocks(file, raw=RAW), reader.name)
            file.seek(place)
        return
    path = expand_user(source)
    if path.exists() and not (path.is_file() or path.is_dir()):
        return
    try:
        with path.open("rb") as file:
            _need_sound(SoundReader(source, track=track).blocks(file), source)
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}") from None


def _stdin() -> BinaryIO:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "-: standard input is a terminal; pipe sound into it, as in "
            "`arecord -f S16_LE -r 16000 | edgespec transcribe -`"
        )
    return sys.stdin.buffer


def _need_sound(blocks: Iterator[Floats], name: str) -> None:
    if next(blocks, None) is None:
        raise EdgespecError(NO_SOUND.format(name))


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


def is_silent(samples: Floats) -> bool:
    """Whether nobody can be heard: a model asked for the text of nothing makes some up."""
    return not len(samples) or float(np.abs(samples).max()) < SILENCE


def _is_compressed(start: bytes) -> bool:
    return start.startswith(_COMPRESSED) or start[4:8] == b"ftyp"


class _JoinedFile:
    """Bytes read before, then the rest of a file."""

    def __init__(self, start: io.BytesIO, rest: BinaryIO) -> None:
        self._start, self._rest = start, rest

    def read1(self, n: int) -> bytes:
        if data := self._start.read(n):
            return data
        return read_some(self._rest, n)
