"""Vectors of texts and scores of documents, by an embedding or reranking model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgespec._core import Interrupt
from edgespec.apps.embed.vector_model import PASS_TEXTS, PoolingContext, VectorModel, Vectors
from edgespec.errors import UsageError
from edgespec.llama.choices import KernelsChoice, Pooling
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.models.resolve import named_as, resolve
from edgespec.platform.closing import Closing
from edgespec.platform.machine import default_threads


class Embedder(Closing):
    """A loaded embedding or reranking model. A context manager; passes are for one thread at a time.

        with Embedder("nomic-embed.gguf") as embedder:
            vectors = embedder.embed([embedder.tokens("one text"), embedder.tokens("another")])

    Texts of different lengths share passes; `tokens` and `pair` are for any thread.
    """

    def __init__(
        self,
        name: str,
        *,
        pooling: Pooling | None = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kernels: KernelsChoice = "auto",
        interrupt: Interrupt | None = None,
    ) -> None:
        """Load the model `name`, a file or any other reference that `resolve` takes.

        `pooling`: in place of what its file says. `n_ctx`: most tokens of a text, at most what it was trained
        for. `interrupt` can end a pass. Raises as `resolve` and `VectorModel`.
        """
        path = resolve(name)
        with named_as(name, path):
            self.model = VectorModel(path, pooling=pooling, kernels=kernels == "auto")
        self.name = name
        self.n_ctx = min(n_ctx or self.model.n_ctx_train, self.model.n_ctx_train)
        """Most tokens of a text."""
        self._n_threads, self._interrupt = n_threads or default_threads(), interrupt
        self._context: PoolingContext | None = None

    @property
    def kernels(self) -> str:
        """The name of the kernels that the model runs on."""
        return load_kernels().name if self.model.uses_kernels else STOCK

    def tokens(self, text: str, *, truncate: bool = False) -> list[int]:
        """Return the tokens of a text; one that is too long is cut if `truncate`. Raises UsageError."""
        tokens = self.model.text_tokens(text)
        if truncate:
            return self.model.cut(tokens, self.n_ctx)
        self.check_length(len(tokens))
        return tokens

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document that is to be scored for it. Raises UsageError."""
        tokens = self.model.pair_tokens(query, document)
        self.check_length(len(tokens), " with its query" if document else "")
        return tokens

    def check_length(self, n_tokens: int, what: str = "") -> None:
        """Raise UsageError for a text of `n_tokens` that is empty, or longer than the model reads.

        `what`: words on the text for the error.
        """
        if not n_tokens:
            raise UsageError("a text without tokens has no vector")
        if n_tokens > self.n_ctx:
            raise UsageError(
                f"a text of {n_tokens:,} tokens{what}, and {self.model.name} reads at most {self.n_ctx:,}: "
                "cut it into parts"
            )

    def n_fitting(self, lengths: Iterable[int]) -> int:
        """Return how many texts of these lengths, from the first on, share a pass: at least one."""
        n = total = 0
        for length in lengths:
            total += length
            if n and (total > self.model.pass_tokens or n == PASS_TEXTS):
                break
            n += 1
        return n

    def forward(self, texts: Sequence[Sequence[int]]) -> Vectors:
        """Return the vectors of texts, of length 1, in one pass: as many texts as `n_fitting` says.

        Of a reranking model they are scores, shape (n, 1). Raises as `PoolingContext.vectors`.
        """
        outputs = self._room_for(sum(map(len, texts))).vectors(texts)
        if self.model.ranks:
            return self.model.scores(outputs).astype(np.float32)[:, None]
        return normalised(outputs)

    def _room_for(self, n_tokens: int) -> PoolingContext:
        """Return a context for a pass of so many tokens, kept for the next passes."""
        if self._context is None or self._context.n_tokens < n_tokens:
            if self._context:
                self._context.close()
            size = max(self.model.pass_tokens, 1 << (n_tokens - 1).bit_length())
            self._context = PoolingContext(
                self.model, size, n_threads=self._n_threads, interrupt=self._interrupt
            )
        return self._context

    def embed(
        self, texts: Sequence[Sequence[int]], on_progress: Callable[[int], object] = lambda _n: None
    ) -> Vectors:
        """Return a row for each text, as `forward`, in as few passes as hold them.

        `on_progress` is told after each pass how many texts are done.
        """
        rows: list[Vectors] = []
        done = 0
        while done < len(texts):
            n = self.n_fitting(len(text) for text in texts[done:])
            rows.append(self.forward(texts[done : done + n]))
            done += n
            on_progress(done)
        return np.concatenate(rows)

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        self.model.close()


def normalised(rows: npt.NDArray[np.floating], n: int | None = None) -> Vectors:
    """Return the first `n` numbers of each row (None: all), at length 1; a row of zeros stays one."""
    cut = rows[:, :n].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths, lengths, 1)).astype(np.float32)
