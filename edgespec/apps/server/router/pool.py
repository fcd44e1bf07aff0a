"""Loads models on demand, one after the other; the least recently used are unloaded to make room.

    unloaded -> loading -> loaded -> leaving -> unloaded

A request counts as a user of its model while it waits for it and while it is answered. A model with users is
not unloaded: when it must make room for another, later requests wait until the other is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.names import NamedModel, human_number
from edgespec.apps.server.request_worker import QueueFull, ShuttingDown, TimedOut
from edgespec.errors import EdgespecError, MessageFn
from edgespec.models.hub import format_size
from edgespec.platform.processes import child_command

# ---- the process of a model: an `edgespec serve` of its own on a Unix socket ----

_LISTED = "/v1/models"
"""The path at which a process describes its model; clients are answered by the common server."""

_LONGEST_LINE = 1 << 20  # bytes of its log


class NotLoaded(Exception):  # noqa: N818 - what happened
    """The process ended before the model was loaded; the text is its last line."""


class ModelProcess:
    """A model's own `edgespec serve`. It dies with this process, however that ends."""

    def __init__(self, process: Process, socket: Path, log: MessageFn) -> None:
        # One connection for each request: that of a dead process is no longer there.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._web = httpx.AsyncHTTPTransport(uds=str(socket), verify=False, limits=limits)
        self._process, self._log = process, log
        self._last_line = ""
        self._reading = asyncio.create_task(self._pass_on_log())
        self.entries: list[dict[str, Any]] = []
        """What it answers to GET /v1/models."""

    @classmethod
    async def start(cls, socket: Path, options: Sequence[str], log: MessageFn) -> ModelProcess:
        """Start it and wait until it serves on `socket`; `log` gets each line of its log.

        Raises NotLoaded. Call it on the main thread: the process dies with the thread that starts it.
        """
        # It needs no key: who reaches the socket was let in before.
        environment = {name: value for name, value in os.environ.items() if name != "EDGESPEC_API_KEY"}
        process = await asyncio.create_subprocess_exec(
            *child_command(__name__, "serve_model", "--host", str(socket), "--json", *options),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LONGEST_LINE,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which ends it
        )
        started = cls(process, socket, log)
        try:
            assert process.stdout  # noqa: S101 - for the type checker: it is a pipe
            if not (await process.stdout.readline()).endswith(b"\n"):
                how = await started.ended()
                raise NotLoaded(started._last_line or how)
            answer = await started.ask(httpx.Request("GET", f"http://localhost{_LISTED}"))
            started.entries = json.loads(await answer.aread())["data"]
        except BaseException as error:
            started.kill()
            if isinstance(error, httpx.TransportError):
                raise NotLoaded(await started.ended()) from None
            raise
        return started

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    async def ask(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return its answer, whose body is still to come.

        Raises httpx.ConnectError if the process is gone, httpx.TransportError if it ends meanwhile.
        """
        return await self._web.handle_async_request(request)

    async def ended(self) -> str:
        """Wait for its end, and all of its log; return how it ended, such as "signal 9"."""
        code = await self._process.wait()
        await asyncio.shield(self._reading)
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    async def end(self, grace_s: float) -> None:
        """Ask it to end; kill it if it has not after `grace_s` seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Kill the process; do nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _pass_on_log(self) -> None:
        assert self._process.stderr  # noqa: S101 - for the type checker: it is a pipe
        with contextlib.suppress(ValueError):  # a line without an end
            async for line in self._process.stderr:
                self._last_line = line.decode(errors="replace").rstrip()
                if not re.match(rf"\S+ GET {_LISTED} ", self._last_line):
                    self._log(self._last_line)


def serve_model(*arguments: str) -> int:
    """In the process: serve one model; the parent sends SIGTERM to end it."""
    from edgespec.cli import main

    return main(["serve", *arguments])


# ---- which models are loaded ----

_END_S = 10.0
"""Seconds that a process without work may take to end."""
_DEAD_S = 2.0  # in which the system tells that a process died
_EARLY_S = 0.01  # by which a timer may come early


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be asked for, and how its process is started."""

    named: NamedModel
    options: tuple[str, ...]
    """The options of its own `edgespec serve`."""
    models: tuple[str, ...] = ()
    """Names of its target, its draft and its Whisper model, those that it has."""
    keep: bool = False
    """Whether it is loaded at the start and never unloaded."""
    keep_alive_s: float = 300.0
    parallel: int = 16
    """Most answers at once."""
    n_bytes: int = 0
    """Size of its files."""
    created: int = 0
    """Time of its file, in seconds since 1970."""
    listed: Mapping[str, Any] = field(default_factory=dict)
    """The model in Ollama's lists; empty for a Whisper model."""

    def with_facts(self) -> ModelSpec:
        """Return it with the facts of its files, which are here; its server reports damaged ones."""
        from edgespec.apps.server.ollama_answers import listed
        from edgespec.llama.gguf_header import check_complete_file
        from edgespec.models.footprint import facts_of
        from edgespec.models.resolve import resolve

        try:
            headers = [check_complete_file(resolve(name)) for name in self.models]
            first = headers[0]
            created = int(first.path.stat().st_mtime)
            found = replace(self, n_bytes=sum(one.file_bytes for one in headers), created=created)
            if self.named.kinds == {"speech"}:
                return found
            told = facts_of(first)
            size = human_number(told.parameters)
            named = replace(self.named, title=first.name, quantization=told.quantization, size=size)
            entry = listed(named, first)
        except (EdgespecError, OSError):
            return self
        return replace(found, named=named, listed=entry)


@dataclass(eq=False)
class PooledModel:
    """A model of a server with several: its process if it is loaded, and who waits for it."""

    spec: ModelSpec
    keep_alive_s: float = 0.0
    """Idle time after which it is unloaded; a request may change it."""
    n_waiting: int = 0
    """Requests that wait until it is loaded, or has left."""
    n_users: int = 0
    """Requests that keep it from leaving: all but those that came while it left."""
    used: float = 0.0
    """Time of its last use, by `time.monotonic`."""
    entries: Sequence[dict[str, Any]] = ()
    """Those of its process in /v1/models, when it was loaded last."""
    loading: asyncio.Task[ModelProcess] | None = None
    process: ModelProcess | None = None
    leaving: asyncio.Future[None] | None = None
    """Done once it has left."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The name of the model in requests and answers."""
        return self.spec.named.name

    @property
    def status(self) -> Literal["unloaded", "loading", "loaded", "leaving"]:
        """The state in the diagram of the module's docstring."""
        if self.process:
            return "leaving" if self.leaving else "loaded"
        return "loading" if self.loading else "unloaded"

    @property
    def n_running(self) -> int:
        """Requests that its process has."""
        return self.n_users if self.process else 0

    @property
    def expires_s(self) -> float:
        """Seconds until it is unloaded; infinity: never."""
        if self.spec.keep or math.isinf(self.keep_alive_s):
            return math.inf
        return self.keep_alive_s - (0 if self.n_users else time.monotonic() - self.used)


class Pool:
    """The models of a server. All but the constructor is for the event loop's thread, the main one."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        folder: Path,
        log: MessageFn,
        *,
        max_models: int | None = None,
        room: int | None = None,
        max_queue: int = 64,
        max_seconds: float = 600.0,
    ) -> None:
        """Keep sockets in `folder`, which only this user reaches.

        At most `max_models` are loaded at once, and their files have at most `room` bytes; None: no limit. At
        most `max_queue` requests wait for a model to be loaded, each up to `max_seconds`.
        """
        self.models = [PooledModel(spec, spec.keep_alive_s) for spec in specs]
        self.stopping = False
        self.log = log
        self._folder = folder
        self._max_models, self._room = max_models or len(specs), math.inf if room is None else room
        self._max_queue, self._max_seconds = max_queue, max_seconds
        self._turn = asyncio.Lock()
        """Held by whatever loads a model, or unloads one."""
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- as `Working` ----

    @property
    def parallel(self) -> int:
        """Most answers under way at once."""
        return sum(model.spec.parallel for model in self.models)

    @property
    def n_running(self) -> int:
        """Answers under way."""
        return sum(model.n_running for model in self.models)

    def start(self) -> None:
        """Load the models that stay."""
        for model in self.models:
            if model.spec.keep:
                self._load(model)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new requests, end all processes; answers under way have `grace_s` seconds."""
        self.stopping = True
        for model in self.models:
            if model.loading and not model.process:
                model.loading.cancel()
        processes = [model.process for model in self.models if model.process]
        await asyncio.gather(*(process.end(grace_s + _END_S) for process in processes))
        for task in [*self._tasks]:
            task.cancel()

    # ---- requests ----

    @contextlib.asynccontextmanager
    async def hold(self, model: PooledModel) -> AsyncIterator[ModelProcess]:
        """Keep the model loaded inside the block; load it first if need be.

        Raises ApiError, QueueFull, TimedOut and ShuttingDown.
        """
        if self.stopping:
            raise ShuttingDown
        if model.n_waiting >= self._max_queue + model.spec.parallel:
            raise QueueFull(model.n_waiting)
        process = await self._use(model)
        try:
            yield process
        finally:
            model.n_users -= 1
            self._rest(model)

    async def _use(self, model: PooledModel) -> ModelProcess:
        model.n_waiting += 1
        try:
            async with asyncio.timeout(self._max_seconds):
                while model.leaving:
                    await asyncio.shield(model.leaving)
                model.n_users += 1
                model.idle.clear()
                try:
                    if model.process:
                        return model.process
                    return await asyncio.shield(model.loading or self._load(model))
                except BaseException:
                    model.n_users -= 1
                    self._rest(model)
                    raise
        except TimeoutError:
            raise TimedOut(self._max_seconds, in_queue=True) from None
        except asyncio.CancelledError:
            if self.stopping:
                raise ShuttingDown from None
            raise
        finally:
            model.n_waiting -= 1

    def _rest(self, model: PooledModel) -> None:
        """Note the use of `model`; if nobody uses it any more, start the time after which it is unloaded."""
        model.used = time.monotonic()
        if model.timer:
            model.timer.cancel()
            model.timer = None
        if model.n_users:
            return
        model.idle.set()
        if not math.isinf(model.expires_s):
            loop, left_s = asyncio.get_running_loop(), max(0.0, model.keep_alive_s)
            model.timer = loop.call_later(left_s, lambda: self._run(self._unload_unused(model)))

    async def _unload_unused(self, model: PooledModel) -> None:
        async with self._turn:
            if model.process and not model.n_users and model.expires_s < _EARLY_S:
                await self._unload(model)

    # ---- loading ----

    def _load(self, model: PooledModel) -> asyncio.Task[ModelProcess]:
        model.loading = self._run(self._loaded(model))

        def forget_failure(task: asyncio.Task[ModelProcess]) -> None:
            if model.loading is task and (task.cancelled() or task.exception()):
                model.loading = None

        model.loading.add_done_callback(forget_failure)
        return model.loading

    async def _loaded(self, model: PooledModel) -> ModelProcess:
        """Load `model` when its turn has come, and there is room. Raises ApiError."""
        async with self._turn:
            await self._make_room(model)
            began = time.perf_counter()
            process = None
            while process is None:
                try:
                    process = await self._started(model)
                except NotLoaded as error:
                    # The size of the files is no more than the least that is needed.
                    if not ("not enough memory" in str(error) and await self._let_one_leave(model)):
                        raise _refusal(model.name, str(error)) from None
            model.process, model.entries = process, process.entries
        self.log(f"edgespec: {model.name} is loaded, {time.perf_counter() - began:.1f} s")
        self._run(self._watch(model, process))
        self._rest(model)
        return process

    def _started(self, model: PooledModel) -> Coroutine[Any, Any, ModelProcess]:
        socket = self._folder / f"{next(self._numbers)}.sock"
        return ModelProcess.start(socket, model.spec.options, lambda line: self.log(f"{model.name}: {line}"))

    async def _watch(self, model: PooledModel, process: ModelProcess) -> None:
        """Wait for the end of a model's process; the next request loads it again."""
        how = await process.ended()
        if model.process is process:
            model.process = model.loading = None
            if not model.leaving and not self.stopping:
                self.log(f"edgespec: the process of {model.name} died ({how})")

    async def note_end(self, model: PooledModel, process: ModelProcess) -> None:
        """Wait until a process that broke off an answer is known to be dead, if it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watch(model, process), _DEAD_S)

    async def _make_room(self, model: PooledModel) -> None:
        """Unload the least recently used models until there is room. Raises ApiError if there never is."""
        kept = [one for one in self.models if one.process and one.spec.keep]
        left = self._room - sum(one.spec.n_bytes for one in kept)
        if model.spec.n_bytes > left:
            beside = f" beside {', '.join(one.name for one in kept)}" if kept else ""
            why = f"not enough memory for {model.name}: its files have {format_size(model.spec.n_bytes)}, "
            why += f"{format_size(max(0, int(left)))} available{beside}"
            self.log(f"edgespec: {why}")
            raise ApiError(503, why, param="model", code="out_of_memory", headers=_NO_RETRY)
        while True:
            loaded = [one.spec.n_bytes for one in self.models if one.process]
            if len(loaded) < self._max_models and sum(loaded) + model.spec.n_bytes <= self._room:
                return
            if not await self._let_one_leave(model):
                why = f"{model.name} finds no place beside the models that stay"
                raise ApiError(503, why, param="model", code="out_of_memory", headers=_NO_RETRY)

    async def _let_one_leave(self, other: PooledModel) -> bool:
        """Unload the least recently used model; return False if all loaded ones are pinned."""
        found = [one for one in self.models if one.process and not one.spec.keep]
        if not found:
            return False
        oldest = min(found, key=lambda one: (one.n_users > 0, one.used))
        self.log(f"edgespec: {oldest.name} is unloaded: its memory is for {other.name}")
        await self._unload(oldest)
        return True

    async def _unload(self, model: PooledModel) -> None:
        """Unload a model once its users have been answered; the caller holds the turn."""
        model.leaving = asyncio.get_running_loop().create_future()
        try:
            while model.n_users:
                await model.idle.wait()
            if process := model.process:
                await process.end(_END_S)
                await self._watch(model, process)
            model.keep_alive_s = model.spec.keep_alive_s
        finally:
            model.leaving.set_result(None)
            model.leaving = None

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits is told
        return task


_NO_RETRY = {"X-Should-Retry": "false"}


def _refusal(name: str, last_line: str) -> ApiError:
    """Return the answer for a model that could not be loaded; the line may name a path and is in the log."""
    if "not enough memory" in last_line:
        why = f"there is not enough memory for {name}: its log says how much it needs"
        return ApiError(503, why, param="model", code="out_of_memory", headers=_NO_RETRY)
    why = f"the model {name!r} cannot be loaded: the server's log says why"
    return ApiError(500, why, param="model", code="model_not_loaded", headers=_NO_RETRY)
