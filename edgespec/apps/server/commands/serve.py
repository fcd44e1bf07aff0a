"""`edgespec serve`: its options, and the server of one model or of several."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.apps.server.ollama_answers import duration_s
from edgespec.apps.server.router.app import KEEP_ALIVE, PresetModel, read_preset
from edgespec.cli.completion import complete_model
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.groups import (
    as_words,
    changed,
    grouped,
    option_group,
    refuse_contradictions,
    refuse_exclusive,
    shown,
)
from edgespec.cli.local_run import RunningServer, announced_server, file_identity, installation
from edgespec.cli.options import (
    OUTPUT,
    TARGET,
    AnyCompute,
    DraftOption,
    ModelArgument,
    ModelChoice,
    ModelFirst,
    PairOption,
    PoolingOption,
    SharedModels,
    StateOptions,
    WattsOption,
    named_drafter,
)
from edgespec.cli.progress import pull_named
from edgespec.decoding.option_table import LARGEST_INT
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, MessageFn, UsageError, silent
from edgespec.llama.choices import SERVED_PREFIXES
from edgespec.models.resolve import locate

if TYPE_CHECKING:
    from fastapi import FastAPI

    from edgespec.apps.server.audio_routes import SpeechService
    from edgespec.apps.server.gate import GateLimits
    from edgespec.apps.server.http_server import Working
    from edgespec.apps.server.metrics import Metrics
    from edgespec.apps.server.request_worker import QueueLimits
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.server.worker import Worker
    from edgespec.engine.engine import Engine
    from edgespec.engine.model_choice import ChosenModels
    from edgespec.platform.metering import Meter

# ---- options ----

KEY_VARIABLE = "EDGESPEC_API_KEY"

NO_TEXT = "none"
"""The target of a server that answers only recordings."""


@option_group("Embeddings (docs/server.md)")
class EmbeddingServing:
    """Whether the server's model embeds or ranks texts."""

    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings", help="Serve an embedding or reranking model: /v1/embeddings or /v1/rerank alone."
        ),
    ] = False
    pooling: PoolingOption = None


@option_group()
class ServeLoading(SharedModels):
    """Models of the server, and its prefix cache."""

    prefix_cache: Annotated[
        int,
        typer.Option(
            metavar="MB",
            min=0,
            max=1 << 20,
            help="Memory that keeps what was read of earlier conversations.",
        ),
    ] = SERVED_PREFIXES >> 20
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Keep the texts in which drafts were rejected, all clients', for `edgespec draft make "
            "--from-history` (docs/drafts.md).",
        ),
    ] = False
    states: StateOptions
    compute: AnyCompute
    vectors: EmbeddingServing


@option_group()
class ServedModels:
    """The models of the server: a pair, as of `ModelFirst`, or several, each in its own process."""

    target: Annotated[list[str] | None, TARGET] = None
    draft: DraftOption = None
    pair: PairOption = None
    model: ModelArgument = None
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Several models at this address, each loaded when it is asked, as with several --model: "
            "a TOML file with a table for each (docs/server.md).",
            show_default="one model",
        ),
    ] = None
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of the model in requests and answers; more of them: other names.",
            show_default="its own",
        ),
    ] = None

    max_models: Annotated[
        int | None,
        typer.Option(min=1, help="Of several models, those loaded at once.", show_default="as many as fit"),
    ] = None

    @property
    def are_several(self) -> bool:
        """Whether several models are served, and not only `one`."""
        return self.models is not None or len(self.target or ()) > 1

    def one(self) -> ModelFirst:
        """Return the choice of the one model."""
        target = self.target[0] if self.target else None
        return ModelFirst(target=target, draft=self.draft, pair=self.pair, model=self.model)


@option_group("Who may ask")
class ListenOptions:
    """Address on which the server listens, and its API key."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; another than this machine's own needs an API key. FILE.sock: a Unix "
            "socket of this user."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8080
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that requests must have.", show_default=f"the variable {KEY_VARIABLE}"
        ),
    ] = None
    unsafe_no_api_key: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-api-key", help="Listen on another address without a key: whoever reaches it may ask."
        ),
    ] = False

    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this site ask, such as http://localhost:3000; *: of all. May be repeated.",
            show_default="none",
        ),
    ] = None
    turns: Annotated[Path | None, typer.Option(hidden=True)] = None
    """The folder of the locks by which servers of one machine take turns at its processors."""


@option_group(OUTPUT)
class ServeOutput:
    """The output of a server: one JSON object when it is ready, a line for each request."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is ready.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each request.")] = False

    @property
    def log(self) -> MessageFn:
        """The function that takes a line for each request: it prints to stderr, or drops it if `quiet`."""
        return silent if self.quiet else err.print


