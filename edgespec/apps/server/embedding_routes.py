"""Vectors of texts, as of OpenAI's and Ollama's APIs, and /v1/rerank, as of Jina's and Cohere's.

A thread embeds the texts of several requests in one pass. Each pass takes a text of every request under way
in turn, as many as it holds: a request of thousands of texts does not keep others waiting.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Annotated, Any, Literal, Never, Unpack

import numpy as np
from fastapi import FastAPI
from pydantic import AfterValidator, Field, WithJsonSchema

from edgespec.apps.embed.embedder import PASS_TEXTS, Embedder, Vectors, normalised
from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import RequestPart, VectorFields
from edgespec.apps.server.request_reader import Service, check_tokens
from edgespec.apps.server.request_worker import QueuedRequest, QueueLimits, RequestWorker, Start, cancelled_as
from edgespec.apps.server.streaming import Answerer, Prepared, WholeWriter
from edgespec.errors import MessageFn, UsageError
from edgespec.platform.processes import Cancellation


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """The vectors of a request's texts, or their scores."""

    rows: Vectors
    n_tokens: int


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedTexts(QueuedRequest[Never, EmbeddedTexts]):
    """A request for the vectors of texts."""

    texts: Sequence[Sequence[int]]
    rows: list[Vectors] = field(default_factory=list)
    """Those made so far, in the order of the texts."""

    def unread(self) -> Iterator[tuple[QueuedTexts, Sequence[int]]]:
        """Yield the request with each text that has no vector yet."""
        return ((self, text) for text in islice(self.texts, len(self.rows), None))


class EmbeddingWorker(RequestWorker[QueuedTexts, Never, EmbeddedTexts]):
    """Embeds texts on its own thread, the only one that uses `embedder` from `start` to the end of `stop`."""

    def __init__(self, embedder: Embedder, cancellation: Cancellation, **limits: Unpack[QueueLimits]) -> None:
        """Embed with `embedder`, which was made with the interrupt of `cancellation`."""
        super().__init__("edgespec embeddings", parallel=PASS_TEXTS, **limits)
        self.embedder, self._cancellation = embedder, cancellation

    def run(self, texts: Sequence[Sequence[int]], *, client: str) -> Start[Never, EmbeddedTexts]:
        """Return a function that begins a request in the turn of `client`; it has no parts.

        Leaving ends the work after the current pass. Beginning raises QueueFull and ShuttingDown.
        """
        return partial(self._ask, partial(QueuedTexts, client, texts=texts))

    def _interrupt(self) -> None:
        self._cancellation.cancel()

    def _has_room(self, request: QueuedTexts) -> bool:
        return len(self._running) < self.parallel

    def _begin(self, request: QueuedTexts) -> None:
        """Do nothing yet: `_step` reads it."""

    def _step(self) -> None:
        """Run a pass over texts of all requests under way; end those that are complete or must end."""
        for request in [*self._running]:
            if request.cancelled:
                self._end(request, request.cancelled)
        in_turn = chain.from_iterable(zip_longest(*(request.unread() for request in self._running)))
        texts = [*islice(filter(None, in_turn), PASS_TEXTS)]
        if not texts:
            return
        del texts[self.embedder.n_fitting(len(tokens) for _, tokens in texts) :]
        try:
            with self.turns:
                rows = self.embedder.forward([tokens for _, tokens in texts])
        except Exception as error:  # noqa: BLE001 - it ends these requests, not the thread
            for request in dict.fromkeys(request for request, _ in texts):
                self._end(request, error)
            return
        except BaseException:  # noqa: BLE001 - raised to end the pass; it must not end this thread
            self._cancellation.drain()  # or it would end the next pass; whoever asked for it is marked
            return
        for (request, _), row in zip(texts, rows, strict=True):
            request.rows.append(row)
        for request in [*self._running]:
            if len(request.rows) == len(request.texts):
                self._end(request, EmbeddedTexts(np.stack(request.rows), sum(map(len, request.texts))))

    def _end(self, request: QueuedTexts, end: EmbeddedTexts | BaseException) -> None:
        if isinstance(end, EmbeddedTexts):
            self._leave(request, "finished", end, end)
        else:
            self._leave(request, cancelled_as(end) if request.cancelled else "failed", end, None)


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

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [text if isinstance(text, str) else text.text for text in self.documents]


