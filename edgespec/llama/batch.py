"""The input of llama.cpp's decode: a chain or a tree of tokens, or of their embeddings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.llama.backend import llama

EmbeddingsFn = Callable[[Sequence[int]], npt.NDArray[np.float32]]
"""Returns the rows that the first layer takes for n tokens, shape (n, n_embd); already scaled if the
architecture scales embeddings (Gemma)."""


class Branches(NamedTuple):
    """A tree of tokens as llama.cpp sees it: one sequence per leaf, in the order of the nodes."""

    depths: list[int]
    """Depth of each node; 0 directly below the token before the tree."""
    first_leaf: list[int]
    """Index of the first leaf at or below each node."""
    leaves: list[int]
    """Number of leaves at or below each node."""
    n_leaves: int


def find_branches(parents: Sequence[int]) -> Branches:
    """Return the tree in which node i follows node parents[i], -1 being the token before the tree.

    Raises ValueError when the nodes are not in depth-first pre-order.
    """
    n = len(parents)
    path: list[int] = []
    depths, first_leaf, n_leaves = [], [], 0
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent != -1:
            raise ValueError(f"parents[{node}] is {parent}: not in depth-first pre-order")
        depths.append(len(path))
        path.append(node)
        first_leaf.append(n_leaves)
        n_leaves += node + 1 == n or parents[node + 1] != node
    leaves = [0] * n
    for node in reversed(range(n)):
        leaves[node] = leaves[node] or 1
        if parents[node] >= 0:
            leaves[parents[node]] += leaves[node]
    return Branches(depths, first_leaf, leaves, n_leaves)


class Batch:
    """A `llama_batch` with null positions: a chain that continues sequence 0."""

    def __init__(self, tokens: object, **arrays: object) -> None:
        """`tokens`: an array of c_int32; None if embeddings are given instead."""
        self.struct = llama.llama_batch(token=tokens, **arrays)
        self.embd = self._pointer("embd")
        self.logits = self._pointer("logits")

    def _pointer(self, name: str) -> ctypes.c_void_p:
        field: Any = getattr(llama.llama_batch, name)  # at run time a ctypes field descriptor
        return ctypes.c_void_p.from_buffer(self.struct, field.offset)


class TreeBatch(Batch):
    """A `llama_batch` with positions and sequences: a chain, then a tree whose leaf i ends sequence i."""

    def __init__(self, tokens: object, n_batch: int, max_leaves: int) -> None:
        positions, n_sequences = (ctypes.c_int32 * n_batch)(), (ctypes.c_int32 * n_batch)()
        sequences = (ctypes.POINTER(ctypes.c_int32) * n_batch)()
        super().__init__(tokens, pos=positions, n_seq_id=n_sequences, seq_id=sequences)
        self._positions = np.frombuffer(memoryview(positions), np.int32)
        self._n_sequences = np.frombuffer(memoryview(n_sequences), np.int32)
        self._sequences = np.frombuffer(memoryview(sequences), np.uintp)
        self._numbers = (ctypes.c_int32 * max_leaves)(*range(max_leaves))

    def lay_out(self, branches: Branches, n_past: int, n_before: int) -> None:
        """Describe a pass of `n_before` tokens and then the tree, after `n_past` in the timeline.

        The leaves below a node have successive numbers, so its sequences are a slice of 0, 1, 2, ...
        """
        numbers = ctypes.addressof(self._numbers)
        n = n_before + len(branches.depths)
        self._positions[:n_before] = np.arange(n_past, n_past + n_before)
        self._positions[n_before:n] = np.array(branches.depths) + (n_past + n_before)
        self._n_sequences[:n_before] = branches.n_leaves
        self._n_sequences[n_before:n] = branches.leaves
        self._sequences[:n_before] = numbers
        self._sequences[n_before:n] = np.array(branches.first_leaf) * ctypes.sizeof(ctypes.c_int32) + numbers


class PassInput:
    """The input of a session's passes: tokens or their embeddings, and which of them need logits.

    One batch serves all passes without branches; its null `pos` and `seq_id` mean the next positions of
    sequence 0. `_flags` is n_batch zeros, then n_batch ones, and is never written: for logits of the last k
    of n tokens, `logits` points n - k zeros before the first one.
    """

    def __init__(
        self, n_batch: int, max_leaves: int, *, n_embd: int, embeddings: EmbeddingsFn | None
    ) -> None:
        """Prepare passes of up to `n_batch` tokens, and of trees of up to `max_leaves` leaves."""
        self._n_batch, self._max_leaves, self._n_embd = n_batch, max_leaves, n_embd
        self._embeddings = embeddings
        self._tokens = (ctypes.c_int32 * n_batch)()
        self._flags = (ctypes.c_int8 * (2 * n_batch))(*[0] * n_batch, *[1] * n_batch)
        self._first_one = ctypes.addressof(self._flags) + n_batch
        self._rows: npt.NDArray[np.float32] | None = None
        self.chain = Batch(self._tokens_in_use)

    @property
    def _tokens_in_use(self) -> object:
        return None if self._embeddings else self._tokens

    @cached_property
    def tree(self) -> TreeBatch:
        """The batch for passes with branches, made for the first of them."""
        return TreeBatch(self._tokens_in_use, self._n_batch, self._max_leaves)

    def fill(self, batch: Batch, tokens: Sequence[int], n_logits: int) -> None:
        """Put `tokens` into `batch`, and ask for logits of the last `n_logits`."""
        n = len(tokens)
        if self._embeddings is None:
            self._tokens[:n] = list(map(int, tokens))
        else:
            # An attribute keeps the array alive: the pass reads it in place.
            self._rows = np.ascontiguousarray(self._embeddings(tokens), np.float32)
            if self._rows.shape != (n, self._n_embd):
                raise ValueError(f"embeddings of shape {self._rows.shape}, not {(n, self._n_embd)}")
            batch.embd.value = self._rows.ctypes.data
        batch.struct.n_tokens = n
        batch.logits.value = self._first_one - (n - n_logits)
