"""`edgespec serve`: OpenAI's API over one pair of models."""

from __future__ import annotations

import importlib.util
import json as json_text
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.server.commands.serve_options import (
    NO_TEXT,
    EmbeddingServing,
    ListenOptions,
    RequestLimits,
    ServedModels,
    ServeLoading,
    ServeOutput,
    ServerOptions,
    SpeechServing,
    idle_options,
)
from edgespec.apps.server.router.preset import (
    KEEP_ALIVE,
    PresetModel,
    duration_s,
    read_preset,
)
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.groups import as_words, changed, grouped, refuse_contradictions, refuse_exclusive, shown
from edgespec.cli.local_run import RunningServer, announced_server, file_identity, installation
from edgespec.cli.options import (
    ComputeOnNodes,
    ModelChoice,
    ModelFirst,
    StateOptions,
    WattsOption,
    named_drafter,
)
from edgespec.cli.progress import pull_named
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.resolve import locate

if TYPE_CHECKING:
    from fastapi import FastAPI

    from edgespec.apps.server.audio_routes import SpeechService
    from edgespec.apps.server.embedding_routes import EmbeddingService
    from edgespec.apps.server.http_server import Working
    from edgespec.apps.server.metrics import Metrics
    from edgespec.apps.server.request_reader import Service
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.server.worker import Worker
    from edgespec.engine.engine import Engine
    from edgespec.platform.metering import Meter


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
        _check_extras("httpx", "python_multipart")
        return _serve_several(models, options)
    return _serve_one(models, options)


def _serve_one(models: ServedModels, options: ServerOptions) -> int:
    loading, output = options.loading, options.output
    if models.max_models is not None:
        raise UsageError("is for several models", field="max_models", value=models.max_models)
    _check_options(models.one(), options)
    _check_extras(*(["python_multipart"] if options.speech.speech else []))
    from edgespec.apps.server.gate import Gate
    from edgespec.apps.server.http_server import noting_requests, serve
    from edgespec.apps.server.metrics import Metrics
    from edgespec.platform.metering import choose_meter

    run_key = secrets.token_urlsafe()
    opening = options.address.open(options.limits, options.speech, run_key)
    with opening as (bound, accepted), ExitStack() as stack:
        meter = choose_meter(assume_watts=options.assume_watts, on_message=message)
        metrics, address = Metrics(energy=meter.available), _address_of(bound)
        served = _load(stack, models, options, meter)
        app = served.application(metrics, is_routed=options.address.turns is not None)
        found = _announced(served.engine, loading, address, run_key)

        def announce() -> None:
            stack.enter_context(found)
            served.announce(address, json=output.json)

        hurried = serve(
            noting_requests(Gate(app, accepted), output.log, metrics.count_request),
            served.workers,
            bound,
            max_queue=options.limits.max_queue,
            on_ready=announce,
            on_message=message,
        )
    return INTERRUPTED if hurried else 0


def _check_options(models: ModelFirst, options: ServerOptions) -> None:
    loading, speech = options.loading, options.speech
    vectors = loading.vectors
    if vectors.embeddings:
        others = {"speech": speech.speech, "assume-watts": options.assume_watts}
        refuse_contradictions(vectors.contradictions(models, loading, **others))
    else:
        vectors.check()
        speech.check(models.chosen().target)


@dataclass
class _Served:
    """What a server of one model answers with."""

    engine: Engine | None = None
    worker: Worker | None = None
    service: Service | None = None
    heard: SpeechService | None = None
    embedded: EmbeddingService | None = None

    @property
    def workers(self) -> list[Working]:
        """The threads that answer."""
        services = (self.heard, self.embedded)
        found = [self.worker, *(service.worker if service else None for service in services)]
        return [worker for worker in found if worker]

    def application(self, metrics: Metrics, *, is_routed: bool) -> FastAPI:
        """Return the application, whose answers `metrics` counts."""
        from edgespec.apps.server.api import create_app, create_embedding_app, create_speech_app

        if self.embedded:
            metrics.watch_embeddings(self.embedded.worker)
            return create_embedding_app(self.embedded, metrics=metrics)
        if self.heard:
            metrics.watch_speech(self.heard.worker)
        if self.engine and self.worker:
            metrics.watch(self.worker)
            return create_app(
                self.engine,
                self.worker,
                metrics=metrics,
                service=self.service,
                speech=self.heard,
                is_routed=is_routed,
                log=message,
            )
        assert self.heard  # noqa: S101 - `SpeechServing.check` made sure, for the type checker
        return create_speech_app(self.heard, metrics=metrics, log=message)

    def announce(self, address: str, *, json: bool) -> None:
        """Say where it is."""
        engine, speech, embedded = self.engine, self.heard, self.embedded
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
        else:
            told = embedded or f"writing down recordings with {speech.name if speech else ''}"
            out.print(f"{told} at {address} (Ctrl-C ends it)")
        sys.stdout.flush()


