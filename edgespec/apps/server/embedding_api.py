"""The application of a server of an embedding or reranking model alone."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel

from edgespec.apps.server.api import add_reports, add_tokenizer, bare_app, described
from edgespec.apps.server.embedding_routes import EmbeddingService, add_embeddings
from edgespec.apps.server.json_routes import refuse_routes
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.ollama.embedding_routes import add_ollama_embeddings

TEXT_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/infill",
    "/api/chat",
    "/api/generate",
)
"""The routes of a server of a model that writes text."""

_NO_TEXT = "this server makes vectors of texts, or ranks them, and writes none: choose another server"


class EmbeddingModelFacts(BaseModel):
    """The served embedding or reranking model: its names, and what it makes of a text."""

    aliases: list[str]
    embeddings: bool
    rerank: bool
    dimensions: int | None
    n_ctx: int
    pooling: str
    kernels: str


class EmbeddingModelEntry(BaseModel):
    """The model in the answer of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "edgespec"
    edgespec: EmbeddingModelFacts


class EmbeddingModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[EmbeddingModelEntry]


def create_embedding_app(service: EmbeddingService, *, metrics: Metrics | None) -> FastAPI:
    """Return the application for `service`."""
    app = bare_app(
        "OpenAI's embeddings API, Ollama's, and Jina's rerank API, over a local model.", service.log
    )
    model, named = service.worker.embedder.model, service.service
    add_reports(app, [service.worker], metrics)
    entry = EmbeddingModelEntry(
        id=named.name,
        created=int(model.path.stat().st_mtime),
        edgespec=EmbeddingModelFacts(
            aliases=[*named.aliases],
            embeddings=not model.ranks,
            rerank=model.ranks,
            dimensions=None if model.ranks else model.n_outputs,
            n_ctx=named.n_ctx,
            pooling=model.pooling,
            kernels=service.worker.embedder.kernels,
        ),
    )

    @app.get("/v1/models")
    async def models() -> EmbeddingModelList:
        return EmbeddingModelList(data=[entry])

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> EmbeddingModelEntry:
        named.check_name(name)
        return entry

    add_embeddings(app, service)
    add_ollama_embeddings(app, service)
    add_tokenizer(app, model, named)
    refuse_routes(app, TEXT_ROUTES, _NO_TEXT)
    return described(app)
