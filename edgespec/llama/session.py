"""Evaluate a model along one timeline: a llama_context whose sequence grows and can be cut back.

The end of a pass may be a tree of tokens. llama.cpp gets one sequence per leaf: the first is the timeline
itself; the others share its cache cells down to where they branch off.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.batch import Batch, Branches, EmbeddingsFn, PassInput, find_branches
from edgespec.llama.context import create_context
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing

Rows: TypeAlias = npt.NDArray[np.float32]
"""Logits, shape (n_logits, n_vocab), C-contiguous: a view on the library's buffer, not a copy."""

State: TypeAlias = npt.NDArray[np.uint8]
"""A copy of the cache of a timeline, as the library writes it."""

MAX_LEAVES = 32
"""Most leaves of a tree of tokens: the library keeps room for a row of logits for each."""

_DECODE_NO_SLOT, _DECODE_ABORTED = 1, 2
_SEQUENCE, _ALL_SEQUENCES = 0, -1
_SEVERAL_POSITIONS = 8  # a bit of enum llama_rope_type: M-RoPE and its kin

# Our own prototype: llama_cpp's returns a pointer object, whose address costs another conversion.
_get_logits = backend.foreign_function("llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)


class Session(Closing):
    """A growing sequence of tokens and the model's cache of it. A context manager.

    `n_past` always asks the library for the number of cached tokens: a second count could become wrong when
    Ctrl-C lands between two lines. The token ids are noted before a pass; `timeline` returns the first
    `n_past` of them. A failed or interrupted `eval` leaves the timeline as it was before the call, or empty
    if the model cannot rewind.

    A session keeps its model alive. Two threads must not use it at once.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_threads: int,
        n_batch: int = 512,
        n_logits_max: int = 64,
        embeddings: EmbeddingsFn | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Open a timeline of up to `n_ctx` tokens.

        `n_batch`: most tokens computed in one pass. `n_logits_max`: most rows one `eval` returns; it sets the
        size of buffers. `embeddings`: returns the input rows of tokens, for a model whose own table lacks
        some. `interrupt` can end a pass: then `eval` raises KeyboardInterrupt. Raises EdgespecError if the
        context cannot be created or the model cannot take embeddings.
        """
        if n_ctx < 1 or n_threads < 1 or n_batch < 1 or n_logits_max < 1:
            raise ValueError("n_ctx, n_threads, n_batch and n_logits_max must be at least 1")
        self.model = model
        self.n_ctx = n_ctx
        self.n_batch = min(n_batch, n_ctx)
        self.n_logits_max = min(n_logits_max, self.n_batch)
        self.max_leaves = max(1, min(MAX_LEAVES, self.n_logits_max - 1)) if model.can_rewind else 1
        """Most leaves of a tree of tokens; 1: chains only."""
        if embeddings and llama.llama_model_rope_type(model.handle) & _SEVERAL_POSITIONS:
            raise EdgespecError(
                f"{model.name} cannot take embeddings in place of tokens "
                f"(architecture {model.header.architecture})"
            )
        context = create_context(
            model,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_batch=self.n_batch,
            n_logits_max=self.n_logits_max,
            max_leaves=self.max_leaves,
        )
        # The finalizer's reference keeps the weights until the context that uses them is freed, even if the
        # garbage collector finds both unreachable at once.
        self._finalizer = weakref.finalize(self, _free, context, model)
        model.sessions.add(self)
        self._context = context
        self._memory = llama.llama_get_memory(context)
        if interrupt:
            callback = ctypes.cast(ctypes.c_void_p(interrupt.callback), llama.ggml_abort_callback)
            llama.llama_set_abort_callback(context, callback, ctypes.c_void_p(interrupt.data))
        self._interrupt = interrupt  # its data must live as long as the context
        n_embd = llama.llama_model_n_embd_inp(model.handle)
        self._input = PassInput(self.n_batch, self.max_leaves, n_embd=n_embd, embeddings=embeddings)
        self._has_branches = False
        self._written: list[int] = []
        self._rows_address = 0
        self._rows: Rows = np.empty((0, model.n_vocab), np.float32)

    @property
    def n_past(self) -> int:
        """Tokens in the timeline."""
        self._require_open()
        return int(llama.llama_memory_seq_pos_max(self._memory, _SEQUENCE)) + 1

    @property
    def timeline(self) -> list[int]:
        """The tokens in the timeline."""
        return self._written[: self.n_past]

    def eval(self, tokens: Sequence[int], *, n_logits: int = 1, parents: Sequence[int] | None = None) -> Rows:
        """Append `tokens` to the timeline; return the logits after each of the last `n_logits`.

        With `parents` the last len(parents) tokens are a tree in depth-first pre-order: node i follows node
        parents[i]; -1 is the token before the tree, which must be in `tokens`. n_logits must then be
        len(parents) + 1: row 0 follows that token, row i + 1 follows node i. Of the tree only its *trunk*
        stays in the timeline: the first nodes with parents[i] == i - 1. With edgespec's kernels a node's row
        is bit for bit that of the same tokens in a chain (a sliding window of attention must be longer than
        the tree is deep); with llama.cpp's it may differ in the last bits, as between two batch sizes.

        The rows, shape (n_logits, n_vocab), are the library's own memory: valid until the next
        `eval` or `close`. More than `n_batch` tokens take several passes. Raises EdgespecError if the context
        is full (each node needs a place while it is computed), the model cannot evaluate branches or the
        library fails, KeyboardInterrupt if the abort callback stops it.
        """
        n_tokens = len(tokens)
        n_past = self.n_past
        if not 0 <= n_logits <= min(n_tokens, self.n_logits_max):
            raise ValueError(f"n_logits {n_logits} with {n_tokens} tokens, n_logits_max {self.n_logits_max}")
        branches = None if parents is None else self._branches(parents, n_logits)
        if n_past + n_tokens > self.n_ctx:
            raise EdgespecError(
                f"the context is full: {n_past} tokens and {n_tokens} more do not fit in {self.n_ctx}; "
                "choose a larger context"
            )
        backend.clear_log()
        if self._has_branches:
            self._drop_branches()
        self._written[n_past:] = tokens  # a tree's trunk comes first; `timeline` drops the rest
        try:
            start = 0
            while start < n_tokens:
                n = n_tokens - start
                if n > self.n_batch:
                    # Leave all tokens whose logits are wanted to the last pass.
                    n = min(self.n_batch, n - n_logits)
                part = tokens[start : start + n]
                if start + n < n_tokens:
                    self._decode(self._input.chain, part, 0)
                elif branches is None:
                    self._decode(self._input.chain, part, n_logits)
                else:
                    self._decode_tree(part, branches, n_past + start)
                start += n
        except BaseException:
            self._restore(n_past)
            raise
        return self._view(n_logits)

    def _branches(self, parents: Sequence[int], n_logits: int) -> Branches | None:
        """Check the tree and return it; None for a chain."""
        nodes = list(map(int, parents))
        if n_logits != len(nodes) + 1:
            raise ValueError(f"n_logits {n_logits} with a tree of {len(nodes)} nodes")
        if nodes == list(range(-1, len(nodes) - 1)):
            return None
        branches = find_branches(nodes)
        if not self.model.can_rewind:
            raise EdgespecError(
                f"{self.model.name} cannot evaluate branches (architecture {self.model.header.architecture})"
            )
        if branches.n_leaves > self.max_leaves:
            raise ValueError(f"a tree of {branches.n_leaves} leaves, max_leaves {self.max_leaves}")
        return branches

    def _decode_tree(self, tokens: Sequence[int], branches: Branches, n_past: int) -> None:
        """Decode `tokens`, which end with a tree, and drop all of the tree but its trunk."""
        n_nodes = len(branches.depths)
        batch = self._input.tree
        batch.lay_out(branches, n_past, len(tokens) - n_nodes)
        # A side sequence goes on sharing the timeline's cells between trees: sharing and dropping 2000 cells
        # takes 0.13 ms per sequence; sharing only those new since the last tree takes 5 us.
        for sequence in range(1, branches.n_leaves):
            n_shared = llama.llama_memory_seq_pos_max(self._memory, sequence) + 1
            llama.llama_memory_seq_cp(self._memory, _SEQUENCE, sequence, n_shared, n_past)
        self._has_branches = True
        self._decode(batch, tokens, n_nodes + 1)
        for sequence in range(1, branches.n_leaves):
            llama.llama_memory_seq_rm(self._memory, sequence, n_past + len(tokens) - n_nodes, -1)
        self._has_branches = False

    def _decode(self, batch: Batch, tokens: Sequence[int], n_logits: int) -> None:
        self._input.fill(batch, tokens, n_logits)
        # An aborted pass is logged, and Python may raise Ctrl-C in that callback.
        with backend.interruptible():
            code = llama.llama_decode(self._context, batch.struct)
        if code == 0:
            return
        if code == _DECODE_ABORTED:
            raise KeyboardInterrupt
        if code == _DECODE_NO_SLOT:
            raise EdgespecError(
                f"the context is full: no place for {len(tokens)} more tokens; choose a larger context"
            )
        raise EdgespecError(
            f"{self.model.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
        )

    def _view(self, n_logits: int) -> Rows:
        if n_logits == 0:
            return self._rows[:0]
        address = _get_logits(self._context)
        if address != self._rows_address:  # the buffer moves only when it grows
            # The view has the largest shape, but only the rows just asked for are ever read.
            shape = (self.n_logits_max, self.model.n_vocab)
            buffer = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
            self._rows = np.frombuffer(memoryview(buffer), np.float32).reshape(shape)
            self._rows_address = address
        return self._rows[:n_logits]

    def _restore(self, n_past: int) -> None:
        if self._cut(n_past):
            self._has_branches = False
        else:
            llama.llama_memory_clear(self._memory, False)

    def _cut(self, n_keep: int) -> bool:
        """Cut every sequence back to `n_keep` tokens; return whether the library could."""
        sequence = _ALL_SEQUENCES if self.max_leaves > 1 else _SEQUENCE
        return bool(llama.llama_memory_seq_rm(self._memory, sequence, n_keep, -1))

    def _drop_branches(self) -> None:
        """Remove the side sequences that are left if Ctrl-C comes right after a tree's pass."""
        for sequence in range(1, self.max_leaves):
            llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._has_branches = False

    def rewind(self, n_keep: int) -> None:
        """Cut the timeline back to its first `n_keep` tokens, as if the others had never been read.

        Raises EdgespecError if the model cannot rewind (`Model.can_rewind`).
        """
        n_past = self.n_past
        if not 0 <= n_keep <= n_past:
            raise ValueError(f"cannot keep {n_keep} of {n_past} tokens")
        if n_keep == n_past:
            return
        if n_keep == 0:
            self.clear()
        elif not self.model.can_rewind or not self._cut(n_keep):
            raise EdgespecError(
                f"{self.model.name} cannot take tokens back (architecture {self.model.header.architecture})"
            )

    def clear(self) -> None:
        """Empty the timeline."""
        self._require_open()
        llama.llama_memory_clear(self._memory, False)

    @property
    def state_bytes(self) -> int:
        """Size in bytes of what `state` would return now."""
        self._require_open()
        return int(llama.llama_state_seq_get_size(self._context, _SEQUENCE))

    def state(self) -> State:
        """Return a copy of the timeline's cache, for `restore`."""
        size = self.state_bytes
        state: State = np.empty(size, np.uint8)
        n = llama.llama_state_seq_get_data(self._context, _bytes(state), size, _SEQUENCE)
        if n != size:
            raise EdgespecError(f"{self.model.path}: llama.cpp copied {n} of {size} bytes of the cache")
        return state

    def restore(self, state: State, timeline: Sequence[int]) -> None:
        """Set the timeline to `timeline` and its cache to `state`, copied from a session of this model.

        That session may have had another context size. Raises EdgespecError, and leaves the timeline empty,
        if the cache does not fit.
        """
        self.clear()
        self._written = list(timeline)
        n = llama.llama_state_seq_set_data(self._context, _bytes(state), state.nbytes, _SEQUENCE)
        if n != state.nbytes or self.n_past != len(timeline):
            self.clear()
            raise EdgespecError(
                f"{self.model.path}: llama.cpp could not restore a cache of {len(timeline)} tokens"
            )

    def close(self) -> None:
        """Free the cache and the buffers; a second call does nothing. Rows become invalid."""
        self._finalizer()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EdgespecError(f"{self.model.path}: the session is closed")


def _bytes(state: State) -> ctypes._Pointer[ctypes.c_uint8]:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _free(context: llama.llama_context_p, _model: Model) -> None:
    llama.llama_free(context)