def _load(stack: ExitStack, models: ServedModels, options: ServerOptions, meter: Meter) -> _Served:
    """Pull what is not here, and load what is served."""
    from edgespec.apps.server.request_reader import Service
    from edgespec.apps.server.worker import Worker
    from edgespec.platform.signals import Cancellation
    from edgespec.platform.turns import SharedTurns, Turns

    loading, limits, speech = options.loading, options.limits, options.speech
    chosen, names = models.one().chosen(), models.alias or ()
    turns = SharedTurns(options.address.turns) if options.address.turns else Turns()
    if loading.vectors.embeddings:
        opening = loading.vectors.open(chosen.target, loading, limits, turns, names=names)
        return _Served(embedded=stack.enter_context(opening))
    pair = None
    if chosen.target != NO_TEXT:
        drafter = named_drafter(loading.drafter)
        pair = chosen.choose(drafter, loading.compute, chat_template=loading.chat_template)
    speech.pull()
    pull_named(*(pair or ()))
    measured = stack.enter_context(meter) if meter.available else None
    served = _Served()
    if pair:
        cancellation = stack.enter_context(Cancellation())
        served.engine = engine = stack.enter_context(loading.load(pair, measured, cancellation))
        served.worker = Worker(
            engine, cancellation, max_queue=limits.max_queue, max_seconds=limits.max_seconds, turns=turns
        )
        served.service = Service.of(
            engine,
            n_ctx=loading.ctx,
            max_prompt=limits.max_prompt,
            names=names,
            reasoning_budget=limits.reasoning_budget,
        )
    heard = stack.enter_context(speech.open(limits, loading.compute, measured, turns))
    if heard and names:
        heard = replace(heard, name=heard.name if pair else names[0], aliases=(heard.name, *names))
    served.heard = heard
    return served


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


def _check_extras(*more: str) -> None:
    if missing := [name for name in (*_EXTRA, *more) if importlib.util.find_spec(name) is None]:
        raise EdgespecError(f"edgespec serve needs {missing[0]}: pip install 'edgespec[serve]'")


def _address_of(bound: socket.socket) -> str:
    """Return the URL of a server on this socket."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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
    refuse_exclusive({"drafter": own.loading.drafter, "draft": table.draft})
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
    from edgespec.apps.server.http_server import noting_requests, serve
    from edgespec.apps.server.router.app import create_router
    from edgespec.apps.server.router.pool import Pool
    from edgespec.platform.memory import available_bytes

    refuse_contradictions(
        {
            "--models and a model": models.models is not None
            and bool(models.target or models.model or models.pair or options.speech.speech),
            "several models and --draft, --pair or MODEL": bool(models.draft or models.pair or models.model),
            "several models and --alias": bool(models.alias),
        }
    )
    tables, where = _tables(models, options.speech)
    with options.address.open(options.limits, options.speech) as (bound, accepted):
        folder = Path(tempfile.mkdtemp(prefix="edgespec-models-"))  # which only this user reaches
        try:
            specs = [_spec(name, table, folder, options, where) for name, table in tables.items()]
            models.check_places(sum(spec.keep for spec in specs), len(specs))
            pull_named(*(name for spec in specs for name in spec.models))
            limits = options.limits
            pool = Pool(
                [spec.with_facts() for spec in specs],
                folder,
                err.print,
                max_models=models.max_models,
                room=available_bytes(),
                max_queue=limits.max_queue,
                max_seconds=limits.max_seconds,
            )
            gate = Gate(create_router(pool, message), accepted)
            hurried = serve(
                noting_requests(gate, options.output.log),
                [pool],
                bound,
                max_queue=limits.max_queue,
                on_ready=lambda: _announce_several(_address_of(bound), specs, json=options.output.json),
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
    from edgespec.apps.server.names import ModelKind, NamedModel
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


def _announce_several(address: str, specs: list[ModelSpec], *, json: bool) -> None:
    names = [spec.named.name for spec in specs]
    if json:
        sys.stdout.write(json_text.dumps({"address": address, "models": names}) + "\n")
    else:
        out.print(f"serving {', '.join(names)} at {address}, each when it is asked (Ctrl-C ends it)")
    sys.stdout.flush()
