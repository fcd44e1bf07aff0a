"""Which models are loaded: on demand, one after the other, the least recently used leave for another.

    unloaded -> loading -> loaded -> leaving -> unloaded

A request counts as a user of its model while it waits for it and while it is answered. A model with users is
not unloaded: when it must leave for another, requests that come later wait until that other is loaded.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h11

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_worker import QueueFull, ShuttingDown, TimedOut
from edgespec.apps.server.router.model_facts import ModelNames, UnloadedFacts, read_facts
from edgespec.models.sources import format_size
from edgespec.platform.child import child_command
from edgespec.platform.cpu import ROOT
from edgespec.platform.memory import anonymous_bytes, memory_left
from edgespec.platform.messages import MessageFn

# ---- the process of a model: an `edgespec serve` of its own on a Unix socket ----

REPORTS = ("/v1/models", "/api/tags", "/api/ps")
"""Paths at which a process tells of its model."""

_OWN_LINE = re.compile(rf"\S+ GET ({'|'.join(REPORTS)}|/metrics) ")
"""A line about a request of this process, which answers clients at these paths itself."""

_LONGEST_LINE = 1 << 20  # bytes of its log
_READ = 1 << 16  # bytes of an answer at once
_MAX_HEADERS = 1 << 16
_LOST = (OSError, EOFError, h11.ProtocolError)


class NotLoaded(Exception):  # noqa: N818 - what happened
    """The process ended before the model was loaded; the text is its last line."""


class NotReached(Exception):  # noqa: N818 - what happened
    """The process is gone, and has not got the request."""


class ProcessLost(Exception):  # noqa: N818 - what happened
    """The process ended amid an answer."""


class ForwardedRequest(NamedTuple):
    """A request as the model's process gets it."""

    method: str
    target: bytes
    """Path and query."""
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class ModelProcess:
    """A model's own `edgespec serve`. It dies with this process, whatever ends that."""

    def __init__(self, process: Process, socket: Path, log: MessageFn) -> None:
        self._process, self._socket, self._log = process, socket, log
        self._last_line = ""
        self._reading = asyncio.create_task(self._pass_on_log())
        self.facts: Mapping[str, Any] = {}
        """The JSON object that it printed when it was ready."""
        self.reports: Mapping[str, Any] = {}
        """Its answers to REPORTS, None where it has none."""
        self.load_s = 0.0
        """Seconds from its start to that."""

    @classmethod
    async def start(cls, socket: Path, options: Sequence[str], log: MessageFn) -> ModelProcess:
        """Start it and wait until it serves on `socket`; `log` gets each line of its log.

        Raises NotLoaded. Call it on the main thread, as whose child it lives.
        """
        began = time.perf_counter()
        command = child_command(__name__, "serve_model", "--host", str(socket), "--json", *options)
        # It needs no key: who reaches the socket was let in before.
        environment = {name: value for name, value in os.environ.items() if name != "EDGESPEC_API_KEY"}
        process = await asyncio.create_subprocess_exec(
            *command,
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
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                await process.wait()
                await started._reading
                raise NotLoaded(started._last_line or started.how_ended)
            started.facts = json.loads(line)
            started.reports = {path: await started.get_json(path) for path in REPORTS}
        except BaseException as error:
            started.kill()
            if isinstance(error, NotReached | ProcessLost):
                raise NotLoaded(started.how_ended) from None
            raise
        started.load_s = time.perf_counter() - began
        return started

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def how_ended(self) -> str:
        """How it ended, such as "signal 9"."""
        code = self._process.returncode
        if code is None:
            return "it runs"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    async def ended(self) -> None:
        """Wait for its end, and all of its log."""
        await self._process.wait()
        await asyncio.shield(self._reading)

    async def end(self, grace_s: float) -> None:
        """Have it end; kill it if it has not after `grace_s` seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """Kill the process, wherever it is; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _pass_on_log(self) -> None:
        assert self._process.stderr  # noqa: S101 - for the type checker: it is a pipe
        with contextlib.suppress(ValueError):  # a line without an end
            async for line in self._process.stderr:
                self._last_line = line.decode(errors="replace").rstrip()
                if not _OWN_LINE.match(self._last_line):
                    self._log(self._last_line)

    async def ask(self, request: ForwardedRequest) -> ModelAnswer:
        """Send a request and return the head of its answer. Raises NotReached and ProcessLost."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            raise NotReached from None
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEADERS)
        try:
            headers = [*request.headers, (b"host", b"localhost"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(request.body)).encode()))
            head = h11.Request(method=request.method, target=request.target, headers=headers)
            for event in (head, h11.Data(data=request.body), h11.EndOfMessage()):
                writer.write(connection.send(event) or b"")
            await writer.drain()
            first = await _next(connection, reader)
            if not isinstance(first, h11.Response):
                raise ProcessLost
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, _LOST):
                raise ProcessLost from None
            raise
        return ModelAnswer(first.status_code, [*first.headers], connection, reader, writer)

    async def get_json(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return the answer to a GET; None where there is none."""
        answer = await self.ask(ForwardedRequest("GET", path.encode(), (), b""))
        body = b"".join([part async for part in answer.parts()])
        return json.loads(body) if answer.status == 200 else None


@dataclass(frozen=True)
class ModelAnswer:
    """The answer of a model's process: its head, and its body as it comes."""

    status: int
    headers: list[tuple[bytes, bytes]]
    _connection: h11.Connection
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body; whoever stops reading ends the work. Raises ProcessLost."""
        try:
            while not isinstance(event := await _next(self._connection, self._reader), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
        except _LOST:
            raise ProcessLost from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection, which ends the work on what was not read."""
        self._writer.transport.abort()


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_READ))  # at its end h11 raises what is missing
    if isinstance(event, h11.ConnectionClosed) or not isinstance(event, h11.Event):
        raise EOFError
    return event


