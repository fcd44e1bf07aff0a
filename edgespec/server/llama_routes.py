"""llama-server's routes: /infill, /tokenize, /detokenize; and vLLM's /tokenizer_info."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from edgespec.llama.weights import Model
from edgespec.server.answers import ErrorAnswer
from edgespec.server.description import refusals, streamed
from edgespec.server.faults import from_engine
from edgespec.server.infill import InfillAnswer, InfillPart, InfillRequest, InfillWriting
from edgespec.server.jobs import Waiting
from edgespec.server.requests import RequestReader, Service
from edgespec.server.running import (
    ALIVE_S,
    CLIENT_GONE,
    Gone,
    RunningAnswer,
    StreamedAnswer,
    client_of,
    warned,
)
from edgespec.server.tokenizing import (
    DetokenizeRequest,
    Text,
    TokenizeRequest,
    TokenizerFacts,
    Tokens,
    text_of,
    tokenizer_facts,
    tokens_of,
)
from edgespec.server.worker import Worker
from edgespec.server.writing import Written


def add_llama_routes(
    app: FastAPI,
    target: Model,
    worker: Worker,
    service: Service,
    reader: RequestReader,
    *,
    log: Callable[[str], None],
) -> None:
    """Add the routes to `app`; they answer from the same queue as the others."""
    refused = refusals(ErrorAnswer)
    infiller = _Infiller(target, worker, service, reader, log)

    @app.post(
        "/infill",
        response_model=InfillAnswer | dict[str, Any],
        responses={**refused, **streamed(InfillPart)},
    )
    async def infill(request: Request, body: InfillRequest) -> Response:
        """Write what stands between two texts, as llama-server does."""
        return await infiller.answer(request, body)

    @app.post("/tokenize", responses=refused, response_model_exclude_unset=True)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Return the tokens of a text."""
        if body.model is not None:
            service.check_name(body.model)
        return await run_in_threadpool(tokens_of, target, body, service.n_ctx)

    @app.post("/detokenize", responses=refused)
    async def detokenize(body: DetokenizeRequest) -> Text:
        """Return the text of tokens."""
        if body.model is not None:
            service.check_name(body.model)
        return await run_in_threadpool(text_of, target, body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerFacts:
        """Return what a client must know of the tokenizer."""
        return tokenizer_facts(target)


class _Infiller:
    """Answers requests to /infill."""

    def __init__(
        self,
        target: Model,
        worker: Worker,
        service: Service,
        reader: RequestReader,
        log: Callable[[str], None],
    ) -> None:
        self._target, self._worker, self._service = target, worker, service
        self._reader, self._log = reader, log

    async def answer(self, request: Request, body: InfillRequest) -> Response:
        """Fill a gap, in events or as a whole."""
        prepared = await run_in_threadpool(self._reader.infill, body)
        written = Written(self._target, keeps_tokens=False)
        writing = InfillWriting(
            body, self._service.name, written, len(prepared.tokens), is_cut=prepared.is_cut
        )
        client = client_of(request, body.user)
        run = RunningAnswer(self._worker.run(prepared.tokens, prepared.options, client=client))
        if body.stream:
            await run.settle(self._log)
            return warned(StreamedAnswer(run, self._events(run, writing), "text/event-stream"), body.warnings)
        result = await run.collect(request.receive, writing.add, self._log)
        if result is None:
            return Response(status_code=CLIENT_GONE)
        whole = json.dumps(writing.end(result, streamed=False), ensure_ascii=False)
        return warned(Response(whole, media_type="application/json"), body.warnings)

    async def _events(self, run: RunningAnswer, writing: InfillWriting) -> AsyncGenerator[str]:
        try:
            async for item in run.items(ALIVE_S):
                if item is None:
                    yield ": waiting\n\n"
                elif isinstance(item, Waiting):
                    yield f": queue {item.place}\n\n"
                elif isinstance(item, list):
                    if part := writing.add(item):
                        yield f"data: {part.model_dump_json()}\n\n"
                else:
                    last = json.dumps(writing.end(item, streamed=True), ensure_ascii=False)
                    yield f"data: {last}\n\n"
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - the status is sent: all of them become an event
            yield f"data: {json.dumps(from_engine(error, self._log).body())}\n\n"
