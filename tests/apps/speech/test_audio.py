"""Recordings of all forms become one channel of 16 kHz; what is wrong is said in one line."""

from __future__ import annotations

import io
import os
import struct
import sys

import numpy as np
import pytest

from edgespec.apps.speech.audio import RAW, SoundReader, WavFormat, check_audio, read_audio, stream_audio
from edgespec.errors import EdgespecError, UsageError

av = pytest.importorskip("av")

SECOND = 16_000


def tone(rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)


def encoded(samples: np.ndarray, bits: int, is_float: bool = False) -> bytes:
    if is_float:
        return samples.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(samples * 127) + 128).astype(np.uint8).tobytes()
    whole = np.round(samples * (2 ** (bits - 1) - 1)).astype("<i4")
    return whole.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()


def wav(
    data: bytes, rate: int, channels: int, bits: int, *, kind: int = 1, size: int | None = None, extra=b""
) -> bytes:
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits) + extra
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    size = len(data) if size is None else size
    return b"RIFF" + struct.pack("<I", 0) + b"WAVE" + chunks + b"data" + struct.pack("<I", size) + data


def loudness_at(samples: np.ndarray, hz: float) -> float:
    """The amplitude of one frequency."""
    times = np.arange(len(samples)) / SECOND
    return float(2 * abs(np.mean(samples * np.exp(-2j * np.pi * hz * times))))


@pytest.mark.parametrize(
    ("bits", "is_float"), [(8, False), (16, False), (24, False), (32, False), (32, True), (64, True)]
)
def test_samples_of_every_width(bits, is_float):
    file = wav(encoded(tone(SECOND), bits, is_float), SECOND, 1, bits, kind=3 if is_float else 1)
    samples = read_audio(io.BytesIO(file))
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(SECOND), atol=0.01 if bits == 8 else 1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_other_rates_keep_length_and_pitch(rate):
    samples = read_audio(io.BytesIO(wav(encoded(tone(rate), 16), rate, 1, 16)))
    assert abs(len(samples) - SECOND // 2) <= 1
    assert loudness_at(samples, 440) == pytest.approx(0.5, abs=0.02)


def test_seven_channels_are_mixed():
    channels = np.zeros((SECOND, 7))
    channels[:, 2] = 0.7
    extensible = struct.pack("<HHIH14s", 22, 16, 0, 1, b"")
    samples = read_audio(
        io.BytesIO(wav(encoded(channels.reshape(-1), 16), SECOND, 7, 16, kind=0xFFFE, extra=extensible))
    )
    np.testing.assert_allclose(samples, 0.1, atol=1e-4)


def test_samples_that_are_no_numbers_are_silence(tmp_path):
    broken = tone(8_000).astype(np.float32)
    broken[100:103] = [np.nan, np.inf, -np.inf]
    path, said = tmp_path / "a.wav", []
    path.write_bytes(wav(encoded(broken, 32, True), 8_000, 1, 32, kind=3))
    samples = read_audio(path, on_message=said.append)
    assert np.isfinite(samples).all() and np.abs(samples).max() < 0.8
    assert said == [f"{path}: 3 samples are no numbers; taken as silence"]


def test_a_recording_that_is_cut_off_is_kept_and_said(tmp_path):
    path, said = tmp_path / "cut.wav", []
    path.write_bytes(wav(encoded(tone(SECOND, 1.0), 16), SECOND, 1, 16, size=4 * SECOND)[:-1])
    assert len(read_audio(path, on_message=said.append)) == SECOND - 1
    assert said == [f"{path}: cut off after 1.0 s of 2.0 s; what is there is used"]


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFF000])
def test_a_length_that_a_pipe_cannot_know(size):
    said: list[str] = []
    file = io.BytesIO(wav(encoded(tone(SECOND), 16), SECOND, 1, 16, size=size))
    assert len(read_audio(file, on_message=said.append)) == SECOND // 2 and not said