@option_group("Limits")
class RequestLimits:
    """How many requests wait, how large they are, and how long a model thinks."""

    max_queue: Annotated[int, typer.Option(min=0, max=10_000, help="Requests that may wait.")] = 64
    max_body: Annotated[int, typer.Option(metavar="MB", min=1, max=1024, help="Size of a request.")] = 32
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default="the context")
    ] = None
    reasoning_budget: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=-1,
            max=LARGEST_INT,
            help="Tokens of a thought, where a request does not say; 0: no thoughts, -1: no limit.",
        ),
    ] = -1
    max_seconds: Annotated[
        int,
        typer.Option(
            min=1, max=86_400, help="Time that a request may wait, and then that its answer may take."
        ),
    ] = 600


@option_group("Speech (docs/transcribe.md)")
class SpeechServing:
    """The Whisper model of a server, and the limits of recordings."""

    speech: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whisper model that writes down recordings at /v1/audio, such as whisper-base.",
            show_default="none",
            autocompletion=complete_model,
        ),
    ] = None
    speech_draft: Annotated[
        str,
        typer.Option(
            metavar="NAME|auto|none",
            help="Model that drafts for it; auto: earlier text drafts; none: nothing.",
            autocompletion=complete_model,
        ),
    ] = "auto"
    max_audio: Annotated[int, typer.Option(metavar="MB", min=1, max=4096, help="Size of a recording.")] = 100
    max_audio_minutes: Annotated[int, typer.Option(min=1, max=6000, help="Length of a recording.")] = 240


@dataclass(frozen=True)
class ServerOptions:
    """All options of a server but its models."""

    loading: ServeLoading
    address: ListenOptions
    limits: RequestLimits
    speech: SpeechServing
    output: ServeOutput
    assume_watts: float | None


# ---- the command ----

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


@shown(
    "Write",
    "edgespec serve --port 8080 --pair default\n\n"
    "Several models: edgespec serve --model qwen2.5-coder-1.5b-q4_k_m --model smollm2-360m-q8_0",
)
@grouped
def serve_command(
    *,
    models: ServedModels,
    loading: ServeLoading,
    address: ListenOptions,
    limits: RequestLimits,
    speech: SpeechServing,
    output: ServeOutput,
    assume_watts: WattsOption = None,
) -> int:
    """Answer OpenAI's, Anthropic's and Ollama's clients on this machine, and show a page at /."""
    named_drafter(loading.drafter)  # refused before anything else is looked for
    loading.states.room()  # likewise
    options = ServerOptions(loading, address, limits, speech, output, assume_watts)
    if models.are_several:
        _check_extras("httpx", "python_multipart")
        return _serve_several(models, options)
    return _serve_one(models, options)


def _check_extras(*more: str) -> None:
    if missing := [name for name in (*_EXTRA, *more) if importlib.util.find_spec(name) is None]:
        raise EdgespecError(f"edgespec serve needs {missing[0]}: pip install 'edgespec[serve]'")


def _check_options(models: ModelFirst, options: ServerOptions) -> None:
    loading, speech, vectors = options.loading, options.speech.speech, options.loading.vectors
    if vectors.embeddings:
        found = {
            "--draft": models.draft is not None,
            "a pair": models.chosen().pair is not None,
            **dict.fromkeys(_idle_options(loading), True),
            "--speech": speech is not None,
            "--assume-watts": options.assume_watts is not None,
        }
        refuse_contradictions({f"--embeddings and {name}": both for name, both in found.items()})
    elif vectors.pooling:
        raise UsageError("is for vectors; add --embeddings", field="pooling", value=vectors.pooling)
    elif speech is None and models.chosen().target == NO_TEXT:
        raise UsageError("nothing to serve; name a Whisper model with --speech", field="target")


def _idle_options(loading: SharedModels) -> list[str]:
    """Return the given options that have no effect on a model that embeds or ranks."""
    used = ("--embeddings", "--pooling", "--ctx", "--threads", "--kernels")
    return [name for name in (word.partition("=")[0] for word in as_words(loading)) if name not in used]


