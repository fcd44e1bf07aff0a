"""`edgespec serve`: OpenAI's API over one pair of models."""

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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from edgespec.apps.server.commands.embedding_serving import EmbeddingServing, idle_options
from edgespec.apps.server.router.preset import (
    KEEP_ALIVE,
    PresetModel,
    duration_s,
    read_preset,
)
from edgespec.cli.completion import complete_model
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.groups import as_words, changed, grouped, option_group, shown
from edgespec.cli.local_run import RunningServer, announced_server, file_identity, installation
from edgespec.cli.options import (
    OUTPUT,
    TARGET,
    Compute,
    ComputeOnNodes,
    DraftOption,
    ModelArgument,
    ModelChoice,
    ModelFirst,
    PairOption,
    SharedModels,
    StateOptions,
    WattsOption,
    named_drafter,
    refuse_contradictions,
)
from edgespec.cli.progress import pull_named
from edgespec.decoding.option_table import LARGEST_INT
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.choices import SERVED_PREFIXES
from edgespec.models.resolve import locate

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from edgespec.apps.server.audio_routes import SpeechService
    from edgespec.apps.server.embedding_routes import EmbeddingService
    from edgespec.apps.server.gate import GateLimits
    from edgespec.apps.server.metrics import Metrics
    from edgespec.apps.server.request_reader import Service
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.server.worker import Worker
    from edgespec.engine.engine import Engine
    from edgespec.engine.model_choice import ChosenModels
    from edgespec.platform.metering import Meter
    from edgespec.platform.signals import Cancellation
    from edgespec.platform.turns import Turns


# ---- options of `edgespec serve`, in groups ----


KEY_VARIABLE = "EDGESPEC_API_KEY"

NO_TEXT = "none"
"""The target of a server that answers recordings alone."""

_ADDRESS = "Who may ask"
_LIMITS = "Limits"
_SPEECH = "Speech (docs/transcribe.md)"


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
    compute: ComputeOnNodes
    vectors: EmbeddingServing

    def load(self, names: ChosenModels, meter: Meter | None, signals: Cancellation) -> Engine:
        """Return the engine of a target and a draft."""
        return self.compute.load_engine(
            names,
            drafter=self.drafter,
            n_ctx=self.ctx,
            meter=meter,
            signals=signals,
            prefix_cache=self.prefix_cache << 20,
            parallel=self.parallel,
            chat_template=self.chat_template,
            states=self.states.room(),
            learn=self.learn,
        )


@option_group()
class ServedModels:
    """The models of the server: a pair, as of `ModelFirst`, or several, each in a process of its own."""

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

    @property
    def are_several(self) -> bool:
        """Whether `one` is not all of it."""
        return self.models is not None or len(self.target or ()) > 1

    def one(self) -> ModelFirst:
        """Return the choice of the one model."""
        target = self.target[0] if self.target else None
        return ModelFirst(target=target, draft=self.draft, pair=self.pair, model=self.model)


@option_group(_ADDRESS)
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

    def origins(self) -> tuple[str, ...]:
        """Return the sites whose pages may ask. Raises UsageError."""
        from edgespec.apps.server.gate import read_origin

        return tuple(map(read_origin, self.cors or ()))

    def check_reach(self, *, loopback: bool, key: str | None) -> None:
        """Raise UsageError if other machines could ask without a key and the user did not allow it."""
        if not loopback and key is None and not self.unsafe_no_api_key:
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give an API key with "
                f"--api-key-file or {KEY_VARIABLE}, or --unsafe-no-api-key"
            )


