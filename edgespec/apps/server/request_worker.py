"""Requests, the order in which they begin, and threads that serve them, for readers on an event loop.

The event loop hands requests over and gets lists of what is made back; neither side waits for the other with
a lock held. A request that must end is only marked: the thread ends it when it can. One lock guards the queue
and which requests run.

The thread sends what it makes to the reader's own queue on the event loop (`RequestRun`), so a slow reader
stalls nobody. That queue is never longer than the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypedDict, TypeVar

from edgespec.decoding.records import PromptProgress
from edgespec.errors import EdgespecError
from edgespec.platform.turns import Turns


class QueueFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The queue is full; this request is refused."""

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} requests wait already; try again later")


class TimedOut(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The answer took too long, or its turn did not come in time."""

    def __init__(self, seconds: float, *, in_queue: bool) -> None:
        what = "its turn did not come" if in_queue else "the answer was not complete"
        super().__init__(f"{what} within {seconds:g} s; try again later, or ask for less")


class ShuttingDown(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The server is shutting down: new and waiting requests are not begun."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Abandoned(Exception):  # noqa: N818 - no error: its reader went away
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A request's place in the queue, or the progress of reading its prompt."""

    place: int
    """1 for the one that begins next; 0 once it has begun."""
    progress: PromptProgress | None = None
    """How far its prompt is read, where that takes several passes."""


Part = TypeVar("Part")
"""A piece of an answer, such as a token."""
End = TypeVar("End")
"""An answer with all its facts, complete or not."""


@dataclass(eq=False, slots=True)
class QueuedRequest(Generic[Part, End]):
    """One request; its reader is on an event loop, its work is done on a thread."""

    client: str
    """Who takes a turn."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    came: float = field(default_factory=time.perf_counter)
    """When it came, by `time.perf_counter`."""
    waited_s: float = 0.0
    """Seconds in the queue, once it has left it."""
    place: int = 0
    """In the queue, from 1; 0: not known yet, or it has begun."""
    progress: PromptProgress | None = None
    """How far its prompt is read; None: not begun, or no longer of interest."""
    send: Callable[[list[Part] | QueuePlace | End | BaseException], object] = lambda _item: None
    """Takes the items for its reader, on its event loop."""
    timer: asyncio.TimerHandle | None = None
    cancelled: BaseException | None = None
    """Why it must end; only the first reason is kept."""
    end: End | BaseException | None = None

    def call(self, change: Callable[[], object]) -> None:
        """Call `change` on the request's event loop. May be called from any thread."""
        try:
            self.loop.call_soon_threadsafe(change)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancelled = self.cancelled or Abandoned()

    def notify(self, item: list[Part] | QueuePlace | End | BaseException) -> None:
        """Send an item to the request's reader. May be called from any thread."""
        self.call(partial(self.send, item))

    def hand_over(self, step: list[Part]) -> None:
        """Send the reader what a step made."""
        if step:
            self.notify(step)


_R = TypeVar("_R", bound=QueuedRequest[Any, Any])


class RequestQueue(Generic[_R]):
    """The requests that wait, in turns by client.

    The next one is of the client with the fewest running; ties go to the client who has waited longest for a
    turn. The requests of one client keep their order.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_R]] = OrderedDict()  # who has waited longest first

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, request: _R) -> None:
        """Add `request` to its client's waiting ones."""
        self._queues.setdefault(request.client, deque()).append(request)

    def remove(self, request: _R) -> None:
        """Remove `request`, which leaves before its turn."""
        queue = self._queues[request.client]
        queue.remove(request)
        if not queue:
            del self._queues[request.client]

    def begin(self, request: _R) -> None:
        """Remove `request`, whose turn has come: its client's next one comes after the others' next."""
        self.remove(request)
        if request.client in self._queues:
            self._queues.move_to_end(request.client)

    def in_order(self, running: Iterable[_R]) -> list[_R]:
        """Return all requests in the order in which they begin if none of `running` ends before."""
        n_running = Counter(request.client for request in running)
        places = [
            ((n_running[client] + i, i, turn), request)
            for turn, (client, queue) in enumerate(self._queues.items())
            for i, request in enumerate(queue)
        ]
        return [request for _, request in sorted(places, key=lambda placed: placed[0])]


Outcome = Literal["finished", "cancelled", "timed out", "failed"]


@dataclass(frozen=True, slots=True)
class EndedRequest(Generic[End]):
    """How a request ended."""

    outcome: Outcome
    waited_s: float
    """Seconds in the queue."""
    result: End | None
    """The answer, complete or not; None if nothing of it is there."""


Item: TypeAlias = list[Part] | QueuePlace | End | BaseException
"""An item for a reader: its place in the queue, parts, then the end, or why there is none."""

Start: TypeAlias = Callable[[Callable[[Item[Part, End]], None]], Callable[[], None]]
"""A function that begins an answer: it takes the receiver of items and returns what ends the answer."""

Asked = TypeVar("Asked", bound=QueuedRequest[Any, Any])
"""A request with the parts and the end that its worker makes."""


class QueueLimits(TypedDict, total=False):
    """How many requests wait for a worker, and for how long."""

    max_queue: int
    """Most requests that wait."""
    max_seconds: float
    """Seconds that each may wait; then it may run as long again."""
    turns: Turns
    """Those that the worker takes with whatever else computes in this process."""


class RequestWorker(ABC, Generic[Asked, Part, End]):
    """Serves requests on its own thread, in turns by client, as many at once as it may.

    `on_end` is called on that thread or on the event loop.
    """

    def __init__(
        self,
        name: str,
        *,
        parallel: int,
        max_queue: int = 64,
        max_seconds: float = 600.0,
        turns: Turns | None = None,
    ) -> None:
        """Let `parallel` requests run at once on a thread of this `name`; for the rest see `QueueLimits`."""
        self.parallel = parallel
        """Most requests under way at once."""
        self.turns = turns or Turns()
        """Taken by each pass, and by what else computes."""
        self.on_end: Callable[[EndedRequest[End]], None] = lambda _ended: None
        self._max_queue, self._max_seconds = max_queue, max_seconds
        self._changed = threading.Condition()
        self._queue: RequestQueue[Asked] = RequestQueue()
        self._running: list[Asked] = []
        self._moved = False  # whether places in the queue may be others than those told
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

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
        """Whether a request is under way."""
        return bool(self._running)

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused because the server is shutting down."""
        return self._stopping

    def start(self) -> None:
        """Start the thread; from now on only it uses the models."""
        self._thread.start()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new and waiting requests, give those that run `grace_s` seconds, end the thread.

        May be called again with a shorter time meanwhile. Afterwards the caller may use the models again.
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
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        if timer:
            timer.cancel()

    # ---- the event loop's side ----

    def _ask(
        self,
        make: Callable[[], Asked],
        send: Callable[[Item[Part, End]], None],
        *,
        follows: bool = False,
    ) -> Callable[[], None]:
        """Put the request that `make` returns into the queue; return what its reader calls at the end.

        `send` gets its places in the queue, if it must wait, the progress of a long prompt, what is made for
        it, and at last its end: an error is TimedOut, ShuttingDown, or what the work raises. `follows`: a
        full queue does not refuse it. Raises QueueFull and ShuttingDown.
        """
        request = make()
        request.send = send
        self._enqueue(request, follows=follows)
        request.timer = request.loop.call_later(self._max_seconds, self._time_out, request)

        def leave() -> None:
            self._cancel(request, Abandoned())
            if request.timer:
                request.timer.cancel()

        return leave

    def _enqueue(self, request: Asked, *, follows: bool) -> None:
        with self._changed:
            if self._stopping:
                raise ShuttingDown
            n_waiting = len(self._queue)
            if not follows and n_waiting + len(self._running) >= self._max_queue + self.parallel:
                raise QueueFull(n_waiting)
            self._queue.add(request)
            self._moved = True
            self._changed.notify()

    def _cancel(self, request: Asked, reason: BaseException) -> None:
        """End `request`, in the queue or under way; do nothing if it has ended."""
        with self._changed:
            if request.end is not None or request.cancelled:
                return
            request.cancelled = reason
            if request in self._running:
                if all(running.cancelled for running in self._running):
                    self._interrupt()
                return
            self._queue.remove(request)
            self._moved = True
            request.end = reason
        self._count(cancelled_as(reason), time.perf_counter() - request.came, None)
        request.notify(reason)

    def _interrupt(self) -> None:
        """Interrupt the thread's current work, if possible: all requests under way must end."""

    def _time_out(self, request: Asked) -> None:
        self._cancel(request, TimedOut(self._max_seconds, in_queue=request not in self._running))

    def _begin_clock(self, request: Asked) -> None:
        if request.timer and not request.cancelled and request.end is None:
            request.timer.cancel()
            request.timer = request.loop.call_later(self._max_seconds, self._time_out, request)

    # ---- the thread's side ----

    def _work(self) -> None:
        while self._wait():
            while request := self._next():
                self._begin(request)
            self._notify_places()
            if self._running:  # no: those that waited may have left since
                self._step()

    @abstractmethod
    def _has_room(self, request: Asked) -> bool:
        """Whether `request` can begin while the others run."""

    @abstractmethod
    def _begin(self, request: Asked) -> None:
        """Begin `request`, whose turn has come."""

    @abstractmethod
    def _step(self) -> None:
        """Do the next piece of work for all requests that run, and end those that must end."""

    def _wait(self) -> bool:
        """Wait until there is something to do; return False when the worker must end."""
        with self._changed:
            while not self._running and not self._queue:
                if self._stopping:
                    return False
                self._changed.wait()
            return True

    def _next(self) -> Asked | None:
        """Return the request whose turn it is, which now runs; None if there is none or no room for it."""
        with self._changed:
            request = next(iter(self._queue.in_order(self._running)), None)
            if request is None or not self._has_room(request):
                return None
            self._queue.begin(request)
            self._running.append(request)
            self._moved = True
            waited, request.place = request.place, 0
        request.waited_s = time.perf_counter() - request.came
        request.call(partial(self._begin_clock, request))
        if waited:
            request.notify(QueuePlace(0))
        return request

    def _notify_places(self) -> None:
        with self._changed:
            if not self._moved:
                return
            self._moved = False
            for place, request in enumerate(self._queue.in_order(self._running), 1):
                if place != request.place:
                    request.place = place
                    request.notify(QueuePlace(place))

    def _leave(self, request: Asked, outcome: Outcome, end: End | BaseException, result: End | None) -> None:
        """Remove `request` from those that run, and notify its reader of its end; `result` is counted."""
        self._count(outcome, request.waited_s, result)
        with self._changed:
            self._running.remove(request)
            self._moved = True
            request.end = end
        request.notify(end)

    def _count(self, outcome: Outcome, waited_s: float, result: End | None) -> None:
        with contextlib.suppress(Exception):  # an error in counting requests must not end one
            self.on_end(EndedRequest(outcome, waited_s, result))


def cancelled_as(reason: BaseException) -> Outcome:
    """Return the outcome of a request that was cancelled for this reason."""
    return "timed out" if isinstance(reason, TimedOut) else "cancelled"
