"""Jobs of a server's worker as a test reads, watches and holds them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from edgespec import EdgespecError, Engine, SamplingParams, UsageError
from edgespec.apps.server.request_worker import QueuePlace
from edgespec.apps.server.streaming import RequestRun
from edgespec.apps.server.worker import Worker
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result
from edgespec.drafting.step import DraftStep
from edgespec.platform.processes import Cancellation

N_PREDICT = 40


@dataclass(frozen=True, kw_only=True)
class Watched(Options):
    """Options of a generation whose steps a test looks at, or holds."""

    on_step: Callable[[DraftStep], None] | None = None


class WatchedEngine(Engine):
    """An engine that tells the `on_step` of `Watched` of every step."""

    def stream(self, prompt: Any, options: Any = None, **keywords: Any) -> Any:
        keywords["on_step"] = getattr(options, "on_step", None)
        return super().stream(prompt, options, **keywords)


NO_SUCH_TOKEN = SamplingParams(logit_bias={1 << 20: 1.0})


def raising(error: BaseException) -> Callable[[DraftStep], None]:
    """An `on_step` that fails."""

    def on_step(_step: DraftStep) -> None:
        raise error

    return on_step


FAILURES = [
    ({"params": NO_SUCH_TOKEN}, UsageError),
    ({"on_step": raising(TypeError("of us"))}, TypeError),
    ({"on_step": raising(MemoryError("no room"))}, MemoryError),
    ({"on_step": raising(SystemExit(3))}, EdgespecError),
    ({"on_step": raising(KeyboardInterrupt())}, EdgespecError),
]
"""Options with which a job fails, and what its reader gets."""
OPTIONS = Watched(params=SamplingParams(temperature=0), n_predict=N_PREDICT, drafter="model", gamma=3)


class Pipe(Cancellation):
    """Knows when it was used; `on_drain` is called on the worker's thread, before and after a drain."""

    def __init__(self):
        self.used = threading.Event()
        self.on_drain = lambda _when: None

    def cancel(self):
        super().cancel()
        self.used.set()

    def drain(self):
        self.on_drain("before")
        super().drain()
        self.on_drain("after")


@asynccontextmanager
async def working(engine, pipe, *, start=True, on_end=None, **options):
    """A worker, started unless told otherwise; at the end it is stopped and idle."""
    pipe.used.clear()
    worker = Worker(engine, pipe, **options)
    worker.on_end = on_end or worker.on_end
    if start:
        worker.start()
    try:
        yield worker
    finally:
        await worker.stop(grace_s=60)
        assert (worker.busy, worker.n_waiting) == (False, 0)


async def items_of(start):
    """What a reader is told of one answer: places, parts and its end. Closed early, it leaves."""
    run = RequestRun([start], print)
    try:
        async for _, item in run.items():
            yield item
    finally:
        run.close()


async def read(worker, tokens, *, client="one", began=None, **options):
    """Return the Result of a job, after a look at what came before it; sets `began` at its first tokens."""
    ids = []
    async for item in items_of(worker.run(tokens, OPTIONS.changed(**options), client=client)):
        if isinstance(item, Result):
            assert list(item.token_ids) == ids
            return item
        if isinstance(item, QueuePlace):
            assert not ids
            continue
        assert item
        ids += [token.id for token in item]
        if began:
            began.set()
    raise AssertionError("it ended without a Result")


async def until(condition):
    """Wait for what another thread does."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Gate:
    """An `on_step` that holds the generation, on the worker's thread, until it is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, _step):
        self.reached.set()
        self.open.wait(60)


async def hold(worker, tokens, **options):
    """Return a job under way that waits at its first step, and what opens it."""
    gate = Gate()
    task = asyncio.create_task(read(worker, tokens, on_step=gate, **options))
    await until(gate.reached.is_set)
    return task, gate


def values(metrics):
    """Every value of /metrics by its name and labels."""
    lines = metrics.render().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