@option_group(OUTPUT)
class ServeOutput:
    """What a server prints: one JSON object when it is ready, a line for each request."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is ready.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each request.")] = False

    def logged(self, app: ASGIApp) -> ASGIApp:
        """Return `app`, which prints a line for each request to stderr unless `quiet`."""
        from edgespec.apps.server.http_server import logging_requests

        return app if self.quiet else logging_requests(app, err.print)


@option_group(_LIMITS)
class RequestLimits:
    """How many requests wait, how large they are, and how long a model thinks."""

    max_queue: Annotated[int, typer.Option(min=0, max=10_000, help="Requests that may wait.")] = 64
    max_body: Annotated[int, typer.Option(metavar="MB", min=1, max=1024, help="Size of a request.")] = 4
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

    def service(self, engine: Engine, n_ctx: int | None, names: Sequence[str]) -> Service:
        """The service of `engine`, called `names`, within these limits, and `n_ctx` tokens in all."""
        from edgespec.apps.server.request_reader import Service

        return Service.of(
            engine,
            n_ctx=n_ctx,
            max_prompt=self.max_prompt,
            names=names,
            reasoning_budget=self.reasoning_budget,
        )

    def worker(self, engine: Engine, cancellation: Cancellation, turns: Turns) -> Worker:
        """Return the worker of `engine` within these limits."""
        from edgespec.apps.server.worker import Worker

        return Worker(
            engine, cancellation, max_queue=self.max_queue, max_seconds=self.max_seconds, turns=turns
        )


@option_group(_SPEECH)
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
            help="Model that drafts for it; auto: text heard before alone; none: nothing.",
            autocompletion=complete_model,
        ),
    ] = "auto"
    max_audio: Annotated[int, typer.Option(metavar="MB", min=1, max=4096, help="Size of a recording.")] = 100
    max_audio_minutes: Annotated[int, typer.Option(min=1, max=6000, help="Length of a recording.")] = 240

    @contextmanager
    def open(
        self, limits: RequestLimits, compute: Compute, meter: Meter | None, turns: Turns
    ) -> Iterator[SpeechService | None]:
        """Load the model, which takes its `turns` with what else computes; None without one."""
        if self.speech is None:
            yield None
            return
        from edgespec.apps.server.audio_routes import SpeechService, SpeechWorker
        from edgespec.apps.server.names import plain_name
        from edgespec.apps.speech.opening import open_transcriber
        from edgespec.apps.speech.speech_model import speech_ref

        with open_transcriber(
            self.speech,
            draft=self.speech_draft,
            n_threads=compute.threads,
            kernels=compute.kernels != "off",
        ) as transcriber:
            speech = SpeechWorker(
                transcriber,
                turns=turns,
                max_queue=limits.max_queue,
                max_seconds=limits.max_seconds,
                meter=meter,
            )
            yield SpeechService(plain_name(speech_ref(self.speech)), speech, 60.0 * self.max_audio_minutes)

    def check(self, target: str | None) -> None:
        """Raise UsageError if there is nothing to serve."""
        if target == NO_TEXT and self.speech is None:
            raise UsageError("nothing to serve; name a Whisper model with --speech", field="target")

    def pull(self) -> None:
        """Get models that are not here."""
        if self.speech is not None:
            from edgespec.apps.speech.speech_model import pull_speech

            pull_speech(self.speech, self.speech_draft)


@dataclass(frozen=True)
class ServerOptions:
    """All options of a server but its models."""

    loading: ServeLoading
    address: ListenOptions
    limits: RequestLimits
    speech: SpeechServing
    output: ServeOutput
    assume_watts: float | None


# ---- serve ----


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
        _check_extras(takes_forms=True)
        return _serve_several(models, options)
    return _serve_one(models, options)


def _serve_one(models: ServedModels, options: ServerOptions) -> int:
    loading, address, limits, speech = options.loading, options.address, options.limits, options.speech
    chosen, output = models.one(), options.output
    _check_options(chosen, options)
    _check_extras(takes_forms=speech.speech is not None)
    from edgespec.apps.server.gate import Gate
    from edgespec.apps.server.http_server import Working, bind, serve
    from edgespec.apps.server.metrics import Metrics
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.turns import SharedTurns, Turns

    run_key = secrets.token_urlsafe()
    access = _Access.read(address)
    with bind(address.host, address.port) as bound, ExitStack() as stack:
        accepted = access.limits(options, bound, run_key)
        meter = choose_meter(assume_watts=options.assume_watts, on_message=message)
        names = None if loading.vectors.embeddings else _pull(chosen.chosen(), loading, speech)
        measured = stack.enter_context(meter) if meter.available else None
        metrics = Metrics(energy=meter.available)
        turns = SharedTurns(address.turns) if address.turns else Turns()
        engine = worker = None
        if names:
            engine, worker = _load(stack, loading, limits, names, (measured, turns))
            metrics.watch(worker)
        heard = stack.enter_context(speech.open(limits, loading.compute, measured, turns))
        if heard and models.alias:
            told = heard.name if names else models.alias[0]
            heard = replace(heard, name=told, aliases=(heard.name, *models.alias))
        if heard:
            metrics.watch_speech(heard.worker)
        opening = loading.vectors.open(
            chosen.chosen().target, loading, limits, turns, names=models.alias or ()
        )
        embedded = stack.enter_context(opening)
        if embedded:
            metrics.watch_embeddings(embedded.worker)
        service = limits.service(engine, loading.ctx, models.alias or ()) if engine else None
        hearing, embedding = heard.worker if heard else None, embedded.worker if embedded else None
        working: tuple[Working | None, ...] = (worker, hearing, embedding)
        written = (engine, worker, service) if engine and worker and service else None
        app = _application(written, heard, embedded, metrics, is_routed=address.turns is not None)
        found = _announced(engine, loading, address_of(bound), run_key)

        hurried = serve(
            output.logged(metrics.counting(Gate(app, accepted))),
            [one for one in working if one],
            bound,
            max_queue=limits.max_queue,
            on_ready=lambda: _announce(
                address_of(bound), engine, heard, embedded, (stack, found), json=output.json
            ),
            on_message=message,
        )
    return INTERRUPTED if hurried else 0


class _Access(NamedTuple):
    """Who may ask: those with the key, and pages of these sites."""

    key: str | None
    origins: tuple[str, ...]

    @classmethod
    def read(cls, address: ListenOptions) -> _Access:
        """Read what the options say. Raises UsageError."""
        return cls(read_key(address.api_key_file), address.origins())

    def limits(self, options: ServerOptions, bound: socket.socket, run_key: str | None = None) -> GateLimits:
        """The requests that a server on this socket accepts. Raises UsageError if others need no key."""
        from edgespec.apps.server.gate import GateLimits, is_loopback

        loopback = bound.family == socket.AF_UNIX or is_loopback(bound.getsockname()[0])
        options.address.check_reach(loopback=loopback, key=self.key)
        return GateLimits(
            max_body=options.limits.max_body << 20,
            max_audio=options.speech.max_audio << 20,
            api_key=self.key,
            run_key=run_key,
            loopback=loopback,
            origins=self.origins,
        )


def _check_options(models: ModelFirst, options: ServerOptions) -> None:
    loading, speech = options.loading, options.speech
    vectors = loading.vectors
    if vectors.embeddings:
        others = {"speech": speech.speech, "assume-watts": options.assume_watts}
        refuse_contradictions(vectors.contradictions(models, loading, **others))
    else:
        vectors.check()
        speech.check(models.chosen().target)


def _application(
    written: tuple[Engine, Worker, Service] | None,
    heard: SpeechService | None,
    embedded: EmbeddingService | None,
    metrics: Metrics,
    *,
    is_routed: bool,
) -> FastAPI:
    """Return the application for what the server does."""
    from edgespec.apps.server.api import create_app, create_embedding_app, create_speech_app

    if embedded:
        return create_embedding_app(embedded, metrics=metrics)
    if written:
        engine, worker, service = written
        return create_app(
            engine,
            worker,
            metrics=metrics,
            service=service,
            speech=heard,
            is_routed=is_routed,
            log=message,
        )
    assert heard  # noqa: S101 - `SpeechServing.check` made sure, for the type checker
    return create_speech_app(heard, metrics=metrics, log=message)


def _pull(models: ModelChoice, loading: ServeLoading, speech: SpeechServing) -> ChosenModels | None:
    """Pull all models that are not here; return the target and its draft, None if none is wanted."""
    names = None
    if models.target != NO_TEXT:
        drafter = named_drafter(loading.drafter)
        names = models.choose(drafter, loading.compute, chat_template=loading.chat_template)
    speech.pull()
    pull_named(*(names or ()))
    return names


def _load(
    stack: ExitStack,
    loading: ServeLoading,
    limits: RequestLimits,
    names: ChosenModels,
    shared: tuple[Meter | None, Turns],
) -> tuple[Engine, Worker]:
    """Load the engine and return it with its worker; `shared` with what transcribes."""
    from edgespec.platform.signals import Cancellation

    meter, turns = shared
    cancellation = stack.enter_context(Cancellation())
    engine = stack.enter_context(loading.load(names, meter, cancellation))
    return engine, limits.worker(engine, cancellation, turns)


def _announced(
    engine: Engine | None, loading: ServeLoading, address: str, key: str
) -> AbstractContextManager[None]:
    """Let `edgespec run` find the server inside the block."""
    if engine is None or not address.startswith("http"):
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
        tokenizer=tokenizer_fingerprint(engine.target),
        n_ctx_train=engine.target.n_ctx_train,
        loading=loading.compute.for_text(loading.chat_template),
        keeps_texts=loading.learn or loading.states.state_dir is not None,
    )
    return announced_server(server)


def _check_extras(*, takes_forms: bool) -> None:
    needed = (*_EXTRA, "python_multipart") if takes_forms else _EXTRA
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise EdgespecError(f"edgespec serve needs {missing[0]}: pip install 'edgespec[serve]'")


def read_key(file: Path | None) -> str | None:
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


def address_of(bound: socket.socket) -> str:
    """Return the URL of a server on this socket."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(
    address: str,
    engine: Engine | None,
    speech: SpeechService | None,
    embedded: EmbeddingService | None,
    announced: tuple[ExitStack, AbstractContextManager[None]],
    *,
    json: bool,
) -> None:
    stack, found = announced
    stack.enter_context(found)
    held = engine.capacity if engine else None
    if json:
        facts = {
            "address": address,
            "target": engine.target_name if engine else None,
            "draft": engine.draft_name if engine else None,
            "speech": speech.name if speech else None,
            "embeddings": embedded.service.name if embedded else None,
            "parallel": held.parallel if held else embedded.worker.parallel if embedded else 1,
        }
        if held:
            facts |= {"cache_tokens": held.n_cells, "cache_bytes": held.n_bytes}
        sys.stdout.write(json_text.dumps(facts) + "\n")
    elif engine:
        draft = f", drafted by {engine.draft_name}" if engine.draft_name else ""
        out.print(f"serving {engine.target_name}{draft} at {address} (Ctrl-C ends it)")
        out.print(str(held))
        if speech:
            out.print(f"writing down recordings with {speech.name}")
    elif speech:
        out.print(f"writing down recordings with {speech.name} at {address} (Ctrl-C ends it)")
    elif embedded:
        out.print(f"{embedded} at {address} (Ctrl-C ends it)")
    sys.stdout.flush()


