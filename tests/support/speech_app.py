"""The server's audio routes over a model that says a script, on a loopback port."""

from __future__ import annotations

import contextlib
import io
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.apps.server.audio_routes import SpeechService, SpeechWorker
from edgespec.apps.speech.transcriber import Transcriber
from toy_speech import ScriptedWhisper, toy_tokenizer

SECOND = 16_000


def wav(samples: np.ndarray, rate: int = SECOND) -> bytes:
    """Samples of one channel as a WAV file of 16 bits."""
    data = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
    head = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, int(seconds * SECOND)).astype(np.float32)


def recording(seconds: float = 1.0) -> io.BytesIO:
    file = io.BytesIO(wav(noise(seconds)))
    file.name = "speech.wav"
    return file


class GatedWhisper(ScriptedWhisper):
    """Says the first script again for each recording; its windows wait for `gate`."""

    def __init__(self, tokenizer, scripts, path: Path, **options):
        super().__init__(tokenizer, scripts, **options)
        self.path = path
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def encode(self, mel):
        self.begun.set()
        assert self.gate.wait(30)
        found = super().encode(mel)
        found.window = (len(self.mels) - 1) % len(self.scripts)
        return found


def timed(tokenizer, text: str, start_s: float, end_s: float) -> list[int]:
    """The tokens of a segment with its times."""
    begin = tokenizer.timestamp_begin
    return [begin + round(50 * start_s), *tokenizer.encode(text), begin + round(50 * end_s)]


@dataclass
class Speech:
    """The speech side of a server."""

    model: GatedWhisper
    worker: SpeechWorker
    service: SpeechService


@contextlib.contextmanager
def speech_service(
    path: Path, *, multilingual: bool = True, most_s: float = 100.0, **limits
) -> Iterator[Speech]:
    """A service whose model says two segments: " Hello there." and " Good bye."."""
    tokenizer = toy_tokenizer(multilingual=multilingual)
    script = timed(tokenizer, " Hello there.", 0.0, 0.5) + timed(tokenizer, " Good bye.", 0.5, 0.9)
    model = GatedWhisper(tokenizer, [script], path, language="de" if multilingual else "en")
    worker = SpeechWorker(Transcriber(model, tokenizer), **limits)
    yield Speech(model, worker, SpeechService("whisper-tiny", worker, most_s))
