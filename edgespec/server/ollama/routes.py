"""The routes of Ollama's API: chat, generate, what is served; and a clear line for each that is not here.

Clients may send any Content-Type or none, as `curl -d` does. The gate (limits.py) keeps other web pages out
by their Origin, and `route_class` those that a browser tells of in another way.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.decoding.records import Result
from edgespec.engine.engine import Engine
from edgespec.server.faults import Fault, from_engine
from edgespec.server.ollama.answers import (
    ChatLine,
    GenerateLine,
    LoadedModels,
    ModelTags,
    OllamaError,
    OllamaMessage,
    ShownModel,
    Version,
)
from edgespec.server.ollama.facts import Facts, rfc3339
from edgespec.server.ollama.requests import OllamaReader, renamed
from edgespec.server.ollama.schema import ChatBody, GenerateBody, Generation, ShowBody
from edgespec.server.ollama.writing import Context, Kind, LineWriting
from edgespec.server.requests import PreparedRequest, RequestReader, Service
from edgespec.server.running import (
    ALIVE_S,
    CLIENT_GONE,
    Gone,
    RunningAnswer,
    StreamedAnswer,
    client_of,
)
from edgespec.server.strict import route_class
from edgespec.server.worker import Worker
from edgespec.server.writing import ChatWriting, Head, Written

SPOKEN = "0.12.11"
"""The version of Ollama whose API this is: clients ask for the least that they need."""

NDJSON = "application/x-ndjson"

_ONE_MODEL = "this server has one model, chosen when it starts: edgespec serve --target MODEL"
_NO_VECTORS = "this server writes text: it makes no embeddings"
_ABSENT = {
    ("POST", "/pull"): _ONE_MODEL,
    ("POST", "/push"): _ONE_MODEL,
    ("POST", "/create"): _ONE_MODEL,
    ("POST", "/copy"): _ONE_MODEL,
    ("DELETE", "/delete"): _ONE_MODEL,
    ("POST", "/blobs/{digest}"): _ONE_MODEL,
    ("POST", "/embed"): _NO_VECTORS,
    ("POST", "/embeddings"): _NO_VECTORS,
}
"""Ollama's routes that are not here, and what to do instead."""

Log = Callable[[str], None]


def add_ollama(
    app: FastAPI, engine: Engine, worker: Worker, service: Service, reader: RequestReader, *, log: Log
) -> None:
    """Add Ollama's routes to `app`; they answer from the same queue as OpenAI's, with the same limits."""
    known = {
        "completion": True,
        "tools": reader.takes_tools,
        "insert": engine.target.fim is not None,
        "thinking": reader.thinks,
    }
    capabilities = [name for name, has in known.items() if has]
    facts = Facts(engine, service, capabilities)
    router = APIRouter(
        prefix="/api",
        route_class=route_class(log, any_type=True),
        responses={code: {"model": OllamaError} for code in _REFUSALS},
    )
    own = OllamaReader(reader, service, engine.target)
    answerer = _Answerer(engine, worker, service, own, facts, log)
    _add_facts(router, facts)
    _add_generations(router, answerer)
    for (method, path), line in _ABSENT.items():
        router.add_api_route(path, _absent(line), methods=[method], include_in_schema=False)
    app.include_router(router)


_REFUSALS = (400, 401, 403, 404, 408, 413, 500, 503, 504)


def _add_facts(router: APIRouter, facts: Facts) -> None:
    async def tags() -> ModelTags:
        """List the one model."""
        return ModelTags(models=[facts.listed()])

    async def loaded() -> LoadedModels:
        """List the one model, which is always loaded."""
        return LoadedModels(models=[facts.loaded()])

    async def spoken() -> Version:
        """Return the version of Ollama whose API this is, and edgespec's."""
        return Version(version=SPOKEN, edgespec=version("edgespec"))

    for path, answer in (("/tags", tags), ("/ps", loaded), ("/version", spoken)):
        router.add_api_route(path, answer, methods=["GET"])
        router.add_api_route(
            path, answer, methods=["HEAD"], include_in_schema=False
        )  # some look whether we live

    @router.post("/show", response_model=ShownModel)
    async def show(body: ShowBody) -> Response:
        """Tell of the model: what it can do, its template, the metadata of its file."""
        facts.names.check(body.model or body.name)
        shown = await run_in_threadpool(facts.shown, verbose=bool(body.verbose))
        return Response(shown.model_dump_json(exclude_unset=True), media_type="application/json")