def _read_key(file: Path | None) -> str | None:
    """Return the API key from `file`, else from the environment; None if there is none. Raises UsageError."""
    if file is None:
        where, text = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if text is None:
            return None
    else:
        where = f"--api-key-file {file}"
        try:
            text = file.read_text("ascii")
        except OSError as error:
            raise UsageError(f"{where}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{where}: a key has only letters, digits and signs of ASCII") from None
    key = text.strip()
    if not key:
        raise UsageError(f"{where}: the key is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{where}: a key is one word of ASCII")
    if file is not None and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        message(f"{file} can be read by other users: chmod 600 {file}")
    return key


@contextmanager
def _listening(
    options: ServerOptions, run_key: str | None = None
) -> Iterator[tuple[socket.socket, GateLimits]]:
    """Bind the address; yield the socket with the limits of the requests accepted there.

    Raises UsageError if other machines could ask without a key and the user did not allow it.
    """
    from edgespec.apps.server.gate import GateLimits, is_loopback, read_origin
    from edgespec.apps.server.http_server import bind

    address = options.address
    key, origins = _read_key(address.api_key_file), tuple(map(read_origin, address.cors or ()))
    with bind(address.host, address.port) as bound:
        loopback = bound.family == socket.AF_UNIX or is_loopback(bound.getsockname()[0])
        if not loopback and key is None and not address.unsafe_no_api_key:
            raise UsageError(
                f"--host {address.host} can be reached from other machines: give an API key with "
                f"--api-key-file or {KEY_VARIABLE}, or --unsafe-no-api-key"
            )
        accepted = GateLimits(
            max_body=options.limits.max_body << 20,
            max_audio=options.speech.max_audio << 20,
            api_key=key,
            run_key=run_key,
            loopback=loopback,
            origins=origins,
        )
        yield bound, accepted


def _address_of(bound: socket.socket) -> str:
    """Return the URL of a server on this socket."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(lines: list[str], facts: dict[str, Any], options: ServerOptions) -> None:
    """Print the server's address, in lines or as an object."""
    if options.output.json:
        sys.stdout.write(json_text.dumps(facts) + "\n")
    else:
        for line in lines:
            out.print(line)
    sys.stdout.flush()


# ---- one model ----


def _serve_one(models: ServedModels, options: ServerOptions) -> int:
    if models.max_models is not None:
        raise UsageError("is for several models", field="max_models", value=models.max_models)
    _check_options(models.one(), options)
    _check_extras(*(["python_multipart"] if options.speech.speech else []))
    from edgespec.apps.server.gate import Gate
    from edgespec.apps.server.http_server import noting_requests, serve
    from edgespec.apps.server.metrics import Metrics
    from edgespec.platform.metering import choose_meter

    run_key = secrets.token_urlsafe()
    with _listening(options, run_key) as (bound, accepted), ExitStack() as stack:
        meter = choose_meter(assume_watts=options.assume_watts, on_message=message)
        metrics, address = Metrics(energy=meter.available), _address_of(bound)
        load = _load_vectors if options.loading.vectors.embeddings else _load
        served = load(stack, models, options, meter, metrics)
        found = _announced(served.engine, options.loading, address, run_key)

        def announce() -> None:
            stack.enter_context(found)
            first, *rest = served.lines
            lines = [f"{first} at {address} (Ctrl-C ends it)", *rest]
            _announce(lines, {"address": address, **served.facts}, options)

        hurried = serve(
            noting_requests(Gate(served.app, accepted), options.output.log, metrics.count_request),
            served.workers,
            bound,
            max_queue=options.limits.max_queue,
            on_ready=announce,
            on_message=message,
        )
    return INTERRUPTED if hurried else 0


