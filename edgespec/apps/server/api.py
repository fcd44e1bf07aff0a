"""The applications: of a pair of models, of only a Whisper model, of an embedding model; and their routes.

OpenAI's Responses, Anthropic's and Ollama's APIs have their own modules. Here are OpenAI's other routes,
those of llama-server and `edgespec run`, health and metrics.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec.structs import replace
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.anthropic_api import add_messages
from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.audio_routes import SpeechService, add_audio
from edgespec.apps.server.embedding_routes import (
    VECTOR_ROUTES,
    EmbeddingService,
    add_embeddings,
)
from edgespec.apps.server.json_routes import (
    NO_VECTORS,
    HeadAsGet,
    add_error_handlers,
    model_in_form,
    models_in_form,
    refuse_routes,
    route_class,
)
from edgespec.apps.server.metrics import CONTENT_TYPE, Metrics
from edgespec.apps.server.names import ALIAS, RequestedModel, ServedNames
from edgespec.apps.server.ollama_api import add_ollama, add_ollama_embeddings
from edgespec.apps.server.openai_writer import ChatWriter, CompletionWriter, InfillWriter
from edgespec.apps.server.page import add_page
from edgespec.apps.server.request_fields import RequestPart
from edgespec.apps.server.request_reader import (
    PreparedRequest,
    PreparedText,
    RequestReader,
    Service,
    check_tokens,
)
from edgespec.apps.server.request_schema import (
    AdapterScale,
    ChatRequest,
    CompletionRequest,
    InfillRequest,
)
from edgespec.apps.server.request_worker import RequestWorker
from edgespec.apps.server.response_schema import (
    ChatCompletion,
    ModelEntry,
    ModelList,
    TextCompletion,
)
from edgespec.apps.server.responses_api import add_responses
from edgespec.apps.server.streaming import Answerer, AnswerWriter
from edgespec.apps.server.worker import Worker
from edgespec.cli.local_run import PATH, RunPart, RunRequest, write_part
from edgespec.decoding.choices import DrafterName
from edgespec.decoding.grammars import Grammar, GrammarSource
from edgespec.decoding.options import Options
from edgespec.decoding.records import PromptProgress, Result, StopReason, Token
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import text_of
from edgespec.engine.capacity import fitting_ctx, room_without_limit
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, MessageFn
from edgespec.llama.weights import Model
from edgespec.platform import plugins

# ---- tokens ----


class TokenizeRequest(RequestPart):
    """The body of POST /tokenize: the text is `content` in llama-server's API, `prompt` in vLLM's."""

    model: RequestedModel = ALIAS
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = Field(None, description="Add BOS and EOS if the model wants them.")
    add_special_tokens: bool | None = Field(None, description="vLLM's name of add_special.")
    parse_special: bool | None = Field(None, description="Read the names of control tokens; default true.")
    with_pieces: bool | None = Field(None, description="Tell the text of each token, too.")
    return_token_strs: bool | None = Field(None, description="vLLM's: tell the texts in a list.")


class DetokenizeRequest(RequestPart):
    """The body of POST /detokenize."""

    model: RequestedModel = ALIAS
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


def add_tokenizer(app: FastAPI, target: Model, service: Service) -> None:
    """Add /tokenize and /detokenize to `app`."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.names.find(body.model)
        return await run_in_threadpool(_tokens_of, target, body, service.n_ctx)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.names.find(body.model)
        text = await run_in_threadpool(_text_of, target, body)
        return {"content": text, "prompt": text}