def _add_generations(router: APIRouter, answerer: _Answerer) -> None:
    @router.post("/chat", response_model=ChatLine, responses=_lines(ChatLine))
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation; without messages say that the model is loaded."""
        return await answerer.answer(request, body, "chat")

    @router.post("/generate", response_model=GenerateLine, responses=_lines(GenerateLine))
    async def generate(request: Request, body: GenerateBody) -> Response:
        """Answer a prompt; without one say that the model is loaded."""
        return await answerer.answer(request, body, "generate")


class _Answerer:
    """Answers the requests that generate."""

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        service: Service,
        reader: OllamaReader,
        facts: Facts,
        log: Log,
    ) -> None:
        self._target = target = engine.target
        self._end_of_turn = target.eos if target.eot is None else target.eot
        self._worker = worker
        self._reader = reader
        self._facts = facts
        self._log = log
        self._fingerprint = service.fingerprint(engine)

    async def answer(self, request: Request, body: ChatBody | GenerateBody, kind: Kind) -> Response:
        """Generate, in lines or as a whole."""
        began = time.perf_counter()
        context: Context | None = None
        self._facts.names.check(body.model)
        if isinstance(body, ChatBody):
            if not body.messages:
                return _nothing_asked(body, kind)
            prepared = await run_in_threadpool(self._reader.chat, body)
        else:
            if not body.prompt:
                return _nothing_asked(body, kind)
            prepared = await run_in_threadpool(self._reader.generate, body)
            if not (body.raw or body.suffix or self._target.chat_template is None):
                context = Context(prepared.tokens, self._end_of_turn)
        writing = LineWriting(
            kind,
            body.model,
            self._writing(prepared, bool(body.logprobs)),
            began=began,
            context=context,
            warnings=prepared.warnings,
        )
        run = RunningAnswer(self._worker.run(prepared.tokens, prepared.options, client=client_of(request)))
        if body.stream is not False:
            await run.settle(self._log)
            return StreamedAnswer(run, self._lines(run, writing), NDJSON)
        result = await run.collect(request.receive, writing.collect, self._log)
        if result is None:
            return Response(status_code=CLIENT_GONE)
        return Response(writing.whole(result), media_type="application/json")

    def _writing(self, prepared: PreparedRequest, logprobs: bool) -> ChatWriting:
        head = Head.new("ollama", self._facts.names.full, self._fingerprint)
        return ChatWriting(head, Written(self._target, keeps_tokens=logprobs), prepared.answer)

    async def _lines(self, run: RunningAnswer, writing: LineWriting) -> AsyncGenerator[str]:
        spoke = time.monotonic()
        try:
            async for item in run.items(ALIVE_S):
                lines = ""
                if isinstance(item, Result):
                    lines = "".join(writing.finish(item))
                elif isinstance(item, list):
                    lines = "".join(writing.add(item))
                if not lines and (item is None or time.monotonic() > spoke + ALIVE_S):
                    lines = writing.idle()
                if lines:
                    yield lines
                    spoke = time.monotonic()
        except Gone:
            pass
        except Exception as error:  # noqa: BLE001 - the status is sent: all of them become a line
            yield json.dumps({"error": str(renamed(from_engine(error, self._log)))}) + "\n"


def _nothing_asked(body: Generation, kind: Kind) -> Response:
    """Return Ollama's answer to a request that only loads the model, or frees it: here it always stays."""
    fields: dict[str, Any] = {
        "model": body.model,
        "created_at": rfc3339(time.time()),
        "done": True,
        "done_reason": "unload" if body.unloads else "load",
    }
    line: BaseModel
    if kind == "chat":
        line = ChatLine(**fields, message=OllamaMessage(role="assistant", content=""))
    else:
        line = GenerateLine(**fields, response="")
    return Response(line.model_dump_json(exclude_unset=True), media_type="application/json")


def _absent(line: str) -> Callable[[], Any]:
    async def refuse() -> Response:
        raise Fault(501, line)

    return refuse


def _lines(line: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that is a stream of `line`, unless the request says otherwise."""
    text = {
        "type": "string",
        "description": f"Each line is a {line.__name__}; one that failed an OllamaError.",
    }
    return {200: {"description": "The answer.", "content": {NDJSON: {"schema": text}}}}
