"""The thread that runs the engine for all requests at once.

The event loop hands requests over and gets lists of tokens back; neither side waits for the other with a lock
held. Before each pass the thread lets waiting requests begin while the engine has room, in turns by client
(request_queue.py); each pass then serves all that run. A request that must end is only marked: the thread
ends it after the pass, so the others are not disturbed. A pass is interrupted only if all requests under way
must end. One lock guards the queue and which requests run.

Tokens that nobody has read yet wait in a list of their request, so a slow reader stalls nobody. The list is
never longer than the answer, which n_predict and the context limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Token
from edgespec.engine.batcher import StepSummary
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.platform.signals import Cancellation
from edgespec.platform.turns import Turns
from edgespec.server.request_queue import (
    Abandoned,
    QueuedRequest,
    QueueFull,
    QueuePlace,
    RequestQueue,
    ShuttingDown,
    TimedOut,
)

Outcome = Literal["finished", "cancelled", "timed out", "failed"]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """How a request ended."""

    outcome: Outcome
    waited_s: float
    """Seconds in the queue."""
    result: Result | None
    """The text that was written, complete or not; None for a request that never began or that failed."""


class Worker:
    """Runs generations on its own thread, as many at once as the engine may.

    `engine` was made with `cancellation` as its signals; from `start` to the end of `stop` only that thread
    uses it. `on_end` and `on_pass` are called on that thread.
    """

    def __init__(
        self,
        engine: Engine,
        cancellation: Cancellation,
        *,
        max_queue: int = 64,
        max_seconds: float = 600.0,
        on_end: Callable[[EndedRequest], None] = lambda _ended: None,
        turns: Turns | None = None,
    ) -> None:
        """Let at most `max_queue` requests wait, each up to `max_seconds`; then it may run as long again.

        `turns`: shared with whatever else computes in this process.
        """
        self._engine = engine
        self._cancellation = cancellation
        self.parallel = engine.parallel
        """Most requests under way at once."""
        self.turns = turns or Turns()
        """Taken by each pass, and by what else computes."""
        self._max_queue = max_queue
        self._max_seconds = max_seconds
        self.on_end = on_end
        self.on_pass: Callable[[StepSummary], None] = lambda _passed: None
        """Told of each pass of the target."""
        self._changed = threading.Condition()
        self._queue: RequestQueue[QueuedRequest] = RequestQueue()
        self._running: list[QueuedRequest] = []
        self._moved = False  # whether places in the queue may be others than those told
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="edgespec worker", daemon=True)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue, without those that run."""
        with self._changed:
            return len(self._queue)

    @property
    def n_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether a request has the engine."""
        return bool(self._running)

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the server ends."""
        return self._stopping

    def start(self) -> None:
        """Start the thread; from now on only it uses the engine."""
        self._thread.start()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new and waiting requests, let those that run go on for `grace_s` seconds, end the thread.

        May be called again with a shorter time meanwhile. Afterwards the caller may use the engine again.
        """
        with self._changed:
            self._stopping = True
            waiting = self._queue.in_order(self._running)
            running = [*self._running]
            self._changed.notify()
        for request in waiting:
            self._cancel(request, ShuttingDown())

        def end() -> None:
            for request in running:
                self._cancel(request, ShuttingDown())

        timer = asyncio.get_running_loop().call_later(grace_s, end) if running else None
        await asyncio.to_thread(self._thread.join)
        if timer:
            timer.cancel()

    async def run(
        self, tokens: Sequence[int], options: Options, *, client: str, follows: bool = False
    ) -> AsyncGenerator[list[Token] | QueuePlace | Result]:
        """Wait for the turn of `client`, then yield the tokens of a generation as they come, and its Result.

        The tokens of a step come together. Before them come its places in the queue, if it must wait.
        Closing the generator, or cancelling the task that waits for it, ends the generation after the pass
        under way or takes it out of the queue. `follows`: it takes the place of an earlier text of the same
        request, and is not refused for a full queue. Raises QueueFull, TimedOut, ShuttingDown, and what the
        engine raises.
        """
        loop = asyncio.get_running_loop()
        request = QueuedRequest(tokens, options, client, loop, came=time.perf_counter())
        self._put(request, follows=follows)
        told = 0
        try:
            request.timer = loop.call_later(self._max_seconds, self._time_out, request)
            while True:
                await request.news.wait()
                request.news.clear()
                end = request.end  # read before the list, which then holds all tokens made before the end
                if not isinstance(end, BaseException) and (place := request.place) != told:
                    told = place
                    yield QueuePlace(place)
                if made := request.take():
                    yield made
                if isinstance(end, BaseException):
                    raise end
                if end is not None:
                    yield end
                    return
        finally:
            self._cancel(request, Abandoned())
            if request.timer:
                request.timer.cancel()

    # ---- the event loop's side ----

    def _put(self, request: QueuedRequest, *, follows: bool) -> None:
        with self._changed:
            if self._stopping:
                raise ShuttingDown
            n_waiting = len(self._queue)
            if not follows and n_waiting + len(self._running) >= self._max_queue + self.parallel:
                raise QueueFull(n_waiting)
            self._queue.add(request)
            self._moved = True
            self._changed.notify()

    def _cancel(self, request: QueuedRequest, reason: BaseException) -> None:
        """End `request`, in the queue or under way; do nothing if it has ended."""
        with self._changed:
            if request.end is not None or request.cancelled:
                return
            request.cancelled = reason
            if request in self._running:
                if all(running.cancelled for running in self._running):
                    self._cancellation.cancel()
                return
            self._queue.remove(request)
            self._moved = True
            request.end = reason
        self._count(_outcome(request, reason), time.perf_counter() - request.came)
        request.tell()

    def _time_out(self, request: QueuedRequest) -> None:
        self._cancel(request, TimedOut(self._max_seconds, in_queue=request not in self._running))

    def _begin_clock(self, request: QueuedRequest) -> None:
        if request.timer and not request.cancelled and request.end is None:
            request.timer.cancel()
            request.timer = request.loop.call_later(self._max_seconds, self._time_out, request)

    # ---- the thread's side ----

    def _work(self) -> None:
        while self._wait():
            while request := self._next():
                self._begin(request)
            self._tell_places()
            self._step()

    def _wait(self) -> bool:
        """Wait until there is something to do; return False when the worker must end."""
        with self._changed:
            while not self._running and not self._queue:
                if self._stopping:
                    return False
                self._changed.wait()
            return True

    def _next(self) -> QueuedRequest | None:
        """Return the request whose turn it is, which now runs; None if there is none or no room for it."""
        with self._changed:
            request = next(iter(self._queue.in_order(self._running)), None)
            if request is None or not self._engine.has_room(len(request.tokens), request.options.n_predict):
                return None
            self._queue.begin(request)
            self._running.append(request)
            self._moved = True
            request.place = 0
            return request

    def _begin(self, request: QueuedRequest) -> None:
        request.waited_s = time.perf_counter() - request.came
        request.tell(partial(self._begin_clock, request))
        request.tell()  # of its place
        try:
            request.stream = self._engine.stream(request.tokens, request.options)
        except BaseException as error:  # noqa: BLE001 - it ends this request, not the thread
            self._end(request, error)

    def _tell_places(self) -> None:
        """Tell those who wait their places in the queue, where these have changed."""
        with self._changed:
            if not self._moved:
                return
            self._moved = False
            for place, request in enumerate(self._queue.in_order(self._running), 1):
                if place != request.place:
                    request.place = place
                    request.tell()

    def _step(self) -> None:
        """Make a pass for all requests that run; hand their tokens over and end those that must end."""
        for request in [*self._running]:
            if request.cancelled:
                self._end(request)
        if not self._running:
            return
        error: Exception | None = None
        try:
            with self.turns:
                self._engine.step()
        except Exception as raised:  # noqa: BLE001 - no single request's: a request's own comes with its tokens
            error = raised
        except BaseException:  # noqa: BLE001 - raised to end the pass; it must not end this thread
            # What interrupted this pass must not interrupt the next one. Whoever asked for it is marked.
            self._cancellation.drain()
        else:
            with contextlib.suppress(Exception):  # an error in counting passes must not end a request
                self.on_pass(self._engine.last_pass)
        for request in [*self._running]:
            self._hand_over(request, error)

    def _hand_over(self, request: QueuedRequest, error: Exception | None) -> None:
        """Give a request's new tokens to its reader, and end it if nothing follows or the pass failed."""
        assert request.stream  # noqa: S101 - for the type checker: a request without one has ended
        try:
            request.hand_over(request.stream.made())
        except BaseException as raised:  # noqa: BLE001 - it ends this request, not the thread
            self._end(request, raised)
            return
        if error and not request.stream.finished:
            self._end(request, error)
        elif request.stream.finished or request.cancelled:
            self._end(request)

    def _end(self, request: QueuedRequest, error: BaseException | None = None) -> None:
        """Take `request` out of those that run, and tell its reader how it ended."""
        if request.stream:
            with contextlib.suppress(Exception):
                request.stream.close()
        is_interrupt = not (error is None or isinstance(error, Exception))
        end: Result | BaseException
        if request.stream and (error is None or (is_interrupt and request.cancelled)):
            end = request.stream.result
        elif error and not is_interrupt:
            end = error
        else:
            end = EdgespecError("the generation was interrupted")
        outcome = _outcome(request, end)
        self._count(outcome, request.waited_s, end)
        with self._changed:
            self._running.remove(request)
            self._moved = True
            request.end = request.cancelled if outcome in ("cancelled", "timed out") else end
        request.tell()

    def _count(self, outcome: Outcome, waited_s: float, end: Result | BaseException | None = None) -> None:
        with contextlib.suppress(Exception):  # an error in counting requests must not end one
            self.on_end(EndedRequest(outcome, waited_s, end if isinstance(end, Result) else None))


def _outcome(request: QueuedRequest, end: Result | BaseException) -> Outcome:
    if isinstance(end, Result) and end.stop_reason != "interrupted":
        return "finished"
    if request.cancelled:
        return "timed out" if isinstance(request.cancelled, TimedOut) else "cancelled"
    return "failed"
