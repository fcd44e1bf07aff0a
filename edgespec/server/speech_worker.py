"""The thread that transcribes recordings, one after the other, in turns by client.

It shares the processors with the engine's thread: a window of a recording and a pass over texts take turns. A
request that must end does so after the window under way; what was heard before has been sent by then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.energy import EnergyMeter
from edgespec.platform.turns import Turns
from edgespec.server.request_queue import (
    Abandoned,
    QueueFull,
    QueuePlace,
    RequestQueue,
    ShuttingDown,
    TimedOut,
)
from edgespec.server.worker import Outcome
from edgespec.speech.options import SpeechOptions
from edgespec.speech.transcriber import Transcriber
from edgespec.speech.transcript import Segment, Transcript

SpeechItem: TypeAlias = QueuePlace | Segment | Transcript
"""An item that a worker yields for a recording; the transcript is the last one."""


@dataclass(eq=False, slots=True)
class SpeechRequest:
    """One recording to be transcribed; its reader is on an event loop, the model on a thread."""

    samples: npt.NDArray[np.float32]
    options: SpeechOptions
    client: str
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[SpeechItem | BaseException] = field(default_factory=asyncio.Queue)
    place: int = 0
    """In the queue, from 1; 0: not known yet, or it has begun."""
    cancelled: BaseException | None = None
    """Why it must end; only the first reason is kept."""
    timer: asyncio.TimerHandle | None = None

    def tell(self, item: SpeechItem | BaseException) -> None:
        """Hand an item to the reader, from any thread."""
        self.call(lambda: self.news.put_nowait(item))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the reader's event loop, from any thread."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancelled = self.cancelled or Abandoned()


class SpeechWorker:
    """Transcribes on its own thread, one recording at a time."""

    def __init__(
        self,
        transcriber: Transcriber,
        *,
        turns: Turns | None = None,
        max_queue: int = 64,
        max_seconds: float = 600.0,
        meter: EnergyMeter | None = None,
    ) -> None:
        """Let at most `max_queue` recordings wait, each up to `max_seconds`; then it may take as long again.

        From `start` to the end of `stop` only the thread uses the model of `transcriber`. `turns`: shared
        with whatever else computes in this process. `meter`: measures the joules of each recording.
        """
        self.on_end: Callable[[Outcome, Transcript | None], None] = lambda _outcome, _transcript: None
        """Told how a recording ended; called on this worker's thread or on the event loop."""
        self._meter = meter
        self.transcriber = transcriber
        self._turns = turns or Turns()
        self._max_queue, self._max_seconds = max_queue, max_seconds
        self._changed = threading.Condition()
        self._queue: RequestQueue[SpeechRequest] = RequestQueue()
        self._running: SpeechRequest | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="edgespec speech", daemon=True)

    @property
    def n_waiting(self) -> int:
        """Recordings in the queue, without the one that is heard."""
        with self._changed:
            return len(self._queue)

    parallel = 1
    """Most recordings heard at once."""

    @property
    def n_running(self) -> int:
        """Recordings being heard."""
        return int(self.busy)

    @property
    def stopping(self) -> bool:
        """Whether new recordings are refused because the server ends."""
        return self._stopping

    @property
    def busy(self) -> bool:
        """Whether a recording is being heard."""
        return self._running is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new and waiting recordings, let the one that is heard go on for `grace_s` seconds, end."""
        with self._changed:
            self._stopping = True
            waiting = self._queue.in_order([])
            running = self._running
            self._changed.notify()
        for request in waiting:
            self._cancel(request, ShuttingDown())
        loop = asyncio.get_running_loop()
        timer = loop.call_later(grace_s, self._cancel, running, ShuttingDown()) if running else None
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        if timer:
            timer.cancel()

    async def run(
        self, samples: npt.NDArray[np.float32], options: SpeechOptions, *, client: str
    ) -> AsyncGenerator[SpeechItem]:
        """Wait for the turn of `client`, then yield the segments of a recording as they come, and all of it.

        Before them come its places in the queue, if it must wait. Closing the generator ends the work after
        the window under way. Raises QueueFull, TimedOut, ShuttingDown, and what the transcriber raises.
        """
        loop = asyncio.get_running_loop()
        request = SpeechRequest(samples, options, client, loop)
        self._put(request)
        try:
            request.timer = loop.call_later(self._max_seconds, self._time_out, request)
            while True:
                item = await request.news.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Transcript):
                    return
        finally:
            self._cancel(request, Abandoned())
            if request.timer:
                request.timer.cancel()

    # ---- the event loop's side ----

    def _put(self, request: SpeechRequest) -> None:
        with self._changed:
            if self._stopping:
                raise ShuttingDown
            n_waiting = len(self._queue)
            if n_waiting >= self._max_queue and self._running:
                raise QueueFull(n_waiting)
            self._queue.add(request)
            self._changed.notify()
        self._tell_places()

    def _cancel(self, request: SpeechRequest, reason: BaseException) -> None:
        """End `request`, in the queue or under way; do nothing if it has ended."""
        with self._changed:
            if request.cancelled:
                return
            request.cancelled = reason
            if request is self._running:
                return
            try:
                self._queue.remove(request)
            except (KeyError, ValueError):  # it has ended
                return
        self._count(_outcome(reason) or "cancelled")
        request.tell(reason)

    def _time_out(self, request: SpeechRequest) -> None:
        self._cancel(request, TimedOut(self._max_seconds, in_queue=request is not self._running))

    def _begin_clock(self, request: SpeechRequest) -> None:
        if request.timer and not request.cancelled:
            request.timer.cancel()
            request.timer = request.loop.call_later(self._max_seconds, self._time_out, request)

    def _tell_places(self) -> None:
        """Tell those who wait their places, where these have changed."""
        with self._changed:
            order = self._queue.in_order([self._running] if self._running else [])
            moved = [(place, request) for place, request in enumerate(order, 1) if place != request.place]
            for place, request in moved:
                request.place = place
        for place, request in moved:
            request.tell(QueuePlace(place))

    # ---- the thread's side ----

    def _work(self) -> None:
        while request := self._next():
            self._tell_places()
            try:
                self._hear(request)
            except BaseException as error:  # noqa: BLE001 - it ends this request, not the thread
                request.tell(error)
            finally:
                with self._changed:
                    self._running = None

    def _next(self) -> SpeechRequest | None:
        """Wait for the next request, which now runs; None when the worker must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._queue)
            request = next(iter(self._queue.in_order([])), None)
            if request is None:
                return None
            self._queue.begin(request)
            self._running = request
            return request

    def _hear(self, request: SpeechRequest) -> None:
        request.call(lambda: self._begin_clock(request))
        request.tell(QueuePlace(0))

        def between_windows(_done_s: float, _total_s: float) -> None:
            if request.cancelled:
                raise request.cancelled
            self._turns.hand_over()

        ours = self.transcriber
        heard = Transcriber(ours.model, ours.tokenizer, request.options, drafts=ours.drafts)
        with self._turns:
            hearing = heard.hear(request.samples, on_progress=between_windows)
            window = self._meter.begin() if self._meter else None
            try:
                for segment in hearing.segments():
                    request.tell(segment)
            finally:
                if window:
                    hearing.transcript.energy = window.end()
                outcome: Outcome = "finished" if hearing.transcript.complete else "failed"
                self._count(_outcome(request.cancelled) or outcome, hearing.transcript)
        request.tell(hearing.transcript)

    def _count(self, outcome: Outcome, transcript: Transcript | None = None) -> None:
        with suppress(Exception):  # an error in counting must not end a request
            self.on_end(outcome, transcript)


def _outcome(cancelled: BaseException | None) -> Outcome | None:
    """Return how a request ended that was cancelled; None if it was not."""
    if cancelled is None:
        return None
    return "timed out" if isinstance(cancelled, TimedOut) else "cancelled"
