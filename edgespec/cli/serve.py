"""`edgespec serve`: OpenAI's API over one pair of models."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import socket
import stat
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped
from edgespec.cli.options import ComputeOnNodes, ModelChoice, SharedModels, WattsOption, refuse_contradictions
from edgespec.errors import EdgespecError, UsageError

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

KEY_VARIABLE = "EDGESPEC_API_KEY"

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")
_ADDRESS = "Who may ask"
_LIMITS = "Limits"


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


@grouped
def serve_command(
    *,
    models: ModelChoice,
    loading: ServeLoading,
    address: ListenOptions,
    limits: RequestLimits,
    assume_watts: WattsOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when it is ready.", rich_help_panel="Output")
    ] = False,
) -> int:
    """Answer OpenAI's and Ollama's clients on this machine: chat and text completions, and a page at /."""
    refuse_contradictions(models.contradictions(loading.drafter))
    if missing := [name for name in _EXTRA if importlib.util.find_spec(name) is None]:
        raise EdgespecError(f"edgespec serve needs {missing[0]}: pip install 'edgespec[serve]'")
    from edgespec.energy import EnergyMeter
    from edgespec.platform.signals import Cancellation
    from edgespec.server.api import create_app
    from edgespec.server.gate import MIB, Gate, GateLimits, is_loopback
    from edgespec.server.http_server import bind, serve
    from edgespec.server.metrics import Metrics
    from edgespec.server.request_reader import Service
    from edgespec.server.worker import Worker

    key = read_key(address.api_key_file)
    with bind(address.host, address.port) as bound:
        loopback = is_loopback(bound.getsockname()[0])
        address.check_reach(loopback=loopback, key=key)
        gate = GateLimits(max_body=limits.max_body * MIB, api_key=key, loopback=loopback)
        meter = EnergyMeter.choose(assume_watts=assume_watts, on_message=message)
        names = models.pull(loading.drafter)
        with (
            meter if meter.available else nullcontext(),
            Cancellation() as cancellation,
            loading.compute.load_engine(
                names,
                drafter=loading.drafter,
                n_ctx=loading.ctx,
                meter=meter if meter.available else None,
                signals=cancellation,
                prefix_cache=loading.prefix_cache * MIB,
                parallel=loading.parallel,
                chat_template=loading.chat_template,
            ) as engine,
        ):
            worker = Worker(engine, cancellation, max_queue=limits.max_queue, max_seconds=limits.max_seconds)
            service = Service.of(engine, n_ctx=loading.ctx, max_prompt=limits.max_prompt)
            metrics = Metrics(energy=meter.available)
            metrics.watch(worker)
            app = create_app(engine, worker, metrics=metrics, service=service, log=message)
            hurried = serve(
                metrics.counting(Gate(app, gate)),
                worker,
                bound,
                max_queue=limits.max_queue,
                on_ready=lambda: _announce(bound, engine, json=json),
                on_message=message,
            )
    return INTERRUPTED if hurried else 0


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


def _announce(bound: socket.socket, engine: Engine, *, json: bool) -> None:
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if json:
        held = engine.capacity
        facts = {
            "address": address,
            "target": engine.target_name,
            "draft": engine.draft_name,
            "parallel": held.parallel,
            "cache_tokens": held.n_cells,
            "cache_bytes": held.n_bytes,
        }
        sys.stdout.write(json_text.dumps(facts) + "\n")
    else:
        draft = f", drafted by {engine.draft_name}" if engine.draft_name else ""
        out.print(f"serving {engine.target_name}{draft} at {address} (Ctrl-C ends it)", markup=False)
        out.print(str(engine.capacity), markup=False)
    sys.stdout.flush()
