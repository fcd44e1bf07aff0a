"""Embedding and reranking models, whose passes give a vector of a whole text, or the score of a document."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgespec._core import Interrupt
from edgespec.decoding.session import SequenceTokens
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.choices import KernelsChoice, Pooling
from edgespec.llama.gguf_header import GGUFHeader, check_complete_file, other_kind
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import Batch, create_context
from edgespec.llama.weights import Model
from edgespec.models.resolve import named_as, resolve
from edgespec.platform.closing import Closing
from edgespec.platform.machine import default_threads
from edgespec.platform.processes import HomeProcess, finalize

Vectors = npt.NDArray[np.float32]
"""A row for each text: its vector, or the outputs of a reranking model's classifier."""

PASS_TEXTS = 64
"""Most texts of a pass."""

_RANK = 4
_POOLING_TYPES: dict[int, Pooling | Literal["rank"]] = {1: "mean", 2: "cls", 3: "last", _RANK: "rank"}
_NUMBERS = {name: number for number, name in _POOLING_TYPES.items()}  # enum llama_pooling_type
# Most tokens of a pass over several texts: more make it no faster. Of a model that could write, the library
# computes and keeps the logits of every token.
_PASS_TOKENS, _PART_TOKENS = 512, 128
_ABORTED = 2
_SOFTMAX = ("qwen3", "qwen3vl")  # architectures whose two classes llama.cpp makes probabilities of

_RERANK_TEMPLATE = "rerank"
_PLACES = re.compile(r"(\{(?:query|document)\})")


