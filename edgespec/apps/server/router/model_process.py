"""The process of one model: an `edgespec serve` of its own on a Unix socket, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h11

from edgespec.platform.child import child_command
from edgespec.platform.messages import MessageFn

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
