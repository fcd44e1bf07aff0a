"""Requests, from the queue to their end, and the order in which they begin."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from edgespec.decoding.records import PromptProgress
from edgespec.errors import EdgespecError


class QueueFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """As many requests wait as the queue holds; this one is refused."""

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} requests wait already; try again later")


class TimedOut(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The answer took too long, or its turn did not come in time."""

    def __init__(self, seconds: float, *, in_queue: bool) -> None:
        what = "its turn did not come" if in_queue else "the answer was not complete"
        super().__init__(f"{what} within {seconds:g} s; try again later, or ask for less")


class ShuttingDown(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The server ends: a request that came now or still waited is not begun."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Abandoned(Exception):  # noqa: N818 - no error: its reader went away
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A request waits in the queue, or its prompt is read."""

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
    """One request; its reader is on an event loop, what it asks for on a thread."""

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
    """Takes what its reader is told, on its event loop."""
    timer: asyncio.TimerHandle | None = None
    cancelled: BaseException | None = None
    """Why it must end; only the first reason is kept."""
    end: End | BaseException | None = None

    def call(self, change: Callable[[], object]) -> None:
        """Call `change` on the request's event loop; from any thread."""
        try:
            self.loop.call_soon_threadsafe(change)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancelled = self.cancelled or Abandoned()

    def tell(self, item: list[Part] | QueuePlace | End | BaseException) -> None:
        """Send an item to the request's reader; from any thread."""
        self.call(partial(self.send, item))

    def hand_over(self, step: list[Part]) -> None:
        """Give the reader what a step made."""
        if step:
            self.tell(step)


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
        """Add `request` to those of its client that wait."""
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
