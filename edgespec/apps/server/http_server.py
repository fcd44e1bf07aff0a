"""Runs the app on a socket until a signal ends it, and logs requests.

uvicorn speaks HTTP. This adds a shutdown that lets the answers under way finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import CLIENT_GONE, ApiError
from edgespec.apps.server.page import PARTS
from edgespec.apps.server.response_schema import usage_of
from edgespec.apps.speech.transcript import Transcript
from edgespec.decoding.records import Result
from edgespec.errors import EdgespecError, MessageFn

if TYPE_CHECKING:  # they load llama.cpp, which a server of several models does not
    from edgespec.apps.server.streaming import RequestRun

GRACE_S = 20.0
"""Seconds that the answers under way may take after the server was told to end."""

_KEEP_ALIVE_S = 30  # between two requests; editors ask again after a moment of typing
_CLOSE_S = 3  # for the last bytes of answers that have ended
_SPARE_CONNECTIONS = 64  # more than those whose requests wait or are answered


class HttpServer(uvicorn.Server):
    """uvicorn's server, whose signals are handled by `serve`."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to the command, which handles them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the port, and report when clients can connect."""
        await super().startup(sockets)
        self._on_ready()


class Working(Protocol):
    """The part of a server that works outside its event loop: a worker, or several."""

    @property
    def parallel(self) -> int:
        """Most answers under way at once."""

    @property
    def n_running(self) -> int:
        """Answers under way."""

    def start(self) -> None:
        """Begin; an event loop runs."""

    async def stop(self, *, grace_s: float) -> None:
        """Stop as `RequestWorker.stop` does."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the first address of `host`; port 0 lets the system choose.

    A host FILE.sock is a Unix socket, which only this user reaches. It refuses connections until `serve` is
    ready. Raises EdgespecError if there is no such address, or it is taken.
    """
    if host.endswith(".sock"):
        return _bind_file(Path(host))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EdgespecError(str(reason), field="host", value=host) from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    # With its protocol named, asyncio switches off the waiting for earlier packets' acknowledgements, 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # else the port stays taken for a while after a kill
        bound.bind(address)
    except OSError as error:
        bound.close()
        problem = f"port {port}: {error.strerror}; choose another address or port"
        raise EdgespecError(problem, field="host", value=host) from None
    return bound


