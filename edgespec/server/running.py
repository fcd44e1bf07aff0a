"""A running answer: receives the worker's tokens for a reader that may be slow or go away."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.records import Result, Token
from edgespec.server.faults import from_engine
from edgespec.server.jobs import Waiting

ALIVE_S = 10.0
"""Seconds without a token after which a stream sends something, so that no proxy closes it as dead."""

CLIENT_GONE = 499
"""Status of an answer that nobody reads, as in nginx."""

_SETTLE_S = 0.1

Item: TypeAlias = list[Token] | Waiting | Result
"""What a worker yields of a request."""


class Gone(Exception):  # noqa: N818 - no error: nobody is there to be answered
    """The client went away."""


class RunningAnswer:
    """Receives what a worker yields, in an asyncio task of its own.

    So the reader can wait for the next tokens with a time limit. It can also end the generation with one call
    that does not wait, even while the reader itself is being cancelled.
    """

    def __init__(self, source: AsyncGenerator[Item]) -> None:
        """Begin to receive from `source`."""
        self._news: asyncio.Queue[Item | Exception] = asyncio.Queue()
        self._task = asyncio.create_task(self._receive(source))
        self._watch: asyncio.Task[None] | None = None
        self._refused: Exception | None = None

    async def _receive(self, source: AsyncGenerator[Item]) -> None:
        begun = False
        try:
            async with aclosing(source):
                async for item in source:
                    begun = begun or not isinstance(item, Waiting)
                    self._news.put_nowait(item)
        except asyncio.CancelledError:
            self._news.put_nowait(Gone())
            raise
        except Exception as error:  # noqa: BLE001 - raised where it is read
            if not begun:
                self._refused = error
            self._news.put_nowait(error)

    def watch(self, receive: Receive) -> None:
        """End the generation when the client goes away; the body must have been read from `receive`."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.close()

        self._watch = asyncio.create_task(wait())

    async def settle(self, log: Callable[[str], None]) -> None:
        """Wait a moment, so that a refusal that comes at once still gets its own status. Raises Fault."""
        try:
            await asyncio.wait({self._task}, timeout=_SETTLE_S)
        except BaseException:
            self.close()
            raise
        if self._refused:
            raise from_engine(self._refused, log) from None

    async def items(self, alive_s: float | None = None) -> AsyncIterator[Item | None]:
        """Yield places in the queue and tokens as they come, then the Result.

        None is yielded after each `alive_s` seconds without any of them.
        Raises what the worker raises, and Gone.
        """
        while True:
            try:
                item = await asyncio.wait_for(self._news.get(), alive_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, Result):
                return

    async def collect(
        self, receive: Receive, add: Callable[[list[Token]], object], log: Callable[[str], None]
    ) -> Result | None:
        """Give all tokens to `add` and return the Result; None if the client went away. Raises Fault."""
        self.watch(receive)
        try:
            async for item in self.items():
                if isinstance(item, Result):
                    return item
                if isinstance(item, list):
                    add(item)
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - all of them become an answer
            raise from_engine(error, log) from None
        finally:
            self.close()
        return None

    def close(self) -> None:
        """End the generation, if it has not ended."""
        self._task.cancel()
        if self._watch:
            self._watch.cancel()


class StreamedAnswer(Response):
    """The text of a generation as it comes; the generation ends when the client goes away."""

    def __init__(self, run: RunningAnswer, parts: AsyncGenerator[str], media_type: str) -> None:
        """Send what `parts` yields of `run`."""
        super().__init__(
            media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._parts = parts

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        self._run.watch(receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._run.close()


def client_of(request: Request, user: str | None = None) -> str:
    """Return who takes a turn in the queue: the user, else the API key, else the address."""
    if user:
        return f"user {user}"
    if key := request.headers.get("authorization"):
        return f"key {hashlib.sha256(key.encode()).hexdigest()}"
    return f"address {request.client.host if request.client else ''}"