class Pipe(io.RawIOBase):
    """Bytes that come a few at a time and cannot be read twice."""

    def __init__(self, data: bytes, step: int = 1001) -> None:
        self._data, self._step = io.BytesIO(data), step

    def read(self, n: int = -1) -> bytes:
        return self._data.read(min(n, self._step) if n >= 0 else n)

    def read1(self, n: int) -> bytes:
        return self.read(n)

    def seekable(self) -> bool:
        return False


def test_pipes_of_raw_samples_and_of_wav(monkeypatch):
    raw = encoded(tone(SECOND), 16)
    blocks = list(stream_audio(Pipe(raw)))
    assert len(blocks) > 5
    np.testing.assert_allclose(np.concatenate(blocks), tone(SECOND), atol=1e-4)
    stereo = WavFormat(8_000, 2, 16, is_float=False)
    both = encoded(np.repeat(tone(8_000), 2), 16)
    assert sum(map(len, SoundReader("pipe").blocks(Pipe(both), raw=stereo))) == pytest.approx(
        SECOND // 2, abs=1
    )

    class Stdin:
        buffer = Pipe(wav(raw, SECOND, 1, 16, size=0xFFFFFFFF))

        @staticmethod
        def isatty() -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin)
    np.testing.assert_allclose(read_audio("-"), tone(SECOND), atol=1e-4)
    assert RAW.rate == SECOND


def compressed(codec: str, container: str, *, rate: int = 44_100, seconds: float = 2.0) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container) as made:
        stream = made.add_stream(codec, rate=rate, layout="stereo")
        samples = np.repeat(tone(rate, seconds), 2).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16), format="s16", layout="stereo")
        frame.sample_rate, frame.pts = rate, 0
        for part in (frame, None):
            made.mux(stream.encode(part))
    return out.getvalue()