@dataclass
class _Served:
    """A loaded model: the application, its workers, and what is printed when it is ready."""

    app: FastAPI
    workers: list[Working]
    lines: list[str]
    parallel: int = 1
    target: str | None = None
    draft: str | None = None
    speech: str | None = None
    embeddings: str | None = None
    engine: Engine | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The object of --json."""
        names = ("target", "draft", "speech", "embeddings", "parallel")
        facts = {name: getattr(self, name) for name in names}
        if self.engine:
            held = self.engine.capacity
            facts |= {"cache_tokens": held.n_cells, "cache_bytes": held.n_bytes}
        return facts


def _limits(options: ServerOptions) -> QueueLimits:
    from edgespec.platform.turns import SharedTurns, Turns

    turns = SharedTurns(options.address.turns) if options.address.turns else Turns()
    limits = options.limits
    return {"max_queue": limits.max_queue, "max_seconds": limits.max_seconds, "turns": turns}


def _load_vectors(
    stack: ExitStack, models: ServedModels, options: ServerOptions, _meter: Meter, metrics: Metrics
) -> _Served:
    """Load a model that embeds or ranks. Raises UsageError if none is named."""
    target, loading = models.one().chosen().target, options.loading
    if target is None:
        raise UsageError("--embeddings needs a model: edgespec serve MODEL --embeddings")
    from edgespec.apps.embed.embedder import Embedder
    from edgespec.apps.server.api import create_embedding_app
    from edgespec.apps.server.embedding_routes import EmbeddingService, EmbeddingWorker
    from edgespec.apps.server.names import NamedModel, plain_name
    from edgespec.apps.server.request_reader import Service
    from edgespec.platform.processes import Cancellation

    pull_named(target)
    cancellation = stack.enter_context(Cancellation())
    with err.status("loading the model"):
        embedder = Embedder(
            target,
            pooling=loading.vectors.pooling,
            n_ctx=min(filter(None, (loading.ctx, options.limits.max_prompt)), default=None),
            n_threads=loading.compute.threads,
            kernels=loading.compute.kernels,
            interrupt=cancellation.interrupt,
        )
    stack.enter_context(embedder)
    worker = EmbeddingWorker(embedder, cancellation, **_limits(options))
    metrics.watch(worker, "vectors")
    named = NamedModel.of(embedder.model, [*(models.alias or ()), plain_name(target)])
    service = EmbeddingService(Service(named, embedder.n_ctx), worker, message)
    app = create_embedding_app(service, metrics=metrics)
    return _Served(app, [worker], [str(service)], worker.parallel, embeddings=named.name)


def _load(
    stack: ExitStack, models: ServedModels, options: ServerOptions, meter: Meter, metrics: Metrics
) -> _Served:
    """Pull what is missing, and load a pair, a Whisper model, or both."""
    from edgespec.apps.server.api import create_app, create_speech_app
    from edgespec.apps.server.request_reader import Service

    loading, limits = options.loading, _limits(options)
    chosen, names, pair = models.one().chosen(), models.alias or [], None
    if chosen.target != NO_TEXT:
        drafter = named_drafter(loading.drafter)
        pair = chosen.choose(drafter, loading.compute, chat_template=loading.chat_template)
    if options.speech.speech is not None:
        from edgespec.apps.speech.speech_model import pull_speech

        pull_speech(options.speech.speech, options.speech.speech_draft)
    pull_named(*(pair or ()))
    measured = stack.enter_context(meter) if meter.available else None
    if pair is None:
        speech = _load_speech(stack, options, measured, limits, names, metrics)
        line = f"writing down recordings with {speech.name}"
        app = create_speech_app(speech, metrics=metrics, log=message)
        return _Served(app, [speech.worker], [line], speech=speech.name)
    engine, worker = _load_engine(stack, pair, options, measured, limits)
    metrics.watch(worker)
    service = Service.of(
        engine,
        n_ctx=loading.ctx,
        max_prompt=options.limits.max_prompt,
        names=names,
        reasoning_budget=options.limits.reasoning_budget,
    )
    drafted = f", drafted by {engine.draft_name}" if engine.draft_name else ""
    speech_service: SpeechService | None = None
    lines = [f"serving {engine.target_name}{drafted}", str(engine.capacity)]
    if options.speech.speech is not None:
        speech_service = _load_speech(stack, options, measured, limits, [], metrics)
        speech_service = replace(speech_service, aliases=(speech_service.name, *names) if names else ())
        lines.append(f"writing down recordings with {speech_service.name}")
    app = create_app(
        engine,
        worker,
        metrics=metrics,
        service=service,
        speech=speech_service,
        is_routed=options.address.turns is not None,
        log=message,
    )
    return _Served(
        app,
        [worker, *([speech_service.worker] if speech_service else [])],
        lines,
        engine.capacity.parallel,
        engine.target_name,
        engine.draft_name,
        speech_service.name if speech_service else None,
        engine=engine,
    )


def _load_engine(
    stack: ExitStack, pair: ChosenModels, options: ServerOptions, meter: Meter | None, limits: QueueLimits
) -> tuple[Engine, Worker]:
    from edgespec.apps.server.worker import Worker
    from edgespec.platform.processes import Cancellation

    loading, cancellation = options.loading, stack.enter_context(Cancellation())
    engine = loading.compute.load_engine(
        EngineOptions(
            pair,
            drafter=loading.drafter,
            n_ctx=loading.ctx,
            meter=meter,
            signals=cancellation,
            prefix_cache=loading.prefix_cache << 20,
            parallel=loading.parallel,
            chat_template=loading.chat_template,
            states=loading.states.room(),
            learn=loading.learn,
        )
    )
    return stack.enter_context(engine), Worker(engine, cancellation, **limits)


def _load_speech(
    stack: ExitStack,
    options: ServerOptions,
    meter: Meter | None,
    limits: QueueLimits,
    names: list[str],
    metrics: Metrics,
) -> SpeechService:
    """Load the Whisper model; `names` replace its own: answers use the first, requests may use any."""
    from edgespec.apps.server.audio_routes import SpeechService, SpeechWorker
    from edgespec.apps.server.names import plain_name
    from edgespec.apps.speech.speech_model import speech_ref
    from edgespec.apps.speech.transcriber import open_transcriber

    speech, compute = options.speech, options.loading.compute
    name = speech.speech or ""
    opening = open_transcriber(
        name, draft=speech.speech_draft, n_threads=compute.threads, kernels=compute.kernels != "off"
    )
    transcriber = stack.enter_context(opening)
    worker = SpeechWorker(transcriber, meter=meter, **limits)
    metrics.watch(worker, "speech")
    own = plain_name(speech_ref(name))
    aliases = (own, *names) if names else ()
    return SpeechService(names[0] if names else own, worker, 60.0 * speech.max_audio_minutes, aliases)


def _announced(
    engine: Engine | None, loading: ServeLoading, address: str, key: str
) -> AbstractContextManager[None]:
    """Let `edgespec run` find the server inside the block."""
    if engine is None or engine.adapters or not address.startswith("http"):
        return nullcontext()
    from edgespec.apps.server.api import drafters_of
    from edgespec.llama.gguf_header import tokenizer_fingerprint

    server = RunningServer(
        edgespec=installation(),
        address=address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"),
        key=key,
        target=file_identity(engine.target.path),
        draft=file_identity(engine.draft.path) if engine.draft else None,
        drafters=tuple(drafters_of(engine)),
        tokenizer=tokenizer_fingerprint(engine.target.header),
        n_ctx_train=engine.target.n_ctx_train,
        loading=loading.compute.for_text(loading.chat_template),
        keeps_texts=loading.learn or loading.states.state_dir is not None,
    )
    return announced_server(server)


# ---- several models ----


_LARGEST_BODY = 1024
"""MB, for a model's own server: what may come was checked, and stored conversations come with it."""


