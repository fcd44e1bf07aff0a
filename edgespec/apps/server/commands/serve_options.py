"""Options of `edgespec serve`, in groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message
from edgespec.cli.groups import option_group
from edgespec.cli.options import OUTPUT, Compute, ComputeOnNodes, SharedModels
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgespec.apps.server.audio_routes import SpeechService
    from edgespec.apps.server.worker import Worker
    from edgespec.engine.engine import Engine
    from edgespec.platform.metering import Meter
    from edgespec.platform.signals import Cancellation
    from edgespec.platform.turns import Turns

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

    def load(self, names: tuple[str, str | None], meter: Meter | None, signals: Cancellation) -> Engine:
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
