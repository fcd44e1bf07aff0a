"""OpenAI's route /v1/embeddings, and /v1/rerank in the form of Jina's API and Cohere's."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import AfterValidator, Field, WithJsonSchema
from starlette.concurrency import run_in_threadpool

from edgespec.apps.embed.embedder import normalised
from edgespec.apps.embed.vector_model import Vectors
from edgespec.apps.server.api_errors import CLIENT_GONE, ApiError
from edgespec.apps.server.embedding_worker import EmbeddedTexts, EmbeddingWorker
from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import RequestPart, VectorFields
from edgespec.apps.server.request_reader import Service, check_tokens
from edgespec.apps.server.streaming import RequestRun, client_of
from edgespec.errors import UsageError
from edgespec.platform.messages import MessageFn

EMBEDDINGS = "/v1/embeddings"
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
"""Jina's route, Cohere's, and llama-server's names of it."""

VECTOR_ROUTES = (EMBEDDINGS, *RERANK)
"""The routes of a server of an embedding or reranking model."""

MAX_TEXTS = 2048
"""Most texts of a request, as OpenAI has it."""

# ---- the fields of a request ----

TextOrTokens = str | list[int]

_ONE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
_INPUT = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_TEXTS}]}


def _texts(value: object) -> list[TextOrTokens]:
    texts: list[Any] = value if isinstance(value, list) and not _is_text(value) else [value]
    if not texts or len(texts) > MAX_TEXTS or not all(map(_is_text, texts)):
        raise ValueError(
            f"must be text, a list of token ids, or a list of up to {MAX_TEXTS} of these, none of them empty"
        )
    return texts


def _is_text(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)


_User = Annotated[
    str | None,
    Field(description="Who waits in the queue; by default the API key, or the address."),
]


class EmbeddingRequest(VectorFields):
    """The body of POST /v1/embeddings."""

    input: Annotated[Any, AfterValidator(_texts), WithJsonSchema(_INPUT)] = Field(
        description="Text or token ids, or a list of such. Token ids are taken as they are."
    )
    model: RequestedModel = ALIAS
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of 32-bit floats, the lowest byte first. Default float."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Cut each vector to so many numbers, and make it one of length 1 again."
    )
    user: _User = None


class RerankText(RequestPart):
    """A document to be ranked, given as an object."""

    text: str = Field(min_length=1)


class RerankRequest(VectorFields):
    """The body of POST /v1/rerank."""

    query: str = Field(min_length=1)
    documents: list[Annotated[str, Field(min_length=1)] | RerankText] = Field(
        min_length=1, max_length=MAX_TEXTS
    )
    model: RequestedModel = ALIAS
    top_n: int | None = Field(None, ge=1, description="Only the best; default all.")
    return_documents: bool | None = Field(None, description="With the documents. Default false.")
    user: _User = None


# ---- the routes ----


@dataclass(frozen=True)
class EmbeddingService:
    """The embedding or reranking model that a server serves."""

    service: Service
    worker: EmbeddingWorker
    log: MessageFn
    """Takes a line for each failure that is not the client's fault."""

    def __str__(self) -> str:
        return f"{'ranking documents' if self.ranks else 'embedding texts'} with {self.service.name}"

    @property
    def ranks(self) -> bool:
        """Whether it scores documents, and makes no vectors."""
        return self.worker.embedder.model.ranks

    def check(self, model: str, *, ranks: bool) -> None:
        """Raise ApiError for a model that is not served, or does not do what is asked."""
        self.service.names.find(model)
        if ranks == self.ranks:
            return
        does = (
            "ranks documents and makes no vectors" if self.ranks else "makes vectors and ranks no documents"
        )
        raise ApiError(501, f"{self.service.name} {does}: choose another model", param="model")

    def tokens(
        self, texts: Sequence[TextOrTokens], param: str, *, most: int | None = None
    ) -> list[list[int]]:
        """Return the tokens of texts, cut to `most`, if given. Raises ApiError; for any thread."""
        embedder = self.worker.embedder

        def read(text: TextOrTokens) -> list[int]:
            if isinstance(text, str):
                whole = embedder.model.text_tokens(text)
            else:
                check_tokens(text, embedder.model, param)
                whole = text
            whole = whole if most is None else embedder.model.cut(whole, most)
            embedder.check_length(len(whole))
            return whole

        return self.read_each(read, texts, param)

    def read_each(
        self, read: Callable[[Any], list[int]], texts: Sequence[Any], param: str
    ) -> list[list[int]]:
        """Return the tokens that `read` makes of each text. Raises ApiError that names a refused one."""
        found = []
        for number, text in enumerate(texts):
            try:
                found.append(read(text))
            except UsageError as error:
                place = f"{param}.{number}" if len(texts) > 1 else param
                raise ApiError(400, str(error), field=place) from None
        return found

    async def run(
        self, request: Request, tokens: list[list[int]], user: str | None = None
    ) -> EmbeddedTexts | None:
        """Return the rows of texts; None if the client left. Raises ApiError."""
        start = self.worker.run(tokens, client=client_of(request, user))
        run: RequestRun[Any, EmbeddedTexts] = RequestRun([start], self.log)
        request.state.run = run  # for the log of requests
        ends = await run.collect(request.receive, lambda _index, _parts: None)
        return ends[0] if ends else None


