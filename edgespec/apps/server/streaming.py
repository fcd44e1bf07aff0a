"""Sends what the worker generates for a request, whole or as it comes, to a client that may go away."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError, engine_error
from edgespec.apps.server.request_queue import End, Part, QueuePlace
from edgespec.apps.server.request_reader import PreparedRequest
from edgespec.apps.server.worker import Worker
from edgespec.decoding.records import PromptProgress, Result, Token
from edgespec.platform.messages import MessageFn

ALIVE_S = 10.0
"""Seconds without a token after which a stream sends something, so that no proxy closes it as dead."""

WARNING = "X-Edgespec-Warning"
"""Header for a part of a request that is done only in part; once for each."""

CLIENT_GONE = 499
"""Status of an answer that nobody reads, as in nginx."""

_SETTLE_S = 0.1


class ClientGone(Exception):  # noqa: N818 - no error: nobody is there to be answered
    """The client went away."""


class RequestRun(Generic[Part, End]):
    """The answers of a request: receives what a worker yields, each answer in its own asyncio task.

    So the reader can wait for the next tokens with a time limit. It can also end the generations with one
    call that does not wait, even while the reader itself is being cancelled.
    """

    def __init__(
        self,
        sources: Sequence[AsyncGenerator[list[Part] | QueuePlace | End]],
        log: MessageFn,
        *,
        n_prompts: int = 1,
        parallel: int = 1,
    ) -> None:
        """Receive what `sources` yield, of `parallel` at once.

        The first answer to each prompt reads it: the others begin once it has, and share it. `log` takes a
        line for each failure that is not the client's fault.
        """
        n_each = len(sources) // n_prompts
        self.n_prompts = n_prompts
        self.ends: dict[int, End] = {}
        """The answers that have ended, by their index."""
        self.failure: ApiError | None = None
        """Why a stream ended that had begun."""
        self._log = log
        self._news: asyncio.Queue[tuple[int, list[Part] | QueuePlace | End] | Exception] = asyncio.Queue()
        self._n = len(sources)
        self._turns = asyncio.Semaphore(parallel)
        self._n_each = n_each
        self._has_read = [asyncio.Event() for _ in range(0, len(sources), n_each)]
        self._begun = False
        self._refused: Exception | None = None
        self._tasks = [asyncio.create_task(self._receive(i, source)) for i, source in enumerate(sources)]
        self._watch: asyncio.Task[None] | None = None

    async def _receive(self, index: int, source: AsyncGenerator[list[Part] | QueuePlace | End]) -> None:
        has_read = self._has_read[index // self._n_each]
        try:
            if index % self._n_each:
                await has_read.wait()
            async with self._turns, aclosing(source):
                async for item in source:
                    if not isinstance(item, QueuePlace):
                        self._begun = True
                        has_read.set()
                    self._news.put_nowait((index, item))
        except asyncio.CancelledError:
            self._news.put_nowait(ClientGone())
            raise
        except Exception as error:  # noqa: BLE001 - raised where it is read
            if not self._begun:
                self._refused = error
            self._news.put_nowait(error)

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self.ends) == self._n

    def watch(self, receive: Receive) -> None:
        """End the generations when the client goes away; the body must have been read from `receive`."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.close()

        self._watch = asyncio.create_task(wait())

    async def settle(self) -> None:
        """Wait a moment, so that a refusal that comes at once still gets its own status. Raises ApiError."""
        try:
            await asyncio.wait(self._tasks, timeout=_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.close()
            raise
        if self._refused:
            self.close()
            raise engine_error(self._refused, self._log) from None

    async def items(
        self, alive_s: float | None = None
    ) -> AsyncIterator[tuple[int, list[Part] | QueuePlace | End] | None]:
        """Yield places in the queue and parts of each answer as they come, then its end; each by its index.

        None is yielded after each `alive_s` seconds without any of them.
        Raises what the worker raises, and ClientGone.
        """
        while not self.is_complete:
            try:
                item = await asyncio.wait_for(self._news.get(), alive_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            index, made = item
            yield item
            if not isinstance(made, list | QueuePlace):
                self.ends[index] = made

    async def collect(
        self, receive: Receive, collect: Callable[[int, list[Part]], object]
    ) -> list[End] | None:
        """Give all parts to `collect`; return the ends, None if the client left. Raises ApiError."""
        self.watch(receive)
        try:
            async for found in self.items():
                if found is None:
                    continue
                index, item = found
                if isinstance(item, list):
                    collect(index, item)
        except ClientGone:
            return None
        except Exception as error:  # noqa: BLE001 - all of them become an answer
            raise engine_error(error, self._log) from None
        finally:
            self.close()
        return [self.ends[i] for i in range(self._n)]

    async def parts(self, writer: AnswerWriter[Part, End]) -> AsyncGenerator[str]:
        """Yield the parts of a stream as `writer` writes them; a failure becomes the last one."""
        if first := writer.begin():
            yield first
        spoke = time.monotonic()
        try:
            async for found in self.items(ALIVE_S):
                part = writer.write(*found) if found else ""
                if not part and (found is None or time.monotonic() > spoke + ALIVE_S):
                    part = writer.idle(is_waiting=found is None)
                if part:
                    yield part
                    spoke = time.monotonic()
        except ClientGone:
            pass
        except Exception as error:  # noqa: BLE001 - the status is sent: all of them become a part
            self.failure = engine_error(error, self._log)
            yield writer.failed(self.failure)

    async def answer(self, request: Request, writer: AnswerWriter[Part, End], *, streams: bool) -> Response:
        """Return the answer to `request` in the form of `writer`. Raises ApiError."""
        request.state.run = self  # for the log
        if streams:
            await self.settle()
            return StreamingAnswer(self, writer)
        ends = await self.collect(request.receive, writer.collect)
        if ends is None:
            return Response(status_code=CLIENT_GONE)
        return Response(writer.whole(ends), media_type=writer.whole_type)

    def close(self) -> None:
        """End what has not ended."""
        for task in self._tasks:
            task.cancel()
        if self._watch:
            self._watch.cancel()


class AnswerWriter(ABC, Generic[Part, End]):
    """Writes the answer to one request in the form of an API, whole or in parts; "": nothing is sent.

    Waits and failures are told in server-sent events, unless an API has another way.
    """

    media_type = "text/event-stream"
    """Content-Type of a stream."""
    whole_type = "application/json"
    """Content-Type of a whole answer."""

    def begin(self) -> str:
        """Return what a stream begins with."""
        return ""

    @abstractmethod
    def add(self, index: int, made: Sequence[Part], /) -> str:
        """Return the part of a stream for what was `made` of the answer number `index`."""

    @abstractmethod
    def finish(self, index: int, end: End, /) -> str:
        """Return the part of a stream for an answer's end."""

    @abstractmethod
    def collect(self, index: int, made: Sequence[Part], /) -> None:
        """Add what was `made` of an answer, for `whole`."""

    @abstractmethod
    def whole(self, ends: Sequence[End], /) -> str:
        """Return the answer of a request that does not stream, whose answers ended with `ends`."""

    def write(self, index: int, item: list[Part] | QueuePlace | End) -> str:
        """Return the part of a stream for an item that a worker yielded."""
        if isinstance(item, QueuePlace):
            return self.reading(item.progress) if item.progress else self.queued(item.place)
        return self.add(index, item) if isinstance(item, list) else self.finish(index, item)

    def idle(self, *, is_waiting: bool) -> str:
        """Return what keeps a silent connection open: it waits, or a call is not complete yet."""
        return f": {'waiting' if is_waiting else 'writing'}\n\n"  # a comment, as below: clients skip it

    def queued(self, place: int) -> str:
        """Return what tells the request's place in the queue."""
        return f": queue {place}\n\n"

    def reading(self, progress: PromptProgress) -> str:
        """Return what tells how far the prompt is read."""
        return f": reading {progress.n_read} of {progress.n_tokens} tokens\n\n"

    def failed(self, error: ApiError) -> str:
        """Return what ends a stream that failed."""
        return f"data: {json.dumps(error.body())}\n\n"


class StreamingAnswer(Response):
    """An answer as it comes; the work ends when the client goes away."""

    def __init__(self, run: RequestRun[Part, End], writer: AnswerWriter[Part, End]) -> None:
        """Send what `writer` writes of `run`."""
        super().__init__(
            media_type=writer.media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._parts = run.parts(writer)

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


class Answerer:
    """Has the worker generate, and answers with what it writes."""

    def __init__(self, worker: Worker, log: MessageFn) -> None:
        """Let `worker` generate; `log` takes a line for each failure that is not the client's fault."""
        self._worker = worker
        self._log = log

    async def answer(
        self,
        request: Request,
        prepared: PreparedRequest,
        writer: AnswerWriter[Token, Result],
        *,
        streams: bool,
        user: str | None = None,
    ) -> Response:
        """Return the answer to `request` in the form of `writer`; `user` waits in the queue."""
        worker, client = self._worker, client_of(request, user)
        sources = [
            worker.run(text.tokens, text.options, client=client, follows=i >= worker.parallel)
            for i, text in enumerate(prepared.texts)
        ]
        run: RequestRun[Token, Result] = RequestRun(
            sources, self._log, n_prompts=prepared.n_prompts, parallel=worker.parallel
        )
        return await run.answer(request, writer, streams=streams)


def with_warnings(answer: Response, warnings: Sequence[str]) -> Response:
    """Return `answer` with a header for each of `warnings`."""
    for warning in warnings:
        line = " ".join(warning.split())
        answer.headers.append(WARNING, line.encode("ascii", "replace").decode())
    return answer


def client_of(request: Request, user: str | None) -> str:
    """Return who takes a turn in the queue: the user, else the API key, else the address."""
    if user:
        return f"user {user}"
    if key := request.headers.get("authorization"):
        return f"key {hashlib.sha256(key.encode()).hexdigest()}"
    return f"address {request.client.host if request.client else ''}"
