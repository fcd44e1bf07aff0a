"""The routes: OpenAI's chat completions, completions and models, health and metrics."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.audio_routes import OPENAI_NAME, SpeechService, add_audio
from edgespec.apps.server.infill_routes import add_infill
from edgespec.apps.server.json_routes import HeadAsGet, add_error_handlers, route_class
from edgespec.apps.server.metrics import CONTENT_TYPE, Metrics
from edgespec.apps.server.ollama.routes import add_ollama
from edgespec.apps.server.openai_writer import ChoicesWriter, OpenAIWriter
from edgespec.apps.server.openapi import (
    error_responses,
    fields_of_routes,
    openapi_description,
    stream_responses,
)
from edgespec.apps.server.page import add_page
from edgespec.apps.server.props_route import add_props
from edgespec.apps.server.request_reader import RequestReader, Service
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest
from edgespec.apps.server.request_worker import RequestWorker
from edgespec.apps.server.response_schema import (
    ChatChunk,
    ChatCompletion,
    ErrorAnswer,
    Health,
    ModelList,
    ServedModel,
    ServedModelFacts,
    SpeechModelEntry,
    SpeechModelFacts,
    TextCompletion,
)
from edgespec.apps.server.run_route import add_run
from edgespec.apps.server.streaming import Answerer, with_warnings
from edgespec.apps.server.tokenizer_routes import add_tokenizer
from edgespec.apps.server.worker import Worker
from edgespec.decoding.choices import DrafterName
from edgespec.engine.engine import Engine
from edgespec.platform.messages import MessageFn


def _log(line: str) -> None:
    sys.stderr.write(f"edgespec: {line}\n")


def create_app(
    engine: Engine,
    worker: Worker,
    *,
    metrics: Metrics | None = None,
    service: Service | None = None,
    speech: SpeechService | None = None,
    log: MessageFn = _log,
) -> FastAPI:
    """Return the application that answers for `engine`, which `worker` runs.

    `speech`: what transcribes recordings, if anything. `log` takes a line for each request that failed for
    a reason that is not the client's.
    """
    service = service or Service.of(engine)
    app = bare_app(
        "OpenAI's API, and Ollama's, over one pair of local models, with exact speculative decoding.", log
    )
    reader = RequestReader(engine.target, service)
    answerer = Answerer(worker, log)
    add_reports(app, [worker, speech.worker] if speech else [worker], metrics)
    _add_models(app, engine, service, speech, takes_tools=reader.takes_tools)
    _add_completions(app, engine, service, reader, answerer)
    add_run(app, engine, answerer)
    add_ollama(app, engine, service, reader, answerer, log=log)
    add_infill(app, engine.target, service, reader, answerer)
    add_tokenizer(app, engine.target, service)
    add_props(app, engine, worker, service, takes_tools=reader.takes_tools)
    if speech:
        add_audio(app, speech, log)
    return complete(app)


def bare_app(summary: str, log: MessageFn) -> FastAPI:
    """Return an application that has no routes yet, and answers failures as OpenAI's API does."""
    app = FastAPI(
        title="edgespec",
        version=version("edgespec"),
        summary=summary,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        responses=error_responses(ErrorAnswer),
    )
    app.router.route_class = route_class(log)
    app.add_middleware(HeadAsGet)
    add_error_handlers(app)
    return app


def complete(app: FastAPI) -> FastAPI:
    """Return `app`, which has all of its API's routes, with the page and the description."""
    add_page(app)
    app.openapi_schema = openapi_description(app.openapi())
    app.state.fields = fields_of_routes(app.openapi_schema)
    return app


def add_reports(
    app: FastAPI, workers: Sequence[RequestWorker[Any, Any, Any]], metrics: Metrics | None
) -> None:
    """Add the routes that say how the server is, which `workers` answers."""

    @app.get("/health", responses={503: {"model": Health}})
    @app.get("/v1/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Say whether requests are taken."""
        stopping = any(worker.stopping for worker in workers)
        response.status_code = 503 if stopping else 200
        return Health(
            status="stopping" if stopping else "ok",
            busy=any(worker.busy for worker in workers),
            running=sum(worker.n_running for worker in workers),
            waiting=sum(worker.n_waiting for worker in workers),
            parallel=sum(worker.parallel for worker in workers),
        )

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        """Return the counters for Prometheus."""
        if metrics is None:
            raise ApiError(404, "this server counts nothing")
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def _add_models(
    app: FastAPI, engine: Engine, service: Service, speech: SpeechService | None, *, takes_tools: bool
) -> None:
    served = ServedModel(
        id=service.name,
        created=int(engine.target.path.stat().st_mtime),
        edgespec=ServedModelFacts(
            aliases=[*service.aliases],
            draft=engine.draft.name if engine.draft else None,
            drafters=drafters_of(engine),
            n_ctx=service.n_ctx,
            kernels=engine.kernels,
            chat=engine.target.chat_template is not None,
            tools=takes_tools,
            energy=engine.meter is not None,
        ),
    )

    heard = [speech_facts(speech)] if speech else []

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the model, and that of speech if there is one."""
        return ModelList(data=[served, *heard])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ServedModel | SpeechModelEntry:
        """Return the model of this name."""
        for found in heard:
            if name in (found.id, OPENAI_NAME):
                return found
        service.check_name(name)
        return served


def speech_facts(speech: SpeechService) -> SpeechModelEntry:
    """Return the Whisper model as /v1/models lists it."""
    transcriber = speech.worker.transcriber
    return SpeechModelEntry(
        id=speech.name,
        created=int(Path(transcriber.model.path).stat().st_mtime),
        edgespec=SpeechModelFacts(
            aliases=[OPENAI_NAME],
            languages=list(transcriber.tokenizer.languages)
            if transcriber.tokenizer.is_multilingual
            else ["en"],
        ),
    )


def _add_completions(
    app: FastAPI, engine: Engine, service: Service, reader: RequestReader, answerer: Answerer
) -> None:
    fingerprint = service.fingerprint(engine)

    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        prepared = await run_in_threadpool(reader.choices, body)
        writing = ChoicesWriter.of(body, prepared, engine.target, service.name, fingerprint)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        writer, streams = OpenAIWriter(writing, usage=usage), bool(body.stream)
        found = await answerer.answer(request, prepared, writer, streams=streams, user=body.user)
        return with_warnings(found, prepared.warnings)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=stream_responses(ChatChunk))
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await answer(request, body)

    @app.post("/v1/completions", response_model=TextCompletion, responses=stream_responses(TextCompletion))
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await answer(request, body)


def drafters_of(engine: Engine) -> list[str]:
    """Return what may be asked to draft."""
    if engine.draft is None:
        return ["auto", "suffix", "none"]
    return [name for name in get_args(DrafterName) if name != "mtp" or engine.draft.is_mtp]