def _own_options(table: PresetModel, options: ServerOptions, where: str) -> ServerOptions:
    """Return the options of a model's own server: those of its table override those of the command line.

    Raises UsageError for those that contradict each other.
    """
    loading, given = options.loading, table.given
    if given.get("embeddings"):
        idle = [*_idle_options(loading), *(["--assume-watts"] if options.assume_watts is not None else [])]
        if idle:
            message(f"{where}: {', '.join(idle)} of the command line: nothing for embeddings")
        compute = AnyCompute(threads=loading.compute.threads, kernels=loading.compute.kernels)
        vectors, options = EmbeddingServing(), replace(options, assume_watts=None)
        loading = ServeLoading(ctx=loading.ctx, states=StateOptions(), compute=compute, vectors=vectors)
    own = replace(
        options,
        loading=changed(loading, given),
        limits=replace(changed(options.limits, given), max_body=_LARGEST_BODY),
        speech=changed(replace(options.speech, speech=None), given),
    )
    named_drafter(own.loading.drafter)
    own.loading.states.room()
    refuse_exclusive({"drafter": own.loading.drafter, "draft": table.draft})
    _check_options(ModelFirst(target=table.target, draft=table.draft, pair=table.pair), own)
    return own


def _words(options: ServerOptions) -> Iterator[str]:
    """Yield the options of a model's own server, without its models."""
    for group in (options.loading, options.limits, options.speech):
        yield from as_words(group)
    if options.assume_watts is not None:
        yield f"--assume-watts={options.assume_watts}"
    if options.output.quiet:
        yield "--quiet"


