"""The options of `edgespec serve`, in groups, and what each group opens or loads."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message
from edgespec.cli.groups import as_words, option_group
from edgespec.cli.options import (
    OUTPUT,
    TARGET,
    Compute,
    ComputeOnNodes,
    DraftOption,
    ModelArgument,
    ModelFirst,
    PairOption,
    PoolingOption,
    SharedModels,
    StateOptions,
)
from edgespec.cli.progress import pull_named
from edgespec.decoding.option_table import LARGEST_INT
from edgespec.errors import UsageError
from edgespec.llama.choices import SERVED_PREFIXES
from edgespec.platform.messages import MessageFn, silent

if TYPE_CHECKING:
    from edgespec.apps.server.audio_routes import SpeechService
    from edgespec.apps.server.embedding_routes import EmbeddingService
    from edgespec.apps.server.gate import GateLimits
    from edgespec.engine.engine import Engine
    from edgespec.engine.model_choice import ChosenModels
    from edgespec.platform.metering import Meter
    from edgespec.platform.signals import Cancellation
    from edgespec.platform.turns import Turns


KEY_VARIABLE = "EDGESPEC_API_KEY"

NO_TEXT = "none"
"""The target of a server that answers recordings alone."""

_ADDRESS = "Who may ask"
_LIMITS = "Limits"
_SPEECH = "Speech (docs/transcribe.md)"


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


_USED = {"--embeddings", "--pooling", "--ctx", "--threads", "--kernels"}


def idle_options(loading: SharedModels) -> list[str]:
    """Return the options that were given and do nothing for a model that embeds or ranks."""
    return [name for name in (word.partition("=")[0] for word in as_words(loading)) if name not in _USED]


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

    def check(self) -> None:
        """Raise UsageError for options that need --embeddings."""
        if self.pooling:
            raise UsageError("is for vectors; add --embeddings", field="pooling", value=self.pooling)

    def contradictions(self, models: ModelFirst, loading: SharedModels, **others: object) -> dict[str, bool]:
        """Return the options for `refuse_contradictions`: those that do nothing here.

        `others`: whatever else was given, by its name.
        """
        return {
            "--embeddings and --draft": models.draft is not None,
            "--embeddings and a pair": models.chosen().pair is not None,
            **{f"--embeddings and {name}": True for name in idle_options(loading)},
            **{f"--embeddings and --{name}": value is not None for name, value in others.items()},
        }

    @contextmanager
    def open(
        self,
        target: str | None,
        loading: SharedModels,
        limits: RequestLimits,
        turns: Turns,
        *,
        names: Sequence[str],
    ) -> Iterator[EmbeddingService]:
        """Load the model, which takes its `turns` with what else computes.

        The first of `names` is told in its place, and the others are accepted, too.
        Raises UsageError without a `target`.
        """
        if target is None:
            raise UsageError("--embeddings needs a model: edgespec serve MODEL --embeddings")
        from edgespec.apps.embed.embedder import Embedder
        from edgespec.apps.server.embedding_routes import EmbeddingService
        from edgespec.apps.server.embedding_worker import EmbeddingWorker
        from edgespec.apps.server.names import NamedModel, plain_name
        from edgespec.apps.server.request_reader import Service
        from edgespec.platform.signals import Cancellation

        pull_named(target)
        compute = loading.compute
        most = min(filter(None, (loading.ctx, limits.max_prompt)), default=None)
        with Cancellation() as cancellation:
            with err.status("loading the model"):
                embedder = Embedder(
                    target,
                    pooling=self.pooling,
                    n_ctx=most,
                    n_threads=compute.threads,
                    kernels=compute.kernels,
                    interrupt=cancellation.interrupt,
                )
            with embedder:
                worker = EmbeddingWorker(
                    embedder,
                    cancellation,
                    max_queue=limits.max_queue,
                    max_seconds=limits.max_seconds,
                    turns=turns,
                )
                named = NamedModel.of(embedder.model, [*names, plain_name(target)])
                yield EmbeddingService(Service(named, embedder.n_ctx), worker, message)


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

    max_models: Annotated[
        int | None,
        typer.Option(min=1, help="Of several models, those loaded at once.", show_default="as many as fit"),
    ] = None

    def check_places(self, n_kept: int, n_models: int) -> None:
        """Raise UsageError where models that stay would leave the others no place."""
        if self.max_models is not None and self.max_models < n_kept + (n_kept < n_models):
            problem = f"{n_kept} of the {n_models} models stay loaded (keep): allow more, or keep fewer"
            raise UsageError(problem, field="max_models", value=self.max_models)

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

    @contextmanager
    def open(
        self, limits: RequestLimits, speech: SpeechServing, run_key: str | None = None
    ) -> Iterator[tuple[socket.socket, GateLimits]]:
        """Take the address, and yield it with the requests that are accepted there.

        Raises UsageError if other machines could ask without a key and the user did not allow it.
        """
        from edgespec.apps.server.gate import GateLimits, is_loopback, read_origin
        from edgespec.apps.server.http_server import bind

        key, origins = _read_key(self.api_key_file), tuple(map(read_origin, self.cors or ()))
        with bind(self.host, self.port) as bound:
            loopback = bound.family == socket.AF_UNIX or is_loopback(bound.getsockname()[0])
            if not loopback and key is None and not self.unsafe_no_api_key:
                raise UsageError(
                    f"--host {self.host} can be reached from other machines: give an API key with "
                    f"--api-key-file or {KEY_VARIABLE}, or --unsafe-no-api-key"
                )
            yield (
                bound,
                GateLimits(
                    max_body=limits.max_body << 20,
                    max_audio=speech.max_audio << 20,
                    api_key=key,
                    run_key=run_key,
                    loopback=loopback,
                    origins=origins,
                ),
            )


@option_group(OUTPUT)
class ServeOutput:
    """What a server prints: one JSON object when it is ready, a line for each request."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when it is ready.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line for each request.")] = False

    @property
    def log(self) -> MessageFn:
        """What prints a line for each request to stderr."""
        return silent if self.quiet else err.print


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