# ---- several models ----


_LARGEST_BODY = 1024
"""MB, for a model's own server: what may come was checked, and stored conversations come with it."""


def _own_options(table: PresetModel, options: ServerOptions, where: str) -> ServerOptions:
    """Return the options of a model's own server: a table's stand before those of the command line.

    Raises UsageError for those that contradict each other.
    """
    loading, given = options.loading, table.given
    if given.get("embeddings"):
        idle = [*idle_options(loading), *(["--assume-watts"] if options.assume_watts is not None else [])]
        if idle:
            message(f"{where}: {', '.join(idle)} of the command line: nothing for embeddings")
        compute = ComputeOnNodes(threads=loading.compute.threads, kernels=loading.compute.kernels)
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
    _check_options(ModelFirst(target=table.target, draft=table.draft, pair=table.pair), own)
    return own


def _words(options: ServerOptions) -> Iterator[str]:
    """Yield the options of a model's own server, but for its models."""
    for group in (options.loading, options.limits, options.speech):
        yield from as_words(group)
    if options.assume_watts is not None:
        yield f"--assume-watts={options.assume_watts}"
    if options.output.quiet:
        yield "--quiet"


def _serve_several(models: ServedModels, options: ServerOptions) -> int:
    """Serve several models at one address; return the exit code."""
    from edgespec.apps.server.gate import Gate
    from edgespec.apps.server.http_server import bind, serve
    from edgespec.apps.server.router.app import create_router
    from edgespec.apps.server.router.pool import Pool

    refuse_contradictions(
        {
            "--models and a model": models.models is not None
            and bool(models.target or models.model or models.pair or options.speech.speech),
            "several models and --draft, --pair or MODEL": bool(models.draft or models.pair or models.model),
            "several models and --alias": bool(models.alias),
        }
    )
    tables, where = _tables(models, options.speech)
    access = _Access.read(options.address)
    with bind(options.address.host, options.address.port) as bound:
        accepted = access.limits(options, bound)
        folder = Path(tempfile.mkdtemp(prefix="edgespec-models-"))  # which only this user reaches
        try:
            specs = [_spec(name, table, folder, options, where) for name, table in tables.items()]
            for files in (spec.files for spec in specs):
                pull_named(files.target, files.draft, files.speech)
            limits = options.limits
            pool = Pool(specs, folder, err.print, max_queue=limits.max_queue, max_seconds=limits.max_seconds)
            gate = Gate(create_router(pool, message), accepted)
            hurried = serve(
                options.output.logged(gate),
                [pool],
                bound,
                max_queue=limits.max_queue,
                on_ready=lambda: _announce_several(address_of(bound), specs, json_wanted=options.output.json),
                on_message=message,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return INTERRUPTED if hurried else 0


def _tables(models: ServedModels, speech: SpeechServing) -> tuple[dict[str, PresetModel], str]:
    """Return the models by name, and where they were named. Raises UsageError."""
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
    from edgespec.apps.server.router.model_facts import ModelNames
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.speech.speech_model import speech_ref

    target = draft = speech = None
    here = name if where == "--model" else f"{where}: models.{name}"
    try:
        own = _own_options(table, options, here)
        loading, heard = own.loading, own.speech.speech
        if loading.vectors.embeddings:
            target = table.target or name
        elif heard is None or table.target or table.pair:
            choice = ModelChoice(target=table.target, draft=table.draft, pair=table.pair)
            if not (table.target or table.pair):
                choice = choice.with_model(name)
            drafter = named_drafter(loading.drafter)
            chosen = choice.choose(drafter, loading.compute, chat_template=loading.chat_template)
            target, draft = (ref.name if ref else None for ref in chosen)
        if heard is not None:
            speech = speech_ref(heard)
            locate(speech)
    except EdgespecError as error:
        kind = UsageError if isinstance(error, UsageError) else EdgespecError
        raise kind(str(error) if where == "--model" else f"{here}: {error}") from None
    words = [f"--target={target or 'none'}", *([f"--draft={draft}"] if draft else []), f"--turns={turns}"]
    aliases = [f"--alias={one}" for one in (name, *table.aliases)]
    return ModelSpec(
        files=ModelNames(name, target, draft, speech, loading.ctx),
        options=(*words, *aliases, *_words(own)),
        aliases=table.aliases,
        keep=table.keep,
        keep_alive_s=duration_s(KEEP_ALIVE if table.keep_alive is None else table.keep_alive),
        parallel=loading.parallel or 16,
        embeddings=loading.vectors.embeddings,
    )


def _announce_several(address: str, specs: list[ModelSpec], *, json_wanted: bool) -> None:
    names = [spec.name for spec in specs]
    if json_wanted:
        sys.stdout.write(json_text.dumps({"address": address, "models": names}) + "\n")
    else:
        out.print(f"serving {', '.join(names)} at {address}, each when it is asked (Ctrl-C ends it)")
    sys.stdout.flush()
