"""A running answer: receives the worker's tokens for a reader that may be slow or go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeAlias

from starlette.types import Receive

from edgespec.records import Result, Token
from edgespec.server.jobs import Waiting

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

    async def settle(self, seconds: float) -> None:
        """Wait a moment, so that a refusal that comes at once still gets its own status."""
        await asyncio.wait({self._task}, timeout=seconds)
        if self._refused:
            raise self._refused

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

    def close(self) -> None:
        """End the generation, if it has not ended."""
        self._task.cancel()
        if self._watch:
            self._watch.cancel()
