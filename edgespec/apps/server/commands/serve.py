"""`edgespec serve`: OpenAI's API over one pair of models."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import secrets
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.local_run import RunningServer, announced_server, file_identity, installation
from edgespec.cli.options import (
    OUTPUT,
    Compute,
    ComputeOnNodes,
    ModelChoice,
    ModelFirst,
    SharedModels,
    WattsOption,
    named_drafter,
    refuse_contradictions,
)
from edgespec.cli.progress import pull_named
from edgespec.errors import EdgespecError, UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgespec.apps.server.audio_routes import SpeechService
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
    ] = 256
    compute: ComputeOnNodes

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
        )


@option_group(_ADDRESS)
class ListenOptions:
    """Address on which the server listens, and its API key."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's own needs an API key.")
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

    def check_reach(self, *, loopback: bool, key: str | None) -> None:
        """Raise UsageError if other machines could ask without a key and the user did not allow it."""
        if not loopback and key is None and not self.unsafe_no_api_key:
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give an API key with "
                f"--api-key-file or {KEY_VARIABLE}, or --unsafe-no-api-key"
            )


@option_group(OUTPUT)
class ServeOutput:
    """Output of a server."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is ready.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each request.")] = False

    def logged(self, app: ASGIApp) -> ASGIApp:
        """Return `app`, which prints a line for each request to stderr unless `quiet`."""
        from edgespec.apps.server.http_server import logging_requests

        return app if self.quiet else logging_requests(app, err.print)


@option_group(_LIMITS)
class RequestLimits:
    """Limits of requests."""

    max_queue: Annotated[int, typer.Option(min=0, max=10_000, help="Requests that may wait.")] = 64
    max_body: Annotated[int, typer.Option(metavar="MB", min=1, max=1024, help="Size of a request.")] = 4
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt.", show_default="the context")
    ] = None
    max_seconds: Annotated[
        int,
        typer.Option(
            min=1, max=86_400, help="Time that a request may wait, and then that its answer may take."
        ),
    ] = 600

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
            help="Model that drafts for it; auto: one here that pays, text heard before; none: nothing.",
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
        from edgespec.apps.server.audio_routes import SpeechService
        from edgespec.apps.server.speech_worker import SpeechWorker
        from edgespec.apps.speech.opening import open_transcriber
        from edgespec.apps.speech.speech_model import speech_ref

        with open_transcriber(
            self.speech,
            draft=self.speech_draft,
            n_threads=compute.threads,
            kernels=compute.kernels != "off",
            on_message=message,
        ) as transcriber:
            speech = SpeechWorker(
                transcriber,
                turns=turns,
                max_queue=limits.max_queue,
                max_seconds=limits.max_seconds,
                meter=meter,
            )
            name = PurePath(speech_ref(self.speech)).name.removesuffix(".gguf")
            yield SpeechService(name, speech, 60.0 * self.max_audio_minutes)

    def check(self, target: str | None) -> None:
        """Raise UsageError if there is nothing to serve."""
        if target == NO_TEXT and self.speech is None:
            raise UsageError("nothing to serve; name a Whisper model with --speech", field="target")

    def pull(self) -> None:
        """Get models that are not here."""
        if self.speech is not None:
            from edgespec.apps.speech.speech_model import pull_speech

            pull_speech(self.speech, self.speech_draft)


# ---- serve ----


_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


@shown("Write", "edgespec serve --port 8080 --pair default")
@grouped
def serve_command(
    *,
    models: ModelFirst,
    loading: ServeLoading,
    address: ListenOptions,
    limits: RequestLimits,
    speech: SpeechServing,
    output: ServeOutput,
    assume_watts: WattsOption = None,
) -> int:
    """Answer OpenAI's and Ollama's clients on this machine: chat and text completions, and a page at /."""
    named_drafter(loading.drafter)  # refused before anything else is looked for
    refuse_contradictions(models.contradictions(loading.drafter))
    speech.check(models.chosen().target)
    _check_extras(takes_forms=speech.speech is not None)
    from edgespec.apps.server.api import create_app, create_speech_app
    from edgespec.apps.server.gate import Gate, GateLimits, is_loopback
    from edgespec.apps.server.http_server import Workers, bind, serve
    from edgespec.apps.server.metrics import Metrics
    from edgespec.apps.server.request_reader import Service
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.turns import Turns

    key = read_key(address.api_key_file)
    with bind(address.host, address.port) as bound, ExitStack() as stack:
        loopback = is_loopback(bound.getsockname()[0])
        address.check_reach(loopback=loopback, key=key)
        meter = choose_meter(assume_watts=assume_watts, on_message=message)
        names = _pull(models.chosen(), loading, speech)
        measured = stack.enter_context(meter) if meter.available else None
        metrics, turns = Metrics(energy=meter.available), Turns()
        engine = worker = None
        if names:
            engine, worker = _load(stack, loading, limits, names, (measured, turns))
            metrics.watch(worker)
        heard = stack.enter_context(speech.open(limits, loading.compute, measured, turns))
        if heard:
            metrics.watch_speech(heard.worker)
        if engine and worker:
            service = Service.of(engine, n_ctx=loading.ctx, max_prompt=limits.max_prompt)
            app = create_app(engine, worker, metrics=metrics, service=service, speech=heard, log=message)
        else:
            assert heard  # noqa: S101 - `SpeechServing.check` made sure, for the type checker
            app = create_speech_app(heard, metrics=metrics, log=message)
        run_key = secrets.token_urlsafe()
        sizes = {"max_body": limits.max_body << 20, "max_audio": speech.max_audio << 20}
        gate = Gate(app, GateLimits(**sizes, api_key=key, run_key=run_key, loopback=loopback))
        found = _announced(engine, loading, address_of(bound), run_key)

        hurried = serve(
            output.logged(metrics.counting(gate)),
            Workers(worker, heard.worker if heard else None),
            bound,
            max_queue=limits.max_queue,
            on_ready=lambda: _announce(address_of(bound), engine, heard, (stack, found), json=output.json),
            on_message=message,
        )
    return INTERRUPTED if hurried else 0


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
    if engine is None:
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
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _announce(
    address: str,
    engine: Engine | None,
    speech: SpeechService | None,
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
            "parallel": held.parallel if held else 1,
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
    sys.stdout.flush()