def add_embeddings(app: FastAPI, service: EmbeddingService) -> None:
    """Add POST /v1/embeddings and POST /v1/rerank to `app`."""

    @app.post(EMBEDDINGS, response_model=dict[str, Any])
    async def embed(request: Request, body: EmbeddingRequest) -> Response:
        service.check(body.model, ranks=False)
        check_dimensions(service, body.dimensions)
        tokens = await run_in_threadpool(service.tokens, body.input, "input")
        found = await service.run(request, tokens, body.user)
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return await run_in_threadpool(_embeddings, found, body, service.service.name)

    async def rerank(request: Request, body: RerankRequest) -> Response:
        service.check(body.model, ranks=True)
        documents = [text if isinstance(text, str) else text.text for text in body.documents]

        def read(document: str) -> list[int]:
            return service.worker.embedder.pair(body.query, document)

        await run_in_threadpool(
            service.read_each, lambda query: service.worker.embedder.pair(query, ""), [body.query], "query"
        )
        tokens = await run_in_threadpool(service.read_each, read, documents, "documents")
        found = await service.run(request, tokens, body.user)
        if found is None:
            return Response(status_code=CLIENT_GONE)
        return _ranking(found, body, documents, service.service.name)

    for path in RERANK:
        app.add_api_route(path, rerank, methods=["POST"], response_model=dict[str, Any])


def check_dimensions(service: EmbeddingService, dimensions: int | None) -> None:
    """Raise ApiError if a vector has fewer numbers."""
    n = service.worker.embedder.model.n_outputs
    if dimensions is not None and dimensions > n:
        line = f"{dimensions}, and a vector of {service.service.name} has {n}"
        raise ApiError(400, line, field="dimensions")


def cut_rows(rows: Vectors, dimensions: int | None) -> Vectors:
    """Return vectors of so many numbers; None: as they are."""
    return rows if dimensions is None else normalised(rows, dimensions)


def _embeddings(found: EmbeddedTexts, body: EmbeddingRequest, model: str) -> Response:
    rows = cut_rows(found.rows, body.dimensions)
    vectors: Iterable[str | list[float]] = (
        (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows)
        if body.encoding_format == "base64"
        else (row.tolist() for row in rows)
    )
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return json_answer({"object": "list", "data": data, "model": model, "usage": _usage(found)})


def _ranking(found: EmbeddedTexts, body: RerankRequest, documents: Sequence[str], model: str) -> Response:
    scores = found.rows[:, 0].tolist()
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # equal ones as in the request
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i]} for i in order[: body.top_n or len(order)]
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model}
    return json_answer({**answer, "results": results, "usage": _usage(found)})


def _usage(found: EmbeddedTexts) -> dict[str, int]:
    return {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}


def json_answer(fields: dict[str, Any]) -> Response:
    """Return an answer of many numbers: no model has to check each of them."""
    return Response(msgspec.json.encode(fields), media_type="application/json")