# ---- the routes ----


@dataclass(frozen=True)
class VectorTexts:
    """The tokens of the texts of a request, or of its pairs of query and document."""

    tokens: list[list[int]]

    def start(self, worker: EmbeddingWorker, client: str, **_follows: bool) -> Start[Never, EmbeddedTexts]:
        """Return the function that begins to embed them in the turn of `client`."""
        return worker.run(self.tokens, client=client)


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
        """Whether it scores documents instead of making vectors."""
        return self.worker.embedder.model.ranks

    def check(self, model: str, *, ranks: bool, dimensions: int | None = None) -> None:
        """Raise ApiError for a model that is not served, or does not do what is asked."""
        self.service.names.find(model)
        if ranks == self.ranks:
            n = self.worker.embedder.model.n_outputs
            if dimensions is not None and dimensions > n:
                line = f"{dimensions}, and a vector of {self.service.name} has {n}"
                raise ApiError(400, line, field="dimensions")
            return
        does = (
            "ranks documents and makes no vectors" if self.ranks else "makes vectors and ranks no documents"
        )
        raise ApiError(501, f"{self.service.name} {does}: choose another model", param="model")

    def tokens(
        self, texts: Sequence[TextOrTokens], param: str, *, most: int | None = None
    ) -> list[list[int]]:
        """Return the tokens of texts, cut to `most`, if given, on any thread. Raises ApiError."""
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


def add_embeddings(app: FastAPI, service: EmbeddingService, answerer: Answerer) -> None:
    """Add POST /v1/embeddings and POST /v1/rerank to `app`."""
    name, pair = service.service.name, service.worker.embedder.pair

    def read(body: EmbeddingRequest) -> Prepared[VectorTexts]:
        service.check(body.model, ranks=False, dimensions=body.dimensions)
        return Prepared((VectorTexts(service.tokens(body.input, "input")),), user=body.user)

    def read_pairs(body: RerankRequest) -> Prepared[VectorTexts]:
        service.check(body.model, ranks=True)
        service.read_each(lambda query: pair(query, ""), [body.query], "query")
        tokens = service.read_each(partial(pair, body.query), body.texts, "documents")
        return Prepared((VectorTexts(tokens),), user=body.user)

    def writer(body: EmbeddingRequest, _: object) -> WholeWriter[EmbeddedTexts]:
        return WholeWriter(lambda found: _embeddings(found, body, name))

    def ranks(body: RerankRequest, _: object) -> WholeWriter[EmbeddedTexts]:
        return WholeWriter(lambda found: _ranking(found, body, name))

    answerer.serve(app, EMBEDDINGS, EmbeddingRequest, read, writer)
    for path in RERANK:
        answerer.serve(app, path, RerankRequest, read_pairs, ranks)


def cut_rows(rows: Vectors, dimensions: int | None) -> Vectors:
    """Return vectors cut to `dimensions` numbers, at length 1 again; None: uncut."""
    return rows if dimensions is None else normalised(rows, dimensions)


def _embeddings(found: EmbeddedTexts, body: EmbeddingRequest, model: str) -> dict[str, Any]:
    rows = cut_rows(found.rows, body.dimensions)
    vectors: Iterable[str | list[float]] = (
        (base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows)
        if body.encoding_format == "base64"
        else (row.tolist() for row in rows)
    )
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(found)}


def _ranking(found: EmbeddedTexts, body: RerankRequest, model: str) -> dict[str, Any]:
    scores = found.rows[:, 0].tolist()
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # equal ones as in the request
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i]} for i in order[: body.top_n or len(order)]
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.texts[result["index"]]}
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model}
    return {**answer, "results": results, "usage": _usage(found)}


def _usage(found: EmbeddedTexts) -> dict[str, int]:
    return {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
