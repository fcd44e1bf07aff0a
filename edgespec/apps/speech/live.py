"""Speech as it comes: a hypothesis every second, and final text whenever a window is full.

A hypothesis is the text of the sound since the last final segment, decoded again from the start each time, so
the one before it drafts most of it. Windows of 30 seconds become final as in a file: with the same sound the
text is a file's, but for the loudness that the spectrogram is scaled by, which is the window's own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from edgespec.apps.speech.audio import is_silent
from edgespec.apps.speech.mel import HOP, N_FRAMES, SAMPLE_RATE, log_mel, window_of
from edgespec.apps.speech.transcriber import Hearing, Samples, Transcriber
from edgespec.apps.speech.transcript import Segment, Transcript

_EVERY_S = 1.0
_LEAST_S = 0.4  # of sound for a hypothesis


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The text that is not final yet, and the time of sound that it reaches to."""

    text: str
    end_s: float


class SoundQueue:
    """Blocks of sound that a thread of its own reads, so that none is lost while the model works."""

    def __init__(self, blocks: Iterator[Samples]) -> None:
        """Begin to read `blocks`."""
        self._queue: queue.SimpleQueue[Samples | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(blocks,), daemon=True)
        self._thread.start()
        self.ended = False
        """Whether all was read that there is."""

    def _read(self, blocks: Iterator[Samples]) -> None:
        try:
            for block in blocks:
                self._queue.put(block)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._queue.put(error)
        self._queue.put(None)

    def take(self, n: int) -> list[Samples]:
        """Return blocks with at least `n` samples, and all that are there; fewer at the end.

        Raises what reading raised.
        """
        found, n_found = list[Samples](), 0
        while not self.ended and (n_found < n or not self._queue.empty()):
            block = self._queue.get()
            if isinstance(block, np.ndarray):
                found.append(block)
                n_found += len(block)
            else:
                self.ended = True
                if block is not None:
                    raise block
        return found


class LiveHearing:
    """One transcription of sound that is still coming."""

    def __init__(
        self, transcriber: Transcriber, blocks: Iterator[Samples], *, every_s: float = _EVERY_S
    ) -> None:
        """Hear `blocks` of samples (16 kHz); a hypothesis is made after each `every_s` seconds of sound."""
        self._hearing = Hearing(transcriber, np.empty(0, np.float32))
        self._n_mels = transcriber.model.dims.n_mels
        self._sound = SoundQueue(blocks)
        self._every = max(1, round(every_s * SAMPLE_RATE))
        self._buffer = np.empty(0, np.float32)  # since the last window's end
        self._seek = 0  # frames before it
        self.transcript.silent = True
        self.stopped = False
        """Whether nothing more is to be heard."""

    @property
    def transcript(self) -> Transcript:
        """The text so far that nothing heard later changes."""
        return self._hearing.transcript

    def stop(self) -> None:
        """Hear no more: what has come is made final."""
        self.stopped = True

    def events(self) -> Generator[Segment | Hypothesis]:
        """Yield hypotheses as the sound comes, and segments that are final."""
        stats = self.transcript.stats
        n_window = N_FRAMES * HOP
        while not (self.stopped or self._sound.ended):
            blocks = self._sound.take(self._every)
            self._buffer = np.concatenate([self._buffer, *blocks])
            stats.audio_s += sum(map(len, blocks)) / SAMPLE_RATE
            self.transcript.silent &= all(map(is_silent, blocks))
            started = time.perf_counter()
            while len(self._buffer) >= n_window:
                yield from self._final(N_FRAMES)
            if not self._sound.ended and len(self._buffer) >= _LEAST_S * SAMPLE_RATE:
                yield self._guess()
            stats.total_s += time.perf_counter() - started
        started = time.perf_counter()
        while len(self._buffer) >= HOP:
            yield from self._final(min(N_FRAMES, len(self._buffer) // HOP))
        stats.total_s += time.perf_counter() - started
        stats.heard_s = stats.audio_s
        self.transcript.complete = True

    def _window(self, n_frames: int) -> Samples:
        mel = log_mel(self._buffer[: n_frames * HOP], self._n_mels)
        return window_of(mel[:, :n_frames], 0)

    def _final(self, n_frames: int) -> list[Segment]:
        segments: list[Segment] = []
        n_heard = self._hearing.silent_frames(self._buffer[: n_frames * HOP])
        if not n_heard:
            segments, n_heard = self._hearing.window(self._window(n_frames), self._seek, n_frames)
        self._buffer = self._buffer[n_heard * HOP :]
        self._seek += n_heard
        self.transcript.stats.heard_s = self._seek * HOP / SAMPLE_RATE
        return segments

    def _guess(self) -> Hypothesis:
        n_frames = min(N_FRAMES, len(self._buffer) // HOP)
        text = "" if is_silent(self._buffer) else self._hearing.guess(self._window(n_frames), n_frames)
        return Hypothesis(text, (self._seek + n_frames) / 100)
