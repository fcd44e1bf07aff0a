"""The routes: OpenAI's chat completions, completions and models, health and metrics."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from importlib.metadata import version
from typing import get_args

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.decoding.choices import DrafterName
from edgespec.decoding.records import Result
from edgespec.engine.engine import Engine
from edgespec.llama.weights import Model
from edgespec.server.answers import (
    ChatChunk,
    ChatCompletion,
    ErrorAnswer,
    Health,
    ModelFacts,
    ModelList,
    ServedModel,
    TextCompletion,
)
from edgespec.server.choices import ChoicesWriting
from edgespec.server.description import described, refusals, streamed
from edgespec.server.faults import Fault, from_engine
from edgespec.server.jobs import Waiting
from edgespec.server.llama_routes import add_llama_routes
from edgespec.server.metrics import CONTENT_TYPE, Metrics
from edgespec.server.ollama.routes import add_ollama
from edgespec.server.page import add_page
from edgespec.server.requests import PreparedChoices, RequestReader, Service
from edgespec.server.running import (
    ALIVE_S,
    CLIENT_GONE,
    Gone,
    RunningTexts,
    StreamedAnswer,
    client_of,
    warned,
)
from edgespec.server.schema import ChatRequest, CompletionRequest, Sampled
from edgespec.server.strict import add_fault_handlers, route_class
from edgespec.server.worker import Worker
from edgespec.server.writing import ChatWriting, Head, TextWriting, Written

Log = Callable[[str], None]


def _log(line: str) -> None:
    sys.stderr.write(f"edgespec: {line}\n")


def create_app(
    engine: Engine,
    worker: Worker,
    *,
    metrics: Metrics | None = None,
    service: Service | None = None,
    log: Log = _log,
) -> FastAPI:
    """Return the application that answers for `engine`, which `worker` runs.

    `log` takes a line for each request that failed for a reason that is not the client's.
    """
    service = service or Service.of(engine)
    app = FastAPI(
        title="edgespec",
        version=version("edgespec"),
        summary="OpenAI's API, and Ollama's, over one pair of local models, with exact speculative decoding.",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        responses=refusals(ErrorAnswer),
    )
    app.router.route_class = route_class(log)
    add_fault_handlers(app)
    reader = RequestReader(engine.target, service)
    answerer = _Answerer(engine, worker, service, log, takes_tools=reader.takes_tools)
    _add_reports(app, worker, metrics)
    _add_models(app, service, answerer)
    _add_completions(app, engine.target, reader, answerer)
    add_ollama(app, engine, worker, service, reader, log=log)
    add_llama_routes(app, engine.target, worker, service, reader, log=log)
    add_page(app)
    app.openapi_schema = described(app.openapi())
    return app


def _add_reports(app: FastAPI, worker: Worker, metrics: Metrics | None) -> None:
    @app.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Say whether requests are taken."""
        response.status_code = 503 if worker.stopping else 200
        return Health(
            status="stopping" if worker.stopping else "ok",
            busy=worker.busy,
            running=worker.n_running,
            waiting=worker.n_waiting,
            parallel=worker.parallel,
        )

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        """Return the counters for Prometheus."""
        if metrics is None:
            raise Fault(404, "this server counts nothing")
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def _add_models(app: FastAPI, service: Service, answerer: _Answerer) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the one model."""
        return ModelList(data=[answerer.served])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ServedModel:
        """Return the model of this name."""
        service.check_name(name)
        return answerer.served


def _add_completions(app: FastAPI, target: Model, reader: RequestReader, answerer: _Answerer) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=streamed(ChatChunk))
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        prepared = await run_in_threadpool(reader.chats, body)
        head = answerer.head("chatcmpl")
        writings = [
            ChatWriting(head, Written(target, keeps_tokens=bool(body.logprobs)), text.answer, i)
            for i, text in enumerate(prepared.texts)
        ]
        return await answerer.answer(request, body, prepared, ChoicesWriting(prepared, writings))

    @app.post("/v1/completions", response_model=TextCompletion, responses=streamed(TextCompletion))
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        prepared = await run_in_threadpool(reader.texts, body)
        head = answerer.head("cmpl")
        writings = [
            TextWriting(
                head,
                Written(target, keeps_tokens=body.logprobs is not None),
                i,
                echo=text.echo,
                prompt=text.tokens,
            )
            for i, text in enumerate(prepared.texts)
        ]
        return await answerer.answer(request, body, prepared, ChoicesWriting(prepared, writings))


class _Answerer:
    """Answers the requests of all routes that generate."""

    def __init__(
        self, engine: Engine, worker: Worker, service: Service, log: Log, *, takes_tools: bool
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._log = log
        self._fingerprint = service.fingerprint(engine)
        self.served = ServedModel(
            id=service.name,
            created=int(engine.target.path.stat().st_mtime),
            edgespec=ModelFacts(
                aliases=[*service.aliases],
                draft=engine.draft.name if engine.draft else None,
                drafters=_drafters(engine),
                n_ctx=service.n_ctx,
                kernels=engine.kernels,
                chat=engine.target.chat_template is not None,
                tools=takes_tools,
                energy=engine.meter is not None,
            ),
        )

    def head(self, kind: str) -> Head:
        return Head.new(kind, self.served.id, self._fingerprint)

    async def answer(
        self,
        request: Request,
        body: Sampled,
        prepared: PreparedChoices,
        writing: ChoicesWriting,
    ) -> Response:
        client, worker = client_of(request, body.user), self._worker
        sources = [
            worker.run(text.tokens, text.options, client=client, follows=i >= worker.parallel)
            for i, text in enumerate(prepared.texts)
        ]
        n_each = len(prepared.texts) // prepared.n_prompts
        run = RunningTexts(sources, at_once=worker.parallel, n_each=n_each)
        answer: Response
        if body.stream:
            await run.settle(self._log)
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            answer = StreamedAnswer(run, self._events(run, writing, usage=usage), "text/event-stream")
        else:
            results = await run.collect_all(
                request.receive, lambda i, tokens: _exhaust(writing.add(i, tokens)), self._log
            )
            if results is None:
                return Response(status_code=CLIENT_GONE)
            for i, result in enumerate(results):
                _exhaust(writing.finish(i, result))
            answer = _json(writing.whole())
        return warned(answer, prepared.warnings)

    async def _events(
        self, run: RunningTexts, writing: ChoicesWriting, *, usage: bool
    ) -> AsyncGenerator[str]:
        for first in writing.begin():
            yield _event(first)
        spoke = time.monotonic()
        try:
            async for found in run.all_items(ALIVE_S):
                index, item = found or (0, None)
                if item is None:
                    yield ": waiting\n\n"
                elif isinstance(item, Waiting):  # a comment: clients that know nothing of a queue skip it
                    yield f": queue {item.place}\n\n"
                elif isinstance(item, Result):
                    for last in _end(writing, index, item, usage=usage):
                        yield last
                elif chunks := [*writing.add(index, item)]:
                    yield "".join(map(_event, chunks))
                    spoke = time.monotonic()
                elif time.monotonic() > spoke + ALIVE_S:  # a function call is held back until it is complete
                    yield ": writing\n\n"
                    spoke = time.monotonic()
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - the status is sent: all of them become an event
            yield f"data: {json.dumps(from_engine(error, self._log).body())}\n\n"


def _drafters(engine: Engine) -> list[str]:
    """Return what may be asked to draft."""
    if engine.draft is None:
        return ["auto", "suffix", "none"]
    return [name for name in get_args(DrafterName) if name != "mtp" or engine.draft.is_mtp]


def _end(writing: ChoicesWriting, index: int, result: Result, *, usage: bool) -> Iterator[str]:
    """Yield the last events of a text, and of the answer if it is its last."""
    yield from map(_event, writing.finish(index, result))
    if writing.is_complete:
        if usage:
            yield _event(writing.usage())
        yield "data: [DONE]\n\n"


def _exhaust(chunks: Iterable[BaseModel]) -> None:
    for _ in chunks:
        pass


def _event(chunk: BaseModel) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")
