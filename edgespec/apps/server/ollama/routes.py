"""The routes of Ollama's API: chat, generate, what is served; and a clear line for each that is not here.

Clients may send any Content-Type or none, as `curl -d` does. The gate (gate.py) keeps other web pages out
by their Origin, and `route_class` those that a browser tells of in another way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.choice_writers import AnswerHead, AnswerText, ChatChoiceWriter
from edgespec.apps.server.json_routes import route_class
from edgespec.apps.server.ollama.line_writer import ContextTokens, Kind, OllamaWriter
from edgespec.apps.server.ollama.model_facts import OllamaModelFacts, rfc3339
from edgespec.apps.server.ollama.request_reader import OllamaReader
from edgespec.apps.server.ollama.request_schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from edgespec.apps.server.ollama.response_schema import (
    ChatLine,
    GenerateLine,
    LoadedModels,
    ModelTags,
    OllamaError,
    OllamaMessage,
    OllamaVersion,
    PullLine,
    ShownModel,
)
from edgespec.apps.server.openapi import error_responses
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader, Service
from edgespec.apps.server.streaming import Answerer
from edgespec.engine.engine import Engine
from edgespec.llama.weights import Model
from edgespec.platform.messages import MessageFn

SPOKEN = "0.12.11"
"""The version of Ollama whose API this is: clients ask for the least that they need."""

_ONE_MODEL = "this server has one model, chosen when it starts: edgespec serve --target MODEL"
_NO_VECTORS = "this server writes text: it makes no embeddings"
_ABSENT = {
    ("POST", "/push"): _ONE_MODEL,
    ("POST", "/create"): _ONE_MODEL,
    ("POST", "/copy"): _ONE_MODEL,
    ("DELETE", "/delete"): _ONE_MODEL,
    ("POST", "/blobs/{digest}"): _ONE_MODEL,
    ("POST", "/embed"): _NO_VECTORS,
    ("POST", "/embeddings"): _NO_VECTORS,
}
"""Ollama's routes that are not here, and what to do instead."""


def add_ollama(
    app: FastAPI,
    engine: Engine,
    service: Service,
    reader: RequestReader,
    answerer: Answerer,
    *,
    log: MessageFn,
) -> None:
    """Add Ollama's routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    known = {
        "completion": True,
        "tools": reader.takes_tools,
        "insert": engine.target.fim is not None,
        "thinking": reader.thinks,
    }
    capabilities = [name for name, has in known.items() if has]
    facts = OllamaModelFacts(engine, service, capabilities)
    router = APIRouter(
        prefix="/api",
        route_class=route_class(log, any_type=True),
        responses=error_responses(OllamaError),
    )
    own = OllamaReader(reader, service, engine.target)
    _add_facts(router, facts)
    _add_generations(router, engine.target, own, facts, answerer, service.fingerprint(engine))
    for (method, path), line in _ABSENT.items():
        router.add_api_route(path, _absent(line), methods=[method], include_in_schema=False)
    app.include_router(router)


def _add_facts(router: APIRouter, facts: OllamaModelFacts) -> None:
    async def tags() -> ModelTags:
        """List the one model."""
        return ModelTags(models=[facts.listed()])

    async def loaded() -> LoadedModels:
        """List the one model, which is always loaded."""
        return LoadedModels(models=[facts.loaded()])

    async def spoken() -> OllamaVersion:
        """Return the version of Ollama whose API this is, and edgespec's."""
        return OllamaVersion(version=SPOKEN, edgespec=version("edgespec"))

    for path, answer in (("/tags", tags), ("/ps", loaded), ("/version", spoken)):
        router.add_api_route(path, answer, methods=["GET"])

    @router.post("/show", response_model=ShownModel)
    async def show(body: OllamaShowRequest) -> Response:
        """Tell of the model: what it can do, its template, the metadata of its file."""
        facts.names.check(body.model or body.name)
        shown = await run_in_threadpool(facts.shown, verbose=bool(body.verbose))
        return Response(shown.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.post("/pull", response_model=PullLine, responses=_lines(PullLine))
    async def pull(body: OllamaPullRequest) -> Response:
        """Say that the served model is here: programs pull before they ask. No other is fetched."""
        try:
            facts.names.check(body.model or body.name)
        except ApiError as error:
            raise error if error.status != 404 else ApiError(404, _ONE_MODEL) from None
        lines = [line.model_dump_json(exclude_unset=True) + "\n" for line in facts.pulled()]
        if body.stream is False:
            return Response(lines[-1], media_type="application/json")
        return Response("".join(lines), media_type=OllamaWriter.media_type)


def _add_generations(
    router: APIRouter,
    target: Model,
    reader: OllamaReader,
    facts: OllamaModelFacts,
    answerer: Answerer,
    fingerprint: str,
) -> None:
    async def answer(
        request: Request, body: OllamaChatRequest | OllamaGenerateRequest, kind: Kind
    ) -> Response:
        began = time.perf_counter()
        facts.names.check(body.model)
        if not (body.messages if isinstance(body, OllamaChatRequest) else body.prompt):
            return _nothing_asked(body, kind)
        text = await run_in_threadpool(reader.read, body)
        head = AnswerHead.new("ollama", facts.names.full, fingerprint)
        written = AnswerText(target, keeps_tokens=bool(body.logprobs))
        writer = OllamaWriter(
            kind,
            body.model,
            ChatChoiceWriter(head, written, text.answer),
            began=began,
            context=_context(target, body, text.tokens),
            warnings=text.warnings,
        )
        streams = body.stream is not False
        return await answerer.answer(request, PreparedRequest((text,)), writer, streams=streams)

    @router.post("/chat", response_model=ChatLine, responses=_lines(ChatLine))
    async def chat(request: Request, body: OllamaChatRequest) -> Response:
        """Answer a conversation; without messages say that the model is loaded."""
        return await answer(request, body, "chat")

    @router.post("/generate", response_model=GenerateLine, responses=_lines(GenerateLine))
    async def generate(request: Request, body: OllamaGenerateRequest) -> Response:
        """Answer a prompt; without one say that the model is loaded."""
        return await answer(request, body, "generate")


def _context(
    target: Model, body: OllamaChatRequest | OllamaGenerateRequest, prompt: Sequence[int]
) -> ContextTokens | None:
    """Return what makes the `context` of an answer; None where it has none."""
    if isinstance(body, OllamaChatRequest) or body.raw or body.suffix or target.chat_template is None:
        return None
    return ContextTokens(prompt, target.eos if target.eot is None else target.eot)


def _nothing_asked(body: OllamaGenerationRequest, kind: Kind) -> Response:
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
        raise ApiError(501, line)

    return refuse


def _lines(line: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that is a stream of `line`, unless the request says otherwise."""
    text = {
        "type": "string",
        "description": f"Each line is a {line.__name__}; one that failed an OllamaError.",
    }
    return {200: {"description": "The answer.", "content": {OllamaWriter.media_type: {"schema": text}}}}
