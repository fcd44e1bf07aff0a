"""Read sound from files and pipes as Whisper takes it: one channel, 16,000 samples a second, floats.

    WAV, raw samples from a pipe                 here and in wav.py
    flac, mp3, m4a, ogg, the sound of films      PyAV, which the extra `edgespec[audio]` brings: tracks.py

A file that is cut off, and samples that are no numbers, do not end the work: what can be heard is returned,
and a message says what was wrong.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.apps.speech.tracks import Track, ends_early, import_av, silence
from edgespec.apps.speech.wav import Mixer, WavError, WavFormat, read_blocks, read_format, read_some
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user
from edgespec.platform.messages import MessageFn, silent

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
        start = _first_bytes(file)
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
        """Make samples that are no numbers silence, and count them."""
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
    """Return whether nobody can be heard: a model asked for the text of nothing makes some up."""
    return not len(samples) or float(np.abs(samples).max()) < SILENCE


def _first_bytes(file: BinaryIO) -> bytes:
    start = b""
    while len(start) < 12 and (part := file.read(12 - len(start))):
        start += part
    return start


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
