"""Sends what the worker generates for a request, whole or as it comes, to a client that may go away."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgespec.apps.server.api_errors import (
    CLIENT_GONE,
    FORMS,
    ApiError,
    ErrorForm,
    engine_error,
    form_of,
    spelled,
)
from edgespec.apps.server.request_worker import End, Item, Part, QueuePlace, RequestWorker, Start
from edgespec.decoding.records import PromptProgress
from edgespec.errors import MessageFn

ALIVE_S = 10.0
"""Seconds without a token after which a stream sends something, so that no proxy closes it as dead."""

WARNING = "X-Edgespec-Warning"
"""Header for a part of a request that is done only in part; once for each."""

_LINES = {"schema": {"type": "string"}}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": _LINES, "application/x-ndjson": _LINES}}
}
"""The description of an answer that may stream."""

_SETTLE_S = 0.1

Body = TypeVar("Body")
"""The body of a request of some API."""


class Startable(Protocol):
    """The input of one answer of a worker: a text, a recording, texts to be embedded."""

    def start(self, worker: Any, client: str, *, follows: bool) -> Start[Any, Any]:  # noqa: ANN401 - its kind's
        """Return the function that begins the answer in the turn of `client`.

        `follows`: it is not refused for a full queue.
        """


Job = TypeVar("Job", bound=Startable)


@dataclass(frozen=True)
class Prepared(Generic[Job]):
    """A request in the form that its worker needs; several texts, or other results, may answer it."""

    texts: tuple[Job, ...]
    """The same number for each prompt; those of one prompt follow each other."""
    n_prompts: int = 1
    n_best: int | None = None
    """How many texts of each prompt, the likeliest, are the answer; None: all."""
    streams: bool = False
    """Whether the answer is sent as it comes."""
    user: str | None = None
    """Who waits in the queue; None: the API key, or the address."""
    warnings: tuple[str, ...] = ()
    """Lines on parts of the request that are done only in part."""
    came: float = field(default_factory=time.perf_counter)
    """When it was read, by `time.perf_counter`."""


class ClientGone(Exception):  # noqa: N818 - no error: nobody is there to be answered
    """The client went away: nothing more is written for it."""


class RequestRun(Generic[Part, End]):
    """The answers to a request: one queue holds what the worker makes for them.

    The reader can wait for the next item with a time limit. Whoever closes it ends the generations with one
    call that does not wait, even while the reader itself is being cancelled.
    """

    def __init__(
        self, starts: Sequence[Start[Part, End]], log: MessageFn, *, n_prompts: int = 1, parallel: int = 1
    ) -> None:
        """Begin the answers of `starts`, `parallel` at once.

        The first answer to each prompt reads it: the others begin once it has, and share it. `log` takes a
        line for each failure that is not the client's fault.
        """
        self.n_prompts = n_prompts
        self.ends: dict[int, End] = {}
        """The answers that have ended, by their index."""
        self.failure: ApiError | None = None
        """Why a stream ended that had begun."""
        self._log = log
        self._news: deque[tuple[int, Item[Part, End]]] = deque()
        self._has_news = asyncio.Event()
        self._starts = starts
        self._parallel = parallel
        self._n_each = len(starts) // n_prompts
        self._unbegun = [*range(len(starts))]
        self._leave: dict[int, Callable[[], None]] = {}  # ends each answer under way
        self._have_read: set[int] = set()  # prompts
        self._refused: Exception | None = None
        self._watch: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin the answers that may, in their order."""
        while len(self._leave) < self._parallel:
            ready = (i for i in self._unbegun if not i % self._n_each or i // self._n_each in self._have_read)
            index = next(ready, None)
            if index is None:
                return
            self._unbegun.remove(index)
            try:
                self._leave[index] = self._starts[index](partial(self._receive, index))
            except Exception as error:  # noqa: BLE001 - raised where it is read
                self._receive(index, error)

    def _receive(self, index: int, item: Item[Part, End]) -> None:
        """Add an item to the queue; begin the answers that waited for it."""
        self._news.append((index, item))
        self._has_news.set()
        if isinstance(item, QueuePlace):
            return
        if isinstance(item, Exception):
            if not self._have_read:
                self._refused = item
        else:
            self._have_read.add(index // self._n_each)
        if not isinstance(item, list) and (leave := self._leave.pop(index, None)):
            leave()
        if self._unbegun:
            self._begin()

    @property
    def is_complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self.ends) == len(self._starts)

    def watch(self, receive: Receive) -> None:
        """End the generations when the client goes away; the body must have been read from `receive`."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.close()

        self._watch = asyncio.create_task(wait())

    async def settle(self) -> None:
        """Wait for the first item, at most a moment: a refusal gets its own status. Raises ApiError."""
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), _SETTLE_S)
        except BaseException:
            self.close()
            raise
        if self._refused:
            self.close()
            raise engine_error(self._refused, self._log) from None

    async def items(
        self, alive_s: float | None = None
    ) -> AsyncIterator[tuple[int, list[Part] | QueuePlace | End] | None]:
        """Yield places in the queue and parts of each answer as they come, then its end, each with its index.

        None is yielded after each `alive_s` seconds without any of them.
        Raises what the worker raises, and ClientGone.
        """
        while not self.is_complete:
            if self._news:
                await asyncio.sleep(0)  # or a client that leaves is noticed after the last part
            else:
                self._has_news.clear()
                try:
                    await asyncio.wait_for(self._has_news.wait(), alive_s)
                except TimeoutError:
                    yield None
                    continue
            index, item = self._news.popleft()
            if isinstance(item, BaseException):
                raise item
            yield index, item
            if not isinstance(item, list | QueuePlace):
                self.ends[index] = item

    async def parts(self, writer: AnswerWriter[Part, End]) -> AsyncGenerator[str]:
        """Yield the parts of a stream as `writer` writes them; a failure becomes the last one."""
        if first := writer.begin():
            yield first
        spoke = time.monotonic()
        try:
            async for found in self.items(ALIVE_S):
                part = writer.write_item(*found) if found else ""
                if not part and (found is None or time.monotonic() > spoke + ALIVE_S):
                    part = writer.idle(is_waiting=found is None)
                if part:
                    yield part
                    spoke = time.monotonic()
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - the status is sent: all of them become a part
            self.failure = engine_error(error, self._log)
            yield writer.failed(self.failure)

    async def answer(self, request: Request, writer: AnswerWriter[Part, End], *, streams: bool) -> Response:
        """Return the answer to `request` in the form of `writer`. Raises ApiError."""
        request.state.run = self  # for the log
        if streams:
            await self.settle()
            return StreamingAnswer(self, writer)
        self.watch(request.receive)
        try:
            async for found in self.items():
                if found and isinstance(made := found[1], list):
                    writer.drain(writer.parts(found[0], made))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 - all of them become an answer
            raise engine_error(error, self._log) from None
        finally:
            self.close()
        ends = [self.ends[i] for i in range(len(self._starts))]
        text = await run_in_threadpool(writer.whole, ends)  # of thousands of numbers it takes a while
        return Response(text, media_type=writer.whole_type, headers=dict(writer.headers))

    def close(self) -> None:
        """End the texts under way, and begin none of those that wait."""
        self._unbegun.clear()
        self._news.clear()
        self._news.append((0, ClientGone()))
        self._has_news.set()
        while self._leave:
            self._leave.popitem()[1]()
        if self._watch:
            self._watch.cancel()


class WholeEvents:
    """Cuts a stream into whole events, so that one that breaks off can be left out."""

    def __init__(self, end: bytes = b"\n\n") -> None:
        """Cut after each `end`."""
        self._end = end
        self.rest = b""
        """What has come of the next one."""

    def feed(self, part: bytes) -> list[bytes]:
        """Add a part of the stream; return the events that it completes."""
        *whole, self.rest = (self.rest + part).split(self._end)
        return [event + self._end for event in whole]


class AnswerWriter(ABC, Generic[Part, End]):
    """Writes the answer to one request in the form of an API, whole or in parts; "": nothing is sent.

    What was generated becomes parts, and only a stream encodes them. Waits and failures are server-sent
    events, unless an API has another way.
    """

    media_type = "text/event-stream"
    """Content-Type of a stream."""
    whole_type = "application/json"
    """Content-Type of a whole answer."""
    errors = ErrorForm()
    """The form of errors in its API."""
    headers: Mapping[str, str] = {}
    """More headers of an answer."""
    remarks: Sequence[str] = ()
    """Warnings that only the answer shows."""

    def begin(self) -> str:
        """Return the beginning of a stream."""
        return ""

    def parts(self, _index: int, _made: Sequence[Part], /) -> Iterator[Any]:
        """Yield the parts of a stream for new items of the answer with this number."""
        return iter(())

    def last_parts(self, _index: int, _end: End, /) -> Iterator[Any]:
        """Yield the parts that end an answer."""
        return iter(())

    def encode(self, part: Any, /) -> str:  # noqa: ANN401 - its API's
        """Return a part as a stream sends it: a server-sent event of JSON."""
        return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"

    @abstractmethod
    def whole(self, ends: Sequence[End], /) -> str:
        """Return the answer to a request that does not stream, once all is added; `ends`: its results."""

    def add(self, index: int, made: Sequence[Part]) -> str:
        """Return the part of a stream for the new items `made` of answer number `index`."""
        return "".join(map(self.encode, self.parts(index, made)))

    def finish(self, index: int, end: End) -> str:
        """Return the part of a stream for an answer's end."""
        return "".join(map(self.encode, self.last_parts(index, end)))

    @staticmethod
    def drain(parts: Iterator[Any]) -> None:
        """Make parts that are not sent."""
        deque(parts, maxlen=0)

    def write_item(self, index: int, item: list[Part] | QueuePlace | End) -> str:
        """Return the part of a stream for an item that a worker yielded."""
        if isinstance(item, QueuePlace):
            return self.reading(item.progress) if item.progress else self.queued(item.place)
        return self.add(index, item) if isinstance(item, list) else self.finish(index, item)

    def idle(self, *, is_waiting: bool) -> str:
        """Return a sign of life on a silent connection: it waits, or a call is not complete yet."""
        return f": {'waiting' if is_waiting else 'writing'}\n\n"  # a comment, as below: clients skip it

    def queued(self, place: int) -> str:
        """Return the comment with the request's place in the queue."""
        return f": queue {place}\n\n"

    def reading(self, progress: PromptProgress) -> str:
        """Return the comment with how many tokens of the prompt are read."""
        return f": reading {progress.n_read} of {progress.n_tokens} tokens\n\n"

    def failed(self, error: ApiError) -> str:
        """Return the end of a stream that failed."""
        return self.errors.failed(error)


class StreamingAnswer(Response):
    """An answer as it comes; the work ends when the client goes away."""

    def __init__(self, run: RequestRun[Part, End], writer: AnswerWriter[Part, End]) -> None:
        """Send what `writer` writes of `run`."""
        super().__init__(
            media_type=writer.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **writer.headers},
        )
        del self.headers["content-length"]
        self._run = run
        self._parts = run.parts(writer)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer to the client."""
        self._run.watch(receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._run.close()


class WholeWriter(AnswerWriter[Any, End]):
    """Writes an answer that comes as a whole."""

    def __init__(self, write: Callable[[End], Any]) -> None:
        """Send what `write` makes of the result, as JSON."""
        self._write = write

    def whole(self, ends: Sequence[End], /) -> str:
        """Return the answer."""
        return msgspec.json.encode(self._write(ends[0])).decode()


class Answerer:
    """Has a worker make answers, and sends what a writer makes of them."""

    def __init__(self, worker: RequestWorker[Any, Any, Any], log: MessageFn) -> None:
        """Let `worker` work; `log` takes a line for each failure that is not the client's fault."""
        self._worker, self._log = worker, log

    async def answer(
        self, request: Request, prepared: Prepared[Any], writer: AnswerWriter[Any, Any]
    ) -> Response:
        """Return the answer to `request` in the form of `writer`."""
        parallel, client = self._worker.parallel, client_of(request, prepared.user)
        starts = [
            text.start(self._worker, client, follows=i >= parallel) for i, text in enumerate(prepared.texts)
        ]
        run: RequestRun[Any, Any] = RequestRun(
            starts, self._log, n_prompts=prepared.n_prompts, parallel=parallel
        )
        answer = await run.answer(request, writer, streams=prepared.streams)
        return with_warnings(answer, [*prepared.warnings, *writer.remarks])

    def serve(
        self,
        router: FastAPI | APIRouter,
        path: str,
        kind: Any,  # noqa: ANN401 - an annotation
        read: Callable[[Body], Prepared[Any] | Response],
        writer: Callable[[Body, Any], AnswerWriter[Any, Any]],
        errors: ErrorForm | None = None,
        *,
        answers: Any = dict[str, Any],  # noqa: ANN401 - a type
    ) -> None:
        """Add an API's route to `router`: a POST with a body of this `kind`, a type or FastAPI's annotation.

        `read` returns the request that a body makes, on any thread, or the answer itself if nothing is
        generated; it raises ApiError. `writer` writes the events of the answer in the API's form. `errors`:
        the form of refusals, by default the path's. `answers`: the type of a whole answer in /openapi.json.
        """
        if errors:
            FORMS[path] = errors

        async def answer(request: Request, body: Body) -> Response:
            prepared = await run_in_threadpool(read, body)
            if isinstance(prepared, Response):
                return prepared
            form = form_of(request.url.path)
            if prepared.warnings:
                told = (warning.partition(":") for warning in prepared.warnings)
                lines = (spelled(field, form.names) + colon + rest for field, colon, rest in told)
                prepared = replace(prepared, warnings=tuple(lines))
            writing = writer(body, prepared)
            writing.errors = form
            return await self.answer(request, prepared, writing)

        answer.__annotations__["body"] = kind  # which FastAPI reads
        router.add_api_route(path, answer, methods=["POST"], response_model=answers, responses=STREAMED)


def with_warnings(answer: Response, warnings: Sequence[str]) -> Response:
    """Return `answer` with a header for each of `warnings`."""
    for warning in warnings:
        line = " ".join(warning.split())
        answer.headers.append(WARNING, line.encode("ascii", "backslashreplace").decode())
    return answer


def client_of(request: Request, user: str | None) -> str:
    """Return the identity that takes turns in the queue: the user, else the API key, else the address."""
    if user:
        return f"user {user}"
    if key := request.headers.get("authorization") or request.headers.get("x-api-key"):
        return f"key {hashlib.sha256(key.encode()).hexdigest()}"
    return f"address {request.client.host if request.client else ''}"
