"""Ollama's routes of an embedding model: /api/embed, the older /api/embeddings, and what is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import CLIENT_GONE, ApiError
from edgespec.apps.server.embedding_routes import (
    MAX_TEXTS,
    EmbeddingService,
    check_dimensions,
    cut_rows,
    json_answer,
)
from edgespec.apps.server.embedding_worker import EmbeddedTexts
from edgespec.apps.server.json_routes import route_class
from edgespec.apps.server.ollama.options import OPTIONS_SCHEMA, read_options
from edgespec.apps.server.ollama.request_schema import OllamaRequest
from edgespec.apps.server.ollama.response_schema import OllamaError
from edgespec.apps.server.ollama.routes import OllamaModelFacts, add_facts
from edgespec.apps.server.openapi import error_responses


class OllamaVectorRequest(OllamaRequest):
    """Fields that /api/embed and /api/embeddings share."""

    options: Annotated[dict[str, Any] | None, OPTIONS_SCHEMA] = None
    keep_alive: float | str | None = Field(
        None, description="Accepted: the model stays as long as the server."
    )
    truncate: bool | None = Field(None, description="false: a text that is too long is refused, not cut.")


class OllamaEmbedRequest(OllamaVectorRequest):
    """The body of POST /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    dimensions: int | None = Field(None, ge=1, description="As of /v1/embeddings.")


class OllamaEmbeddingsRequest(OllamaVectorRequest):
    """The body of POST /api/embeddings."""

    prompt: str | None = None


class OllamaVectors(BaseModel):
    """The answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="Nanoseconds since the request came.")
    load_duration: int
    prompt_eval_count: int = Field(description="Tokens of the texts.")


class OllamaVector(BaseModel):
    """The answer of /api/embeddings."""

    embedding: list[float]


def add_ollama_embeddings(app: FastAPI, service: EmbeddingService) -> None:
    """Add POST /api/embed and /api/embeddings, and the facts of the model, to `app`."""
    model = service.worker.embedder.model
    # Ollama has no word for a model that ranks.
    capabilities = [] if service.ranks else ["embedding"]
    facts = OllamaModelFacts(model, service.service, capabilities, lambda: model.size_bytes)
    router = APIRouter(
        prefix="/api",
        route_class=route_class(service.log, any_type=True),
        responses=error_responses(OllamaError),
    )
    add_facts(router, facts)

    async def rows(
        request: Request, body: OllamaVectorRequest, texts: Sequence[str], param: str
    ) -> EmbeddedTexts | None:
        most = read_options(body.options or {}).n_ctx or service.service.n_ctx
        cuts = body.truncate is not False
        tokens = await run_in_threadpool(
            service.tokens, texts, param, most=min(most, service.service.n_ctx) if cuts else None
        )
        return await service.run(request, tokens)

    @router.post("/embed", response_model=OllamaVectors)
    async def embed(request: Request, body: OllamaEmbedRequest) -> Response:
        """Embed texts; without any, say that the model is loaded."""
        began = time.perf_counter()
        _check(service, facts, body)
        check_dimensions(service, body.dimensions)
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        if len(texts) > 1 and "" in texts:
            raise ApiError(400, f"input.{texts.index('')}: an empty text has no vector", param="input")
        texts = [*filter(None, texts)]
        found = await rows(request, body, texts, "input") if texts else None
        if texts and found is None:
            return Response(status_code=CLIENT_GONE)
        vectors = [] if found is None else cut_rows(found.rows, body.dimensions).tolist()
        return json_answer(
            {
                "model": body.model,
                "embeddings": vectors,
                "total_duration": round(1e9 * (time.perf_counter() - began)),
                "load_duration": 0,
                "prompt_eval_count": found.n_tokens if found else 0,
            }
        )

    @router.post("/embeddings", response_model=OllamaVector)
    async def embeddings(request: Request, body: OllamaEmbeddingsRequest) -> Response:
        """Embed a text, in the older form."""
        _check(service, facts, body)
        if not body.prompt:
            return json_answer({"embedding": []})
        found = await rows(request, body, [body.prompt], "prompt")
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return json_answer({"embedding": found.rows[0].tolist()})

    app.include_router(router)


def _check(service: EmbeddingService, facts: OllamaModelFacts, body: OllamaVectorRequest) -> None:
    facts.names.check(body.model)
    service.check_kind(ranks=False)