class VectorModel(Model):
    """An embedding or reranking model."""

    def __init__(self, path: str | Path, *, pooling: Pooling | None = None, kernels: bool = True) -> None:
        """Load `path`; `pooling` overrides the file's.

        Raises as `Model`, and UsageError for a model that writes text without `pooling`, or a reranking model
        with it.
        """
        header = check_vector_file(path, pooling)
        self.pooling = pooling or _POOLING_TYPES[header.pooling_type]
        """How a pass gives a text's vector; "rank": its scores."""
        self.reads_parts = self.pooling == "last" and header.is_causal
        """Whether a text may be read in several passes."""
        self.pass_tokens = _PART_TOKENS if self.reads_parts else _PASS_TOKENS
        """Most tokens of a pass over several texts."""
        super().__init__(path, kernels=kernels, header=header)
        self.ranks = self.pooling == "rank"
        """Whether it scores documents, and gives no vectors."""
        self.n_outputs = int(llama.llama_model_n_cls_out(self.handle)) if self.ranks else self.n_embd
        """Numbers of a text."""
        self._is_probability = self.n_outputs == 2 and header.architecture in _SOFTMAX
        if self.ranks and self.n_outputs != 1 and not self._is_probability:
            self.close()
            raise EdgespecError(
                f"{path}: a classifier of {self.n_outputs} classes; choose a reranking model, with one score"
            )

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model wants around it. Raises UsageError."""
        return self.tokenize(text, add_special=True, parse_special=True)

    def pair_tokens(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document, as a reranking model reads both. Raises UsageError.

        They are made by the template in its file, else each part ends as the vocabulary's own texts do.
        """
        template = self._templates.named.get(_RERANK_TEMPLATE) if self._templates else None
        if template:
            values = {"{query}": query, "{document}": document}
            text = "".join(values.get(part, part) for part in _PLACES.split(template.source))
            return self.tokenize(text, add_special=False, parse_special=True)
        vocab = self._vocab
        eos = [self.eos] if self.eos is not None and llama.llama_vocab_get_add_eos(vocab) else []
        sep = [llama.llama_vocab_sep(vocab)] if llama.llama_vocab_get_add_sep(vocab) else []
        bos = [self.bos] if self.bos is not None and self.add_bos else []
        first, second = (
            self.tokenize(text, add_special=False, parse_special=False) for text in (query, document)
        )
        return [*bos, *first, *eos, *sep, *second, *(eos or sep)]

    def cut(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the first `n` of a text's tokens; a control token at its end, such as SEP, is kept."""
        if len(tokens) <= n:
            return [*tokens]
        keeps = n > 1 and self.is_control(tokens[-1])
        return [*tokens[: n - 1], tokens[-1]] if keeps else [*tokens[:n]]

    def scores(self, outputs: Vectors) -> npt.NDArray[np.float64]:
        """Return the relevance, 0 to 1, of the rows that a reranking model gave."""
        first = outputs[:, 0].astype(np.float64)
        return first if self._is_probability else 1 / (1 + np.exp(-first))


def check_vector_file(path: str | Path, pooling: Pooling | None) -> GGUFHeader:
    """Return the header of a complete file of a model that gives vectors or scores; raises as VectorModel."""
    header = check_complete_file(Path(path))
    if what := other_kind(header, or_embedder=True):
        raise EdgespecError(f"{path}: {what}; choose an embedding or reranking model")
    if header.pooling_type == _RANK:
        if pooling:
            raise EdgespecError("is for embedding models, and this one ranks", field="pooling", value=pooling)
    elif header.pooling_type not in _POOLING_TYPES and pooling is None:
        kind = "an encoder" if header.is_embedder else "a model that writes text"
        raise EdgespecError(
            f"{path}: {kind}, whose file does not say how the vector of a text is pooled; "
            "choose an embedding model, or say it with --pooling"
        )
    return header


class PoolingContext(Closing):
    """The buffers of passes over texts, each a sequence of its own. A context manager; for one thread."""

    def __init__(
        self, model: VectorModel, n_tokens: int, *, n_threads: int, interrupt: Interrupt | None = None
    ) -> None:
        """Make room for `n_tokens` of a pass; `interrupt` can end one. Raises EdgespecError."""
        self.n_tokens = n_tokens
        self._n_batch = min(n_tokens, model.pass_tokens) if model.reads_parts else n_tokens
        context = create_context(
            model,
            n_ctx=n_tokens,
            n_threads=n_threads,
            n_batch=self._n_batch,
            n_logits_max=self._n_batch,
            n_sequences=PASS_TEXTS,
            pooling=_NUMBERS[model.pooling],
        )
        self._finalizer = finalize(self, _free, context, model)
        model.sessions.add(self)
        self._model, self._context, self._home = model, context, HomeProcess("the context")
        self._input = Batch(self._n_batch, PASS_TEXTS)
        self._interrupt = interrupt  # its data must live as long as the context
        if interrupt:
            callback = ctypes.cast(ctypes.c_void_p(interrupt.callback), llama.ggml_abort_callback)
            llama.llama_set_abort_callback(context, callback, ctypes.c_void_p(interrupt.data))

    def vectors(self, texts: Sequence[Sequence[int]]) -> Vectors:
        """Return the vector of each text, as the model pools it, or its outputs; shape (n, n_outputs).

        At most PASS_TEXTS texts of `n_tokens` tokens together. Raises EdgespecError if the library fails or
        numbers are not finite, KeyboardInterrupt if the pass was interrupted.
        """
        if not self._finalizer.alive:
            raise EdgespecError(f"{self._model.path}: the model is closed")
        self._home.require()
        if memory := llama.llama_get_memory(self._context):
            llama.llama_memory_clear(memory, False)
        for parts in self._passes(texts):
            self._decode(parts)
        rows = np.empty((len(texts), self._model.n_outputs), np.float32)
        for sequence, row in enumerate(rows):
            address = llama.llama_get_embeddings_seq(self._context, sequence)
            if not address:
                raise EdgespecError(f"{self._model.path}: llama.cpp gives no vectors of this model")
            row[:] = np.ctypeslib.as_array(address, row.shape)
        if not np.isfinite(rows).all():
            raise EdgespecError(
                f"{self._model.path}: gives vectors that are no numbers; the model file may be damaged "
                "(`edgespec models verify`)"
            )
        return rows

    def _passes(self, texts: Sequence[Sequence[int]]) -> Iterable[list[SequenceTokens]]:
        parts = [SequenceTokens(i, tokens) for i, tokens in enumerate(texts)]
        n = sum(map(len, texts))
        if n <= self._n_batch:
            yield parts
            return
        (part,) = parts
        for start in range(0, n, self._n_batch):
            yield [part.section(start, min(self._n_batch, n - start))]

    def _decode(self, parts: Sequence[SequenceTokens]) -> None:
        self._input.fill(parts, all_logits=True)
        backend.clear_log()
        plugin = self._model.plugin  # which can leave the logits out
        with backend.interruptible(), plugin.last_logits(1) if plugin else nullcontext():
            code = llama.llama_decode(self._context, self._input.struct)
        if code == _ABORTED:
            raise KeyboardInterrupt
        if code:
            raise EdgespecError(
                f"{self._model.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
            )

    def close(self) -> None:
        """Free the library's object; a second call does nothing."""
        self._finalizer()


def _free(context: llama.llama_context_p, _model: Model) -> None:
    llama.llama_free(context)


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

        `pooling` overrides the file's. `n_ctx`: most tokens of a text, at most what it was trained
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
        """Return a context with room for a pass of `n_tokens`, kept for later passes."""
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

        `on_progress` is called after each pass with the number of texts done.
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
