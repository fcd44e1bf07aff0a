"""`edgespec serve`: OpenAI's API over one pair of models."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped
from edgespec.cli.options import (
    Compute,
    ComputeOnNodes,
    ModelChoice,
    SharedModels,
    WattsOption,
    refuse_contradictions,
)
from edgespec.cli.progress import pull_named
from edgespec.errors import EdgespecError, UsageError

if TYPE_CHECKING:
    from edgespec.energy import EnergyMeter
    from edgespec.engine.engine import Engine
    from edgespec.platform.signals import Cancellation
    from edgespec.server.audio_routes import SpeechService
    from edgespec.server.worker import Worker

KEY_VARIABLE = "EDGESPEC_API_KEY"

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")
_ADDRESS = "Who may ask"
_LIMITS = "Limits"
_SPEECH = "Speech"


@dataclass(frozen=True, kw_only=True)
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

    def load(self, names: tuple[str, str | None], meter: EnergyMeter | None, signals: Cancellation) -> Engine:
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


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Address on which the server listens, and its API key."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; another than this machine's own needs an API key.",
            rich_help_panel=_ADDRESS,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0: a free one.", rich_help_panel=_ADDRESS)
    ] = 8080
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that requests must have.",
            show_default=f"the variable {KEY_VARIABLE}",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    unsafe_no_api_key: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-api-key",
            help="Listen on another address without a key: whoever reaches it may ask.",
            rich_help_panel=_ADDRESS,
        ),
    ] = False

    def check_reach(self, *, loopback: bool, key: str | None) -> None:
        """Raise UsageError if other machines could ask without a key and the user did not allow it."""
        if not loopback and key is None and not self.unsafe_no_api_key:
            raise UsageError(
                f"--host {self.host} can be reached from other machines: give an API key with "
                f"--api-key-file or {KEY_VARIABLE}, or --unsafe-no-api-key"
            )


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of requests."""

    max_queue: Annotated[
        int, typer.Option(min=0, max=10_000, help="Requests that may wait.", rich_help_panel=_LIMITS)
    ] = 64
    max_body: Annotated[
        int,
        typer.Option(metavar="MB", min=1, max=1024, help="Size of a request.", rich_help_panel=_LIMITS),
    ] = 4
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt.", show_default="the context", rich_help_panel=_LIMITS),
    ] = None
    max_seconds: Annotated[
        int,
        typer.Option(
            min=1,
            max=86_400,
            help="Time that a request may wait, and then that its answer may take.",
            rich_help_panel=_LIMITS,
        ),
    ] = 600


@dataclass(frozen=True, kw_only=True)
class SpeechServing:
    """The Whisper model of a server, and the limits of recordings."""

    speech: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whisper model that writes down recordings at /v1/audio, such as whisper-base.",
            show_default="none",
            rich_help_panel=_SPEECH,
            autocompletion=complete_model,
        ),
    ] = None
    speech_draft: Annotated[
        str,
        typer.Option(
            metavar="NAME|auto|none",
            help="Model that drafts for it; auto: text heard before; none: nothing.",
            rich_help_panel=_SPEECH,
            autocompletion=complete_model,
        ),
    ] = "auto"
    max_audio: Annotated[
        int,
        typer.Option(metavar="MB", min=1, max=4096, help="Size of a recording.", rich_help_panel=_SPEECH),
    ] = 100
    max_audio_minutes: Annotated[
        int, typer.Option(min=1, max=6000, help="Length of a recording.", rich_help_panel=_SPEECH)
    ] = 240

    @contextmanager
    def open(
        self, worker: Worker, limits: RequestLimits, compute: Compute, meter: EnergyMeter | None
    ) -> Iterator[SpeechService | None]:
        """Load the model, which takes turns with the texts of `worker`; None without one."""
        if self.speech is None:
            yield None
            return
        from edgespec.models.speech_model import speech_ref
        from edgespec.server.audio_routes import SpeechService
        from edgespec.server.speech_worker import SpeechWorker
        from edgespec.speech.opening import open_transcriber

        with open_transcriber(
            self.speech,
            draft=self.speech_draft,
            n_threads=compute.threads,
            kernels=compute.kernels != "off",
            on_message=message,
        ) as transcriber:
            speech = SpeechWorker(
                transcriber,
                turns=worker.turns,
                max_queue=limits.max_queue,
                max_seconds=limits.max_seconds,
                meter=meter,
            )
            name = PurePath(speech_ref(self.speech)).name.removesuffix(".gguf")
            yield SpeechService(name, speech, 60.0 * self.max_audio_minutes)

    def pull(self) -> None:
        """Get models that are not here."""
        if self.speech is not None:
            from edgespec.models.speech_model import speech_ref

            draft = None if self.speech_draft in ("auto", "none") else speech_ref(self.speech_draft)
            pull_named(speech_ref(self.speech), draft)


