"""The options of a server of an embedding or reranking model, and the model's loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from edgespec.cli.console import err, message
from edgespec.cli.groups import as_words, option_group
from edgespec.cli.options import ModelFirst, PoolingOption, SharedModels
from edgespec.cli.progress import pull_named
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.apps.server.embedding_routes import EmbeddingService
    from edgespec.platform.turns import Turns


class QueueLimits(Protocol):
    """The limits of requests that matter here."""

    @property
    def max_queue(self) -> int:
        """Requests that may wait."""

    @property
    def max_seconds(self) -> int:
        """Time that a request may wait, and then that its answer may take."""

    @property
    def max_prompt(self) -> int | None:
        """Tokens of a text; None: as many as the context holds."""


_USED = {"--embeddings", "--pooling", "--ctx", "--threads", "--kernels"}


def idle_options(loading: SharedModels) -> list[str]:
    """Return the options that were given and do nothing for a model that embeds or ranks."""
    return [name for name in (word.partition("=")[0] for word in as_words(loading)) if name not in _USED]


@option_group("Embeddings (docs/embeddings.md)")
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
        limits: QueueLimits,
        turns: Turns,
        *,
        names: Sequence[str],
    ) -> Iterator[EmbeddingService | None]:
        """Load the model, which takes its `turns` with what else computes; None without --embeddings.

        The first of `names` is told in its place, and the others are accepted, too.
        Raises UsageError without a `target`.
        """
        if not self.embeddings:
            yield None
            return
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