def _tokens_of(model: Model, request: TokenizeRequest, n_ctx: int) -> dict[str, Any]:
    """Return the tokens of a text. Raises ApiError."""
    texts = [text for text in (request.content, request.prompt) if text is not None]
    if len(texts) != 1:
        raise ApiError(400, "content: send the text as content, or as prompt", param="content")
    # llama-server adds none by default, vLLM does.
    adds = request.add_special if request.content is not None else request.add_special_tokens is not False
    special = request.parse_special is not False
    tokens = model.tokenize(texts[0], add_special=bool(adds), parse_special=special)
    pieces = [model.piece(token, special=True) for token in tokens]
    named = [{"id": one, "piece": _piece(piece)} for one, piece in zip(tokens, pieces, strict=True)]
    found: dict[str, Any] = {"tokens": named if request.with_pieces else tokens, "count": len(tokens)}
    found["max_model_len"] = n_ctx
    if request.return_token_strs:
        found["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
    return found


def _text_of(model: Model, request: DetokenizeRequest) -> str:
    check_tokens(request.tokens, model, "tokens")
    return b"".join(model.piece(token, special=True) for token in request.tokens).decode(errors="replace")


def _piece(piece: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


# ---- /run ----


class RunWriter(AnswerWriter[Token, Result]):
    """Writes an answer as lines of RunPart."""

    media_type = "application/x-ndjson"

    def __init__(self, prompt: Sequence[int], *, limit: StopReason) -> None:
        """Answer to the tokens of a prompt; `limit`: what ends a text of `n_predict` tokens."""
        self._prompt = tuple(text_of(prompt))
        self._limit = limit

    def parts(self, _index: int, made: Sequence[Token], /) -> Iterator[RunPart]:
        """Yield the tokens that were made."""
        yield RunPart(tokens=tuple((token.id, token.text, token.origin) for token in made))

    def last_parts(self, _index: int, end: Result, /) -> Iterator[RunPart]:
        """Yield the statistics."""
        if end.stop_reason == "length":
            end = replace(end, stop_reason=self._limit)
        end = replace(end, energy=None)  # measured unasked
        yield RunPart(result=msgspec.Raw(msgspec.json.encode(end)), prompt=self._prompt)

    def encode(self, part: RunPart, /) -> str:
        """Return a line of JSON."""
        return write_part(part)

    def idle(self, *, is_waiting: bool) -> str:
        """Return an empty line, which shows a client that the server is alive."""
        return "\n"

    def queued(self, place: int) -> str:
        """Return a line with the place in the queue."""
        return write_part(RunPart(queue=place))

    def reading(self, progress: PromptProgress) -> str:
        """Return a line with how far the prompt is read."""
        return write_part(RunPart(read=progress))

    def failed(self, error: ApiError) -> str:
        """Return the last line of an answer that failed."""
        return write_part(RunPart(error=str(error)))

    def whole(self, _ends: Sequence[Result], /) -> str:
        """Return nothing: the answer always streams."""
        return ""


def add_run(app: FastAPI, engine: Engine, answerer: Answerer) -> None:
    """Add the route; the gate lets in who has the key."""

    @app.post(PATH, include_in_schema=False)
    async def run(request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=RunRequest)
            tokens, options = await run_in_threadpool(_prepared, engine, asked)
        except msgspec.DecodeError:
            raise ApiError(400, "this is no request of this version's `edgespec run`") from None
        except EdgespecError as error:
            raise ApiError(400, str(error)) from None
        prepared = PreparedRequest((PreparedText(tokens, options),), streams=True, user="edgespec run")
        writer = RunWriter(tokens, limit="context" if asked.n_predict is None else "length")
        return await answerer.answer(request, prepared, writer)


def _prepared(engine: Engine, asked: RunRequest) -> tuple[list[int], Options]:
    """Return prompt and options. Raises EdgespecError if an engine of the client's own would differ."""
    bias = {token: -math.inf if value is None else value for token, value in asked.logit_bias.items()}
    fields = cast("dict[str, Any]", asked.params)
    tokens = engine.prompt_tokens(
        asked.prompt,
        images=asked.images,
        system=asked.system,
        chat=asked.chat,
        parse_special=asked.special,
        reasoning_budget=asked.reasoning_budget,
    )
    n_train = engine.target.n_ctx_train
    n_predict = asked.n_predict or room_without_limit(engine.target.header, len(tokens))
    n_ctx, room = fitting_ctx(len(tokens), n_predict, n_train), engine.n_ctx_shared or n_train
    if len(tokens) >= n_ctx or n_ctx > room:
        raise EdgespecError(f"prompt and answer do not fit in its context of {room} tokens")
    options = Options(
        params=SamplingParams(**fields, logit_bias=bias),
        seed=asked.seed,
        n_predict=asked.n_predict or n_ctx - len(tokens),
        reasoning_budget=asked.reasoning_budget,
        drafter=cast("Any", asked.drafter),
        gamma=asked.gamma,
        rule=cast("Any", asked.rule),
        stop=asked.stop,
        grammar=Grammar(engine.target, GrammarSource(*asked.grammar)) if asked.grammar else None,
    )
    return tokens, options


# ---- adapters ----


def add_adapters(app: FastAPI, engine: Engine) -> None:
    """Add llama-server's /lora-adapters to `app`: the adapters, and the scales where a request has none."""

    @app.get("/lora-adapters")
    async def adapters() -> list[dict[str, Any]]:
        known = enumerate(engine.adapters)
        return [{"id": number, "path": str(path), "scale": scale} for number, (path, scale) in known]

    @app.post("/lora-adapters")
    async def scale(body: list[AdapterScale]) -> dict[str, bool]:
        engine.scale_adapters({one.id: one.scale for one in body})
        return {"success": True}


# ---- /props ----


def add_props(app: FastAPI, engine: Engine, worker: Worker, service: Service) -> None:
    """Add GET /props to `app`: the facts of the model that llama-server's clients read."""

    @app.get("/props")
    async def props() -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": service.n_ctx},
            "total_slots": worker.parallel,
            "model_alias": service.name,
            "modalities": {"vision": not engine.media_problem(ask_hub=False), "audio": False},
            "model_path": engine.target.path.name,  # without the folders of this machine
            "chat_template": engine.target.chat_template or "",
        }


# ---- infill ----


def add_infill(app: FastAPI, reader: RequestReader, answerer: Answerer) -> None:
    """Add POST /infill to `app`: text for a gap between two others."""
    answerer.serve(
        app,
        "/infill",
        InfillRequest,
        reader.infill,
        lambda body, request: InfillWriter(body, request, reader.model, reader.service.name),
    )


# ---- the application ----

DIALECTS = "edgespec.dialects"
"""The entry points that add other APIs: docs/write-a-dialect.md."""


def _log(line: str) -> None:
    sys.stderr.write(f"edgespec: {line}\n")


def create_app(
    engine: Engine,
    worker: Worker,
    *,
    metrics: Metrics | None = None,
    service: Service | None = None,
    speech: SpeechService | None = None,
    is_routed: bool = False,
    log: MessageFn = _log,
) -> FastAPI:
    """Return the application that answers for `engine`, which `worker` runs.

    `speech`: what transcribes recordings, if anything. `is_routed`: another process passes its requests on,
    and keeps what has to outlive the model. `log` takes a line for each request that failed for
    a reason that is not the client's.
    """
    service = service or Service.of(engine)
    app = bare_app(
        "OpenAI's API, and Ollama's, over one pair of local models, with exact speculative decoding.", log
    )
    reader = RequestReader(engine, service)
    answerer = Answerer(worker, log)
    add_reports(app, [worker, speech.worker] if speech else [worker], metrics)
    names = ServedNames([service.named, *([speech.named] if speech else [])])
    entries = [_text_entry(engine, service, names.others(0), takes_tools=reader.prompts.takes_tools)]
    add_models(app, names, [*entries, *([_speech_entry(speech, names.others(1))] if speech else [])])
    _add_completions(app, engine, service, reader, answerer)
    add_responses(app, reader, answerer, is_routed=is_routed)
    add_run(app, engine, answerer)
    add_ollama(app, engine, reader, answerer, log=log)
    add_messages(app, reader, answerer)
    add_infill(app, reader, answerer)
    add_tokenizer(app, engine.target, service)
    add_props(app, engine, worker, service)
    add_adapters(app, engine)
    for add in plugins.load_all(DIALECTS).values():
        add(app, reader, answerer)
    refuse_routes(app, VECTOR_ROUTES, NO_VECTORS)
    if speech:
        add_audio(app, speech, log)
    add_page(app)
    return app


def bare_app(summary: str, log: MessageFn) -> FastAPI:
    """Return an application without routes, which reports failures as OpenAI's API does."""
    app = FastAPI(
        title="edgespec",
        version=version("edgespec"),
        summary=summary,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        responses={"4XX": {"model": dict[str, Any]}, "5XX": {"model": dict[str, Any]}},
    )
    app.router.route_class = route_class(log)
    app.add_middleware(HeadAsGet)
    add_error_handlers(app)
    return app


def add_reports(
    app: FastAPI, workers: Sequence[RequestWorker[Any, Any, Any]], metrics: Metrics | None
) -> None:
    """Add the routes for health and metrics, which count the requests of `workers`."""

    @app.get("/health", responses={503: {"model": dict[str, Any]}})
    @app.get("/v1/health", responses={503: {"model": dict[str, Any]}})
    async def health(response: Response) -> dict[str, Any]:
        """Whether requests are taken."""
        stopping = any(worker.stopping for worker in workers)
        response.status_code = 503 if stopping else 200
        return {
            "status": "stopping" if stopping else "ok",
            "busy": any(worker.busy for worker in workers),
            "running": sum(worker.n_running for worker in workers),
            "waiting": sum(worker.n_waiting for worker in workers),
            "parallel": sum(worker.parallel for worker in workers),
        }

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        if metrics is None:
            raise ApiError(404, "this server counts nothing")
        return Response(metrics.render(), media_type=CONTENT_TYPE)


def add_models(app: FastAPI, names: ServedNames, entries: Sequence[ModelEntry]) -> None:
    """Add the routes that list the models, and describe one by any of its names."""

    @app.get("/v1/models", response_model=ModelList)
    async def models(request: Request) -> Response:
        """List the models, in Anthropic's form where its header is sent."""
        return models_in_form(request, entries)

    @app.get("/v1/models/{name:path}", response_model=ModelEntry)
    async def model(request: Request, name: str) -> Response:
        """Describe a model, in Anthropic's form where its header is sent."""
        return model_in_form(request, entries[names.find(name)])


def _entry(name: str, file: str | Path, **facts: object) -> ModelEntry:
    made = int(Path(file).stat().st_mtime)
    return {"id": name, "object": "model", "created": made, "owned_by": "edgespec", "edgespec": facts}


def _text_entry(engine: Engine, service: Service, aliases: list[str], *, takes_tools: bool) -> ModelEntry:
    return _entry(
        service.name,
        engine.target.path,
        aliases=aliases,
        draft=engine.draft.name if engine.draft else None,
        drafters=drafters_of(engine),
        n_ctx=service.n_ctx,
        kernels=engine.kernels,
        chat=engine.target.chat_template is not None,
        tools=takes_tools,
        vision=not engine.media_problem(ask_hub=False),
        energy=engine.meter is not None,
    )


def _speech_entry(speech: SpeechService, aliases: list[str]) -> ModelEntry:
    model, tokenizer = speech.worker.transcriber.model, speech.worker.transcriber.tokenizer
    languages = [*tokenizer.languages] if tokenizer.is_multilingual else ["en"]
    return _entry(speech.name, model.path, speech=True, aliases=aliases, languages=languages)


def _add_completions(
    app: FastAPI, engine: Engine, service: Service, reader: RequestReader, answerer: Answerer
) -> None:
    served = engine.target, service.name, service.fingerprint(engine)
    answerer.serve(
        app,
        "/v1/chat/completions",
        ChatRequest,
        reader.choices,
        lambda body, request: ChatWriter(body, request, *served),
        answers=ChatCompletion,
    )
    answerer.serve(
        app,
        "/v1/completions",
        CompletionRequest,
        reader.choices,
        lambda body, request: CompletionWriter(body, request, *served),
        answers=TextCompletion,
    )


def drafters_of(engine: Engine) -> list[str]:
    """The drafters that a request may name."""
    if engine.draft is None:
        return ["auto", "suffix", "none"]
    return [name for name in get_args(DrafterName) if name != "mtp" or engine.draft.header.is_part]


# ---- only recordings ----


def create_speech_app(service: SpeechService, *, metrics: Metrics | None, log: MessageFn) -> FastAPI:
    """Return the application for `service`; `log` takes a line for each failure that is not the client's."""
    app = bare_app("OpenAI's audio API over a local Whisper model.", log)
    add_reports(app, [service.worker], metrics)
    names = ServedNames([service.named])
    add_models(app, names, [_speech_entry(service, names.others(0))])
    add_audio(app, service, log)
    add_page(app)
    return app


# ---- only vectors ----

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


def create_embedding_app(service: EmbeddingService, *, metrics: Metrics | None) -> FastAPI:
    """Return the application for `service`."""
    app = bare_app(
        "OpenAI's embeddings API, Ollama's, and Jina's rerank API, over a local model.", service.log
    )
    model, named = service.worker.embedder.model, service.service
    add_reports(app, [service.worker], metrics)
    entry = _entry(
        named.name,
        model.path,
        aliases=named.names.others(0),
        embeddings=not model.ranks,
        rerank=model.ranks,
        dimensions=None if model.ranks else model.n_outputs,
        n_ctx=named.n_ctx,
        pooling=model.pooling,
        kernels=service.worker.embedder.kernels,
    )

    add_models(app, named.names, [entry])
    answerer = Answerer(service.worker, service.log)
    add_embeddings(app, service, answerer)
    add_ollama_embeddings(app, service, answerer)
    add_tokenizer(app, model, named)
    refuse_routes(app, TEXT_ROUTES, _NO_TEXT)
    return app