def _bind_file(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            if path.is_socket() and other.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()  # of a server that was killed
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        bound.close()
        problem = f"{error.strerror or error}; choose another file"
        raise EdgespecError(problem, field="host", value=path) from None
    return bound


def serve(
    app: ASGIApp,
    workers: Sequence[Working],
    bound: socket.socket,
    *,
    max_queue: int,
    on_ready: Callable[[], None],
    on_message: MessageFn,
) -> bool:
    """Start the workers and answer requests on `bound` until SIGTERM or Ctrl-C; return once all has ended.

    After the signal new requests get 503, and the answers under way have `GRACE_S` seconds to finish. A
    second signal ends them at once; then the result is True. Call it from the main thread.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # a line for each malformed request would let clients fill the log
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_queue + sum(one.parallel for one in workers) + _SPARE_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    return asyncio.run(_serve(HttpServer(config, on_ready), workers, bound, on_message))


async def _serve(
    server: HttpServer,
    workers: Sequence[Working],
    bound: socket.socket,
    on_message: MessageFn,
) -> bool:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    for one in workers:
        one.start()
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    ending = asyncio.create_task(_end(server, workers, signals, on_message))
    try:
        await serving
        return await ending
    finally:
        ending.cancel()  # if serving could not begin
        await _stop(workers, 0)


async def _stop(workers: Sequence[Working], grace_s: float) -> None:
    await asyncio.gather(*(one.stop(grace_s=grace_s) for one in workers))


async def _end(
    server: HttpServer,
    workers: Sequence[Working],
    signals: asyncio.Queue[int],
    on_message: MessageFn,
) -> bool:
    """Wait for a signal and end the server; return whether a second one came."""
    await signals.get()
    if n := sum(one.n_running for one in workers):
        what = "the answer under way has" if n == 1 else f"the {n} answers under way have"
        on_message(f"ending: {what} {GRACE_S:g} s; Ctrl-C once more ends {'it' if n == 1 else 'them'} now")
    stopping = asyncio.create_task(_stop(workers, GRACE_S))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    hurried = again.done()
    again.cancel()
    if hurried:
        await _stop(workers, 0)
    await stopping
    server.should_exit = True
    return hurried


# ---- the log of requests ----

_MOST_PATH = 60
_FIELD = re.compile(r"[a-z][a-z0-9_.\[\]]{,39}")


FORWARDED = "is_forwarded"
"""In a request's state: whether another process answered it, which prints the line."""


def noting_requests(
    app: ASGIApp, write: MessageFn, count: Callable[[Scope, int], None] = lambda _scope, _status: None
) -> ASGIApp:
    """Return `app`, with a line to `write` for each answer except the page's own files.

    `count` gets the status of each. A failure without an answer becomes a 500 in the form of other errors.
    """

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_GONE
        scope.setdefault("state", {})

        def tell(line: str) -> None:
            with contextlib.suppress(OSError):  # the reader of the log may be gone; the server continues
                write(line)

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, note)
        except Exception as error:
            tell(f"{type(error).__name__}: {' '.join(str(error).split())}")
            if status != CLIENT_GONE:
                raise  # amid an answer, which the HTTP server cuts off
            refusal = ApiError(500, "the server failed at this request; its log says why")
            await refusal.response(scope)(scope, receive, note)
        finally:
            count(scope, status)
            if scope["path"] not in PARTS and not scope["state"].get(FORWARDED):
                tell(_line(scope, status, time.perf_counter() - began))

    return noted


def _line(scope: Scope, status: int, seconds: float) -> str:
    refused: ApiError | None = scope["state"].get("refused")
    run: RequestRun[Any, Any] | None = scope["state"].get("run")
    path = re.sub(r"[^!-~]", "?", scope["path"])[:_MOST_PATH]
    method = scope["method"][:20]
    facts = [f"{time.strftime('%H:%M:%S')} {method} {path} {status}{_reason(refused)}"]
    speed = ""
    if run is not None:
        ends = [run.ends[i] for i in sorted(run.ends)]
        told, speed = _answered(ends, run.n_prompts) if ends else ("", "")
        facts.append(told)
        if not run.is_complete and not refused:
            facts.append(f"failed{_reason(run.failure)}" if run.failure else "the client left")
    return ", ".join(filter(None, [*facts, f"{seconds:.2f} s", speed]))


def _reason(error: ApiError | None) -> str:
    if error is None:
        return ""
    field = error.param if error.param and _FIELD.fullmatch(error.param) else None
    found = field or error.code
    return f" ({found})" if found else ""


def _answered(ends: Sequence[object], n_prompts: int) -> tuple[str, str]:
    results = [end for end in ends if isinstance(end, Result)]
    if results:
        usage = usage_of(results, n_prompts=min(n_prompts, len(results)))
        rate = usage["edgespec"]["tokens_per_second"]
        told = f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} out"
        return told, "" if rate is None else f"{rate:.1f} tokens/s"
    from edgespec.apps.server.embedding_routes import EmbeddedTexts

    if tokens := sum(end.n_tokens for end in ends if isinstance(end, EmbeddedTexts)):
        return f"{tokens} tokens in", ""
    stats = [end.stats for end in ends if isinstance(end, Transcript)]
    sound_s, total_s = sum(one.audio_s for one in stats), sum(one.total_s for one in stats)
    return f"{sound_s:.1f} s of sound", f"{sound_s / total_s:.1f} times as fast" if total_s else ""
