"""The thread that runs the engine, and the queue of requests for it.

The event loop hands jobs over and gets lists of tokens back; neither side waits for the other with a lock
held. Clients take turns: round robin over their names, first come first served within one. One lock guards
the queue and which job has the engine. A cancellation is sent only to the job that has the engine; one that
arrives too late is discarded by the engine when the next job starts.

Tokens that nobody has read yet wait in a list of their job, so a slow reader stalls nobody. The list is never
longer than the answer, which n_predict and the context limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.options import Options
from edgespec.platform.signals import Cancellation
from edgespec.records import Result, Token

Outcome = Literal["finished", "cancelled", "timed out", "failed"]


class QueueFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The queue is full."""

    def __init__(self, n_waiting: int) -> None:
        super().__init__(f"{n_waiting} requests wait already; try again later")
        self.n_waiting = n_waiting


class TimedOut(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The answer took too long, or its turn did not come in time."""

    def __init__(self, seconds: float, *, in_queue: bool) -> None:
        what = "its turn did not come" if in_queue else "the answer was not complete"
        super().__init__(f"{what} within {seconds:g} s; try again later, or ask for less")
        self.in_queue = in_queue


class ShuttingDown(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The server ends."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    outcome: Outcome
    waited_s: float
    """Seconds in the queue."""
    result: Result | None
    """What was written, complete or not; None for a job that never began or that failed."""


@dataclass(eq=False, slots=True)
class _Job:
    tokens: Sequence[int]
    options: Options
    client: str
    loop: asyncio.AbstractEventLoop
    came: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    made: deque[list[Token]] = field(default_factory=deque)
    """Steps that the event loop has not taken yet."""
    timer: asyncio.TimerHandle | None = None
    cancelled: BaseException | None = None
    """Why it must end; only the first reason is kept."""
    end: Result | BaseException | None = None

    def tell(self, change: Callable[[], object] | None = None) -> None:
        """Wake the job's reader, or call `change` on its event loop; from any thread."""
        try:
            self.loop.call_soon_threadsafe(change or self.news.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancelled = self.cancelled or _Abandoned()

    def hand_over(self, step: list[Token]) -> None:
        """Give the tokens of a step to the reader."""
        if step:
            self.made.append(step)
            self.tell()

    def take(self) -> list[Token]:
        """Return the tokens that were handed over since the last call."""
        return [token for _ in range(len(self.made)) for token in self.made.popleft()]


class _Abandoned(Exception):  # noqa: N818 - no error: its reader went away
    pass


class Worker:
    """Runs generations one after another on a thread of its own.

    `engine` was made with `cancellation` as its signals; from `start` to the end of `stop` only that thread
    uses it. `on_end` is called on that thread.
    """

    def __init__(
        self,
        engine: Engine,
        cancellation: Cancellation,
        *,
        max_queue: int = 64,
        max_seconds: float = 600.0,
        on_end: Callable[[Ended], None] = lambda _ended: None,
    ) -> None:
        """Let at most `max_queue` jobs wait, each for up to `max_seconds`; then it may run as long again."""
        self._engine = engine
        self._cancellation = cancellation
        self._max_queue = max_queue
        self._max_seconds = max_seconds
        self.on_end = on_end
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()  # the next client first
        self._current: _Job | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="edgespec worker", daemon=True)

    @property
    def n_waiting(self) -> int:
        """Jobs in the queue, without the one that runs."""
        with self._changed:
            return self._n_waiting()

    @property
    def busy(self) -> bool:
        """Whether a job has the engine."""
        return self._current is not None

    @property
    def stopping(self) -> bool:
        """Whether new jobs are refused because the server ends."""
        return self._stopping

    def start(self) -> None:
        """Start the thread; from now on only it uses the engine."""
        self._thread.start()

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new and waiting jobs, let the running one go on for `grace_s` seconds, end the thread.

        May be called again with a shorter time meanwhile. Afterwards the caller may use the engine again.
        """
        with self._changed:
            self._stopping = True
            waiting = [job for queue in self._queues.values() for job in queue]
            current = self._current
            self._changed.notify()
        for job in waiting:
            self._cancel(job, ShuttingDown())
        timer = None
        if current:
            timer = asyncio.get_running_loop().call_later(grace_s, self._cancel, current, ShuttingDown())
        await asyncio.to_thread(self._thread.join)
        if timer:
            timer.cancel()

    async def run(
        self, tokens: Sequence[int], options: Options, *, client: str
    ) -> AsyncGenerator[list[Token] | Result]:
        """Wait for the turn of `client`, then yield the tokens of a generation as they come, and its Result.

        The tokens of a step come together. Closing the generator, or cancelling the task that waits for it,
        ends the generation within one step or takes it out of the queue. Raises QueueFull, TimedOut,
        ShuttingDown, and what the engine raises.
        """
        loop = asyncio.get_running_loop()
        job = _Job(tokens, options, client, loop, came=time.perf_counter())
        self._put(job)
        try:
            job.timer = loop.call_later(self._max_seconds, self._time_out, job)
            while True:
                await job.news.wait()
                job.news.clear()
                end = job.end  # read before the list, which then holds all tokens made before the end
                if made := job.take():
                    yield made
                if isinstance(end, BaseException):
                    raise end
                if end is not None:
                    yield end
                    return
        finally:
            self._cancel(job, _Abandoned())
            if job.timer:
                job.timer.cancel()

    # ---- the event loop's side ----

    def _n_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._stopping:
                raise ShuttingDown
            n_waiting = self._n_waiting()
            if n_waiting + (self._current is not None) > self._max_queue:
                raise QueueFull(n_waiting)
            self._queues.setdefault(job.client, deque()).append(job)
            self._changed.notify()

    def _cancel(self, job: _Job, reason: BaseException) -> None:
        """End `job`, in the queue or under way; do nothing if it has ended."""
        with self._changed:
            if job.end is not None or job.cancelled:
                return
            job.cancelled = reason
            if job is self._current:
                self._cancellation.cancel()
                return
            queue = self._queues[job.client]
            queue.remove(job)
            if not queue:
                del self._queues[job.client]
            job.end = reason
        self._count(_outcome(job, reason), time.perf_counter() - job.came)
        job.tell()

    def _time_out(self, job: _Job) -> None:
        self._cancel(job, TimedOut(self._max_seconds, in_queue=job is not self._current))

    def _begin_clock(self, job: _Job) -> None:
        if job.timer and not job.cancelled and job.end is None:
            job.timer.cancel()
            job.timer = job.loop.call_later(self._max_seconds, self._time_out, job)

    # ---- the thread's side ----

    def _work(self) -> None:
        while job := self._take():
            waited_s = time.perf_counter() - job.came
            job.tell(partial(self._begin_clock, job))
            end = self._generate(job)
            outcome = _outcome(job, end)
            self._count(outcome, waited_s, end)
            with self._changed:
                self._current = None
                job.end = job.cancelled if outcome in ("cancelled", "timed out") else end
            job.tell()

    def _take(self) -> _Job | None:
        """Wait for a job and give it the engine; return None when the worker must end."""
        with self._changed:
            while not self._queues:
                if self._stopping:
                    return None
                self._changed.wait()
            client, queue = next(iter(self._queues.items()))
            job = self._current = queue.popleft()
            if queue:
                self._queues.move_to_end(client)
            else:
                del self._queues[client]
            return job

    def _generate(self, job: _Job) -> Result | BaseException:
        """Return the Result, complete or not, or the exception: a failure is this job's alone."""
        stream = None
        try:
            stream = self._engine.stream(job.tokens, job.options)
            # The engine's start discards a pending cancellation; job.cancelled still tells of an earlier one.
            step: list[Token] = []
            while not job.cancelled and (token := next(stream, None)):
                step.append(token)
                if not token.from_draft:  # the last of its step, unless the text ends here
                    job.hand_over(step)
                    step = []
            job.hand_over(step)
        except Exception as error:  # noqa: BLE001 - the next job must run after any failure
            return error
        except BaseException:  # noqa: BLE001 - raised to end the pass; it must not end this thread
            if stream is None or not job.cancelled:
                return EdgespecError("the generation was interrupted")
        finally:
            if stream:
                with contextlib.suppress(Exception):
                    stream.close()
        return stream.result

    def _count(self, outcome: Outcome, waited_s: float, end: Result | BaseException | None = None) -> None:
        with contextlib.suppress(Exception):  # an error in counting jobs must not end one
            self.on_end(Ended(outcome, waited_s, end if isinstance(end, Result) else None))


def _outcome(job: _Job, end: Result | BaseException) -> Outcome:
    if isinstance(end, Result) and end.stop_reason != "interrupted":
        return "finished"
    if job.cancelled:
        return "timed out" if isinstance(job.cancelled, TimedOut) else "cancelled"
    return "failed"