@grouped
def serve_command(
    *,
    models: ModelChoice,
    loading: ServeLoading,
    address: ListenOptions,
    limits: RequestLimits,
    speech: SpeechServing,
    assume_watts: WattsOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when it is ready.", rich_help_panel="Output")
    ] = False,
) -> int:
    """Answer OpenAI's and Ollama's clients on this machine: chat and text completions, and a page at /."""
    refuse_contradictions(models.contradictions(loading.drafter))
    _check_extras(takes_forms=speech.speech is not None)
    from edgespec.energy import EnergyMeter
    from edgespec.platform.signals import Cancellation
    from edgespec.server.api import create_app
    from edgespec.server.gate import MIB, Gate, GateLimits, is_loopback
    from edgespec.server.http_server import Workers, bind, serve
    from edgespec.server.metrics import Metrics
    from edgespec.server.request_reader import Service
    from edgespec.server.worker import Worker

    key = read_key(address.api_key_file)
    with bind(address.host, address.port) as bound:
        loopback = is_loopback(bound.getsockname()[0])
        address.check_reach(loopback=loopback, key=key)
        sizes = {"max_body": limits.max_body * MIB, "max_audio": speech.max_audio * MIB}
        gate = GateLimits(**sizes, api_key=key, loopback=loopback)
        meter = EnergyMeter.choose(assume_watts=assume_watts, on_message=message)
        names = models.pull(loading.drafter)
        speech.pull()
        with (
            meter if meter.available else nullcontext(),
            Cancellation() as cancellation,
            loading.load(names, meter if meter.available else None, cancellation) as engine,
        ):
            worker = Worker(engine, cancellation, max_queue=limits.max_queue, max_seconds=limits.max_seconds)
            service = Service.of(engine, n_ctx=loading.ctx, max_prompt=limits.max_prompt)
            metrics = Metrics(energy=meter.available)
            metrics.watch(worker)
            with speech.open(worker, limits, loading.compute, engine.meter) as heard:
                if heard:
                    metrics.watch_speech(heard.worker)
                app = create_app(engine, worker, metrics=metrics, service=service, speech=heard, log=message)
                hurried = serve(
                    metrics.counting(Gate(app, gate)),
                    Workers(worker, heard.worker if heard else None),
                    bound,
                    max_queue=limits.max_queue,
                    on_ready=lambda: _announce(bound, engine, heard, json=json),
                    on_message=message,
                )
    return INTERRUPTED if hurried else 0


def _check_extras(*, takes_forms: bool) -> None:
    """Raise EdgespecError for a missing package of the extra."""
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


def _announce(bound: socket.socket, engine: Engine, speech: SpeechService | None, *, json: bool) -> None:
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if json:
        held = engine.capacity
        facts = {
            "address": address,
            "target": engine.target_name,
            "draft": engine.draft_name,
            "speech": speech.name if speech else None,
            "parallel": held.parallel,
            "cache_tokens": held.n_cells,
            "cache_bytes": held.n_bytes,
        }
        sys.stdout.write(json_text.dumps(facts) + "\n")
    else:
        draft = f", drafted by {engine.draft_name}" if engine.draft_name else ""
        out.print(f"serving {engine.target_name}{draft} at {address} (Ctrl-C ends it)", markup=False)
        out.print(str(engine.capacity), markup=False)
        if speech:
            out.print(f"writing down recordings with {speech.name}", markup=False)
    sys.stdout.flush()