@pytest.mark.parametrize(
    ("codec", "container"), [("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "mp4"), ("libopus", "ogg")]
)
def test_compressed_recordings(codec, container):
    data = compressed(codec, container, rate=48_000 if codec == "libopus" else 44_100)
    for file in (io.BytesIO(data), Pipe(data)):
        samples = read_audio(file)
        assert len(samples) == pytest.approx(2 * SECOND, rel=0.06)
        assert loudness_at(samples[: 2 * SECOND], 440) == pytest.approx(0.5, abs=0.05)


def test_a_truncated_mp3_keeps_what_can_be_heard(tmp_path):
    path, said = tmp_path / "cut.mp3", []
    data = compressed("libmp3lame", "mp3", seconds=10.0)
    path.write_bytes(data[: len(data) // 2 + 7])
    samples = read_audio(path, on_message=said.append)
    assert 4 * SECOND < len(samples) < 6 * SECOND
    assert len(said) == 1 and said[0].startswith(f"{path}: ") and said[0].endswith(" is used")


def film(tracks: list[np.ndarray], starts: list[float], *, container="matroska", pause_at=None) -> bytes:
    """A film of a picture and tracks of sound at 48 kHz, each from its start in seconds.

    `pause_at`: seconds after which a track is silent for three, for which it has no packets.
    """
    out, rate = io.BytesIO(), 48_000
    with av.open(out, "w", format=container) as made:
        picture = made.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        streams = [made.add_stream("aac", rate=rate, layout="mono") for _ in tracks]
        packets = [*picture.encode(av.VideoFrame(32, 32, "yuv420p")), *picture.encode(None)]
        for stream, samples, start_s in zip(streams, tracks, starts, strict=True):
            for at in range(0, len(samples), 1024):
                part = (samples[at : at + 1024] * 32767).astype(np.int16).reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(part, format="s16", layout="mono")
                pause_s = 3.0 if pause_at is not None and at >= rate * pause_at else 0.0
                frame.sample_rate, frame.pts = rate, at + int(rate * (start_s + pause_s))
                packets += stream.encode(frame)
            packets += stream.encode(None)
        for packet in sorted(packets, key=lambda packet: packet.pts * packet.time_base):
            made.mux(packet)
    return out.getvalue()


def loud_from_to(samples: np.ndarray) -> tuple[float, float]:
    """The times of the first and the last sample that can be heard, in seconds."""
    loud = np.flatnonzero(np.abs(samples) > 0.05) / SECOND
    return float(loud[0]), float(loud[-1])


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts", "avi"])
def test_sound_keeps_its_time_in_a_film(container):
    data = film([tone(48_000, 2.0)], [5.0 if container != "avi" else 0.0], container=container)
    said: list[str] = []
    samples = read_audio(io.BytesIO(data), on_message=said.append)
    start_s = 5.0 if container != "avi" else 0.0
    assert loud_from_to(samples) == (pytest.approx(start_s, abs=0.05), pytest.approx(start_s + 2, abs=0.05))
    assert said == []


def test_a_pause_without_packets_keeps_the_times_after_it():
    samples = read_audio(io.BytesIO(film([tone(48_000, 4.0)], [0.0], pause_at=2.0)))
    assert len(samples) / SECOND == pytest.approx(7.0, abs=0.1)
    quiet = np.abs(samples[int(2.1 * SECOND) : int(4.9 * SECOND)])
    assert quiet.max() < 0.01
    assert loud_from_to(samples[5 * SECOND :])[0] < 0.1


def test_the_track_that_is_heard():
    nothing, first, second = np.zeros(96_000), tone(48_000, 2.0), tone(48_000, 1.0)
    said: list[str] = []

    def seconds(tracks, **options):
        said.clear()
        data = io.BytesIO(film(tracks, [0.0] * len(tracks)))
        start_s, end_s = loud_from_to(read_audio(data, on_message=said.append, **options))
        assert start_s < 0.1
        return round(end_s)

    assert seconds([first, second]) == 2
    assert said == ["the recording: track 1 of 2 is transcribed"]
    assert seconds([first, second], track=2) == 1 and said == []
    assert seconds([nothing, nothing, second]) == 1
    assert said == ["the recording: track 3 of 3 is transcribed; those before it are silent"]
    silent = read_audio(io.BytesIO(film([nothing, nothing], [0.0, 0.0])))
    assert len(silent) / SECOND == pytest.approx(2.0, abs=0.1) and not silent.any()
    with pytest.raises(UsageError, match="track 3: the recording has 2"):
        read_audio(io.BytesIO(film([first, second], [0.0, 0.0])), track=3)


def test_inputs_are_checked_without_reading_them_whole(tmp_path):
    good = tmp_path / "good.wav"
    good.write_bytes(wav(encoded(tone(SECOND), 16), SECOND, 1, 16))
    check_audio(str(good))
    for name, data, problem in (
        ("none.wav", None, "No such file"),
        ("empty.wav", b"", "empty, 0 bytes"),
        ("mute.wav", wav(b"", SECOND, 1, 16), "no sound in it, not one sample"),
        ("text.mp3", b"a text, no sound at all", "not a recording that can be read"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(EdgespecError, match=problem):
            check_audio(str(tmp_path / name))
    with pytest.raises(UsageError, match="Is a directory"):
        check_audio(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    check_audio(str(tmp_path / "pipe"))  # nothing is read: it could not be read again


def test_a_film_without_sound(tmp_path):
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as made:
        stream = made.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        made.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        made.mux(stream.encode(None))
    with pytest.raises(EdgespecError, match="no sound in it, only pictures or text"):
        read_audio(path)


def test_without_pyav_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    path = tmp_path / "a.mp3"
    path.write_bytes(b"ID3" + b"\0" * 50)
    with pytest.raises(EdgespecError, match=r"pip install 'edgespec\[audio\]'"):
        read_audio(path)
    assert len(read_audio(io.BytesIO(wav(encoded(tone(SECOND), 16), SECOND, 1, 16)))) == SECOND // 2


@pytest.mark.parametrize("seed", range(40))
def test_damaged_wav_files_are_read_or_refused(seed):
    rng = np.random.default_rng(seed)
    data = bytearray(wav(encoded(tone(SECOND, 0.05), 16), SECOND, 1, 16))
    for _ in range(4):
        data[rng.integers(0, 60)] = rng.integers(0, 256)
    try:
        samples = read_audio(io.BytesIO(bytes(data[: rng.integers(1, len(data))])))
    except EdgespecError as error:
        assert "\n" not in str(error)
    else:
        assert np.isfinite(samples).all()