def serve_model(*arguments: str) -> int:
    """In the process: serve one model; the parent sends SIGTERM to end it."""
    from edgespec.cli import main

    return main(["serve", *arguments])


# ---- which models are loaded ----

Status = Literal["unloaded", "loading", "loaded", "leaving"]

_DEAD_S = 2.0  # in which the system tells that a process died
_END_S = 10.0
"""Seconds that a process without work may take to end."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be asked for, and how its process is started."""

    files: ModelNames
    options: tuple[str, ...]
    """The options of its own `edgespec serve`."""
    aliases: tuple[str, ...] = ()
    keep: bool = False
    """Whether it is loaded at the start and never unloaded."""
    keep_alive_s: float = 300.0
    parallel: int = 16
    """Most answers at once."""
    embeddings: bool = False

    @property
    def name(self) -> str:
        """The name by which requests ask for the model, and which answers tell."""
        return self.files.name


@dataclass(eq=False)
class PooledModel:
    """A model of a server with several: its process if it is loaded, and who waits for it."""

    spec: ModelSpec
    keep_alive_s: float = 0.0
    """Idle time after which it is unloaded; a request may change it."""
    n_waiting: int = 0
    """Requests that wait until it is loaded."""
    n_later: int = 0
    """Requests that came while it was leaving."""
    n_running: int = 0
    """Requests that its process has."""
    used: float = 0.0
    """Time of its last use, by `time.monotonic`."""
    n_loads: int = 0
    n_failures: int = 0
    """Times that it could not be loaded, or its process died."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """What its process told at the paths of REPORTS when it was loaded last."""
    loading: asyncio.Task[ModelProcess] | None = None
    process: ModelProcess | None = None
    leaving: asyncio.Future[None] | None = None
    """Done once it has left."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The name by which requests ask for the model, and which answers tell."""
        return self.spec.name

    @property
    def status(self) -> Status:
        """The state that the module's docstring shows."""
        if self.process:
            return "leaving" if self.leaving else "loaded"
        return "loading" if self.loading else "unloaded"

    @property
    def n_users(self) -> int:
        """Requests that keep it from leaving."""
        return self.n_waiting + self.n_running

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
        max_queue: int = 64,
        max_seconds: float = 600.0,
        root: Path = ROOT,
    ) -> None:
        """Keep sockets in `folder`, which only this user reaches; tests pass a `root` with their own `proc`.

        Of each model at most `max_queue` requests wait until it is loaded, each up to `max_seconds`.
        """
        self.models = [PooledModel(spec, spec.keep_alive_s) for spec in specs]
        self.stopping = False
        self.facts: dict[str, UnloadedFacts] = {}
        """Facts of the files, by name, once `known` is done."""
        self._folder, self.log, self._root = folder, log, root
        self._max_queue, self._max_seconds = max_queue, max_seconds
        self._turn = asyncio.Lock()
        """Held by the one that is being loaded, and makes room."""
        self._numbers = count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._known: asyncio.Task[None] | None = None

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
        """Read the facts of the files, and load the models that stay."""
        self._known = self._run(self._read_facts())
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

    async def known(self) -> dict[str, UnloadedFacts]:
        """Return the facts of the files, by name; a damaged one has none."""
        if self._known:
            await asyncio.shield(self._known)
        return self.facts

    @contextlib.asynccontextmanager
    async def hold(self, model: PooledModel) -> AsyncIterator[ModelProcess]:
        """Keep the model loaded inside the block; load it first if need be.

        Raises ApiError, QueueFull, TimedOut and ShuttingDown.
        """
        process = await self._wait(model)
        model.n_running += 1
        try:
            yield process
        finally:
            model.n_running -= 1
            self._rest(model)

    async def _wait(self, model: PooledModel) -> ModelProcess:
        if self.stopping:
            raise ShuttingDown
        if model.n_waiting + model.n_later >= self._max_queue + model.spec.parallel:
            raise QueueFull(model.n_waiting + model.n_later)
        try:
            async with asyncio.timeout(self._max_seconds):
                await self._left_it(model)
                model.n_waiting += 1
                model.idle.clear()
                try:
                    return await asyncio.shield(model.loading or self._load(model))
                finally:
                    model.n_waiting -= 1
                    self._rest(model)
        except TimeoutError:
            raise TimedOut(self._max_seconds, in_queue=True) from None
        except asyncio.CancelledError:
            if self.stopping:
                raise ShuttingDown from None
            raise

    async def _left_it(self, model: PooledModel) -> None:
        """Wait while `model` is leaving for another."""
        model.n_later += 1
        try:
            while model.leaving:
                await asyncio.shield(model.leaving)
        finally:
            model.n_later -= 1

    def _rest(self, model: PooledModel) -> None:
        """Note the use of `model`; if nobody uses it any more, it is unloaded after its time."""
        model.used = time.monotonic()
        if model.timer:
            model.timer.cancel()
            model.timer = None
        if model.n_users:
            return
        model.idle.set()
        if not math.isinf(model.expires_s):
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(max(0.0, model.keep_alive_s), self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        if model.status == "loaded" and not model.n_users:
            self._run(self._unload(model))

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
        name = model.name
        facts = (await self.known()).get(name, UnloadedFacts())
        async with self._turn:
            await self._make_room(model, facts.n_bytes)
            socket = self._folder / f"{next(self._numbers)}.sock"

            def log(line: str) -> None:
                self.log(f"{name}: {line}")

            try:
                process = await ModelProcess.start(socket, model.spec.options, log)
            except NotLoaded as error:
                model.n_failures += 1
                raise _refusal(name, str(error)) from None
        model.n_loads += 1
        model.process, model.reports = process, process.reports
        self.log(f"edgespec: {name} is loaded, {process.load_s:.1f} s")
        self._run(self._watch(model, process))
        self._rest(model)
        return process

    async def _watch(self, model: PooledModel, process: ModelProcess) -> None:
        """Wait for the end of a model's process; the next request loads it again."""
        await process.ended()
        self.forget(model, process)

    async def note_end(self, model: PooledModel, process: ModelProcess) -> None:
        """Forget a process that broke off an answer, if it is dead: the next request loads the model."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.ended(), _DEAD_S)
            self.forget(model, process)

    def forget(self, model: PooledModel, process: ModelProcess) -> None:
        """Take note that a model's process is gone; nothing if that is known."""
        if model.process is not process:
            return
        model.process = model.loading = None
        if not model.leaving and not self.stopping:
            model.n_failures += 1
            self.log(f"edgespec: the process of {model.name} died ({process.how_ended})")

    async def _make_room(self, model: PooledModel, n_bytes: int) -> None:
        """Unload the least recently used models until there is room. Raises ApiError if there never is."""
        while (left := self._left()) is not None and n_bytes > left:
            leave = [one for one in self.models if one.process and not one.spec.keep]
            if n_bytes > left + sum(map(self._held, leave)):
                kept = [one.name for one in self.models if one.process and one.spec.keep]
                beside = f" beside {', '.join(kept)}" if kept else ""
                why = f"not enough memory for {model.name}: about {format_size(n_bytes)} needed, "
                why += f"{format_size(left + sum(map(self._held, leave)))} available{beside}"
                self.log(f"edgespec: {why}")
                raise ApiError(503, why, param="model", code="out_of_memory", headers=_NO_RETRY)
            oldest = min(leave, key=lambda one: (not one.leaving, one.n_users > 0, one.used))
            if not oldest.leaving:
                self.log(f"edgespec: {oldest.name} is unloaded: its memory is for {model.name}")
            await self._unload(oldest)

    async def _unload(self, model: PooledModel) -> None:
        """Have a model leave once its users have been answered."""
        process = model.process
        if model.leaving:
            await asyncio.shield(model.leaving)
        if not process or model.process is not process:
            return
        model.leaving = asyncio.get_running_loop().create_future()
        try:
            while model.n_users and model.process is process:
                idle = asyncio.ensure_future(model.idle.wait())
                died = asyncio.ensure_future(process.ended())
                await asyncio.wait({idle, died}, return_when=asyncio.FIRST_COMPLETED)
                idle.cancel()
                died.cancel()
            await process.end(_END_S)
            self.forget(model, process)
            model.keep_alive_s = model.spec.keep_alive_s
        finally:
            model.leaving.set_result(None)
            model.leaving = None

    # ---- memory ----

    def _left(self) -> int | None:
        """The bytes that are free for another model; None if unknown.

        What the system calls available holds pages of files, mapped weights among them: those of loaded
        models are not free.
        """
        left = memory_left(self._root)
        if left is None:
            return None
        loaded = [model for model in self.models if model.process]
        return left.bytes - sum(max(0, self._estimated(one) - self._anonymous(one)) for one in loaded)

    def _held(self, model: PooledModel) -> int:
        return max(self._estimated(model), self._anonymous(model))

    def _estimated(self, model: PooledModel) -> int:
        facts = self.facts.get(model.name, UnloadedFacts())
        cache = int(model.process.facts.get("cache_bytes") or 0) if model.process else 0
        return max(facts.n_bytes, facts.weight_bytes + cache)

    def _anonymous(self, model: PooledModel) -> int:
        return anonymous_bytes(model.process.pid, self._root) if model.process else 0

    # ---- tasks ----

    async def _read_facts(self) -> None:
        self.facts = await asyncio.to_thread(read_facts, [model.spec.files for model in self.models])

    def _run(self, work: Any) -> asyncio.Task[Any]:  # noqa: ANN401 - a coroutine, and its task
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_take_exception)
        return task


_NO_RETRY = {"X-Should-Retry": "false"}


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Read a task's exception: who waited for it has been told."""
    if not task.cancelled():
        task.exception()


def _refusal(name: str, last_line: str) -> ApiError:
    """Return the answer for a model that could not be loaded; the line may name a path and is in the log."""
    if "not enough memory" in last_line:
        why = f"there is not enough memory for {name}: its log says how much it needs"
        return ApiError(503, why, param="model", code="out_of_memory", headers=_NO_RETRY)
    why = f"the model {name!r} cannot be loaded: the server's log says why"
    return ApiError(500, why, param="model", code="model_not_loaded", headers=_NO_RETRY)