def _serve_several(models: ServedModels, options: ServerOptions) -> int:
    """Serve several models at one address; return the exit code."""
    from edgespec.apps.server.gate import Gate
    from edgespec.apps.server.http_server import noting_requests, serve
    from edgespec.apps.server.router.app import create_router
    from edgespec.apps.server.router.pool import Pool
    from edgespec.platform.machine import available_bytes

    refuse_contradictions(
        {
            "--models and a model": models.models is not None
            and bool(models.target or models.model or models.pair or options.speech.speech),
            "several models and --draft, --pair or MODEL": bool(models.draft or models.pair or models.model),
            "several models and --alias": bool(models.alias),
        }
    )
    tables, where = _tables(models, options.speech)
    with _listening(options) as (bound, accepted):
        folder = Path(tempfile.mkdtemp(prefix="edgespec-models-"))  # which only this user reaches
        try:
            specs = [_spec(name, table, folder, options, where) for name, table in tables.items()]
            kept, most = sum(spec.keep for spec in specs), models.max_models
            if most is not None and most < kept + (kept < len(specs)):
                why = f"{kept} of the {len(specs)} models stay loaded (keep): allow more, or keep fewer"
                raise UsageError(why, field="max_models", value=most)
            pull_named(*(name for spec in specs for name in spec.models))
            pool = Pool(
                [spec.with_facts() for spec in specs],
                folder,
                err.print,
                max_models=models.max_models,
                room=available_bytes(),
                max_queue=options.limits.max_queue,
                max_seconds=options.limits.max_seconds,
            )
            names, address = [spec.named.name for spec in specs], _address_of(bound)
            line = f"serving {', '.join(names)} at {address}, each when it is asked (Ctrl-C ends it)"
            gate = Gate(create_router(pool, message), accepted)
            hurried = serve(
                noting_requests(gate, options.output.log),
                [pool],
                bound,
                max_queue=options.limits.max_queue,
                on_ready=lambda: _announce([line], {"address": address, "models": names}, options),
                on_message=message,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return INTERRUPTED if hurried else 0


def _tables(models: ServedModels, speech: SpeechServing) -> tuple[dict[str, PresetModel], str]:
    """Return the models by name, and where each was named. Raises UsageError."""
    from edgespec.apps.server.names import NamedModel, ServedNames, plain_name
    from edgespec.apps.speech.speech_model import speech_ref

    if models.models is not None:
        where = str(models.models)
        tables = read_preset(models.models, (ServeLoading, RequestLimits, SpeechServing))
    else:
        where = "--model"
        named = [(plain_name(one), PresetModel(target=one)) for one in models.target or ()]
        if speech.speech is not None:
            table = PresetModel(given={"speech": speech.speech})
            named.append((plain_name(speech_ref(speech.speech)), table))
        ServedNames([NamedModel(name) for name, _ in named]).check(where)
        tables = dict(named)
    ServedNames([NamedModel(name, table.aliases) for name, table in tables.items()]).check(where)
    return tables, where


def _spec(name: str, table: PresetModel, turns: Path, options: ServerOptions, where: str) -> ModelSpec:
    """Return how a model is started; `turns`: the folder of `--turns`. Raises UsageError for wrong files."""
    from edgespec.apps.server.names import ModelKind, NamedModel
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.speech.speech_model import speech_ref

    target = draft = speech = None
    here = name if where == "--model" else f"{where}: models.{name}"
    try:
        own = _own_options(table, options, here)
        loading, speech_name = own.loading, own.speech.speech
        if loading.vectors.embeddings:
            target = table.target or name
        elif speech_name is None or table.target or table.pair:
            choice = ModelChoice(target=table.target, draft=table.draft, pair=table.pair)
            if not (table.target or table.pair):
                choice = choice.with_model(name)
            drafter = named_drafter(loading.drafter)
            chosen = choice.choose(drafter, loading.compute, chat_template=loading.chat_template)
            target, draft = (ref.name if ref else None for ref in chosen)
        if speech_name is not None:
            speech = speech_ref(speech_name)
            locate(speech)
    except EdgespecError as error:
        kind = UsageError if isinstance(error, UsageError) else EdgespecError
        raise kind(str(error) if where == "--model" else f"{here}: {error}") from None
    words = [f"--target={target or 'none'}", *([f"--draft={draft}"] if draft else []), f"--turns={turns}"]
    aliases = [f"--alias={one}" for one in (name, *table.aliases)]
    kinds: set[ModelKind] = {"speech"} if speech else set()
    if target:
        kinds.add("vectors" if loading.vectors.embeddings else "text")
    return ModelSpec(
        NamedModel(name, table.aliases, frozenset(kinds)),
        options=(*words, *aliases, *_words(own)),
        models=tuple(filter(None, (target, draft, speech))),
        keep=table.keep,
        keep_alive_s=duration_s(KEEP_ALIVE if table.keep_alive is None else table.keep_alive),
        parallel=loading.parallel or 16,
    )
