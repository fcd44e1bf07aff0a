"""The input of llama.cpp's decode: tokens of sequences, chains or trees of them, or their embeddings."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import Branches, Inputs, SequenceTokens
from edgespec.llama.backend import llama

EmbeddingsFn = Callable[[Sequence[int]], npt.NDArray[np.float32] | None]
"""Returns the rows that the first layer takes for n tokens, shape (n, n_embd); already scaled if the
architecture scales embeddings (Gemma). For a head: the target's hidden states; None where it takes tokens
alone."""

_MOST_POSITIONS = 4  # of a row: GGML_MROPE_SECTIONS


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
        self.token = self._pointer("token")
        self.embd = self._pointer("embd")
        self.logits = self._pointer("logits")

    def _pointer(self, name: str) -> ctypes.c_void_p:
        field: Any = getattr(llama.llama_batch, name)  # at run time a ctypes field descriptor
        return ctypes.c_void_p.from_buffer(self.struct, field.offset)


class PartsBatch(Batch):
    """A `llama_batch` with positions and sequences: tokens of several sequences, one after the other."""

    def __init__(self, tokens: object, n_batch: int, n_sequences: int) -> None:
        # For rows in place of tokens some models read that many positions; what counts is the first.
        positions = (ctypes.c_int32 * (_MOST_POSITIONS * n_batch))()
        n_of = (ctypes.c_int32 * n_batch)()
        sequences = (ctypes.POINTER(ctypes.c_int32) * n_batch)()
        super().__init__(tokens, pos=positions, n_seq_id=n_of, seq_id=sequences)
        self._positions = np.frombuffer(memoryview(positions), np.int32)
        self._n_of = np.frombuffer(memoryview(n_of), np.int32)
        self._sequences = np.frombuffer(memoryview(sequences), np.uintp)
        self._numbers = np.zeros(n_sequences, np.int32)
        self._flags = np.zeros(n_batch, np.int8)
        self.flags = self._flags.ctypes.data

    def lay_out(self, parts: Sequence[SequenceTokens], *, all_logits: bool) -> int:
        """Describe a pass of these parts; return of how many tokens it computes the logits.

        The leaves below a node have successive places among the part's sequences, so that the node's own are
        a slice of them.
        """
        address, size = self._numbers.ctypes.data, self._numbers.itemsize
        positions: list[int] = []
        n_of: list[int] = []
        places: list[int] = []
        flags: list[int] = []
        numbers: list[int] = []
        for part in parts:
            first = address + len(numbers) * size
            numbers += (part.sequence, *part.leaves)
            tree, n_before, n_tokens = part.branches, part.n_chain, len(part.tokens)
            n_logits = n_tokens if all_logits else part.n_logits
            positions += range(part.n_past, part.n_past + n_before)
            n_of += [1 + len(part.leaves)] * n_before
            places += [first] * n_before
            flags += [0] * (n_tokens - n_logits) + [1] * n_logits
            if tree:
                positions += [part.n_past + n_before + depth for depth in tree.depths]
                n_of += tree.leaves
                places += [first + leaf * size for leaf in tree.first_leaf]
        n = len(positions)
        self._numbers[: len(numbers)] = numbers
        self._positions[:n], self._n_of[:n], self._sequences[:n] = positions, n_of, places
        self._flags[:n] = flags
        return sum(flags)


class PassInput:
    """The input of a cache's passes: tokens or their embeddings, and which of them need logits.

    One batch serves all chains of sequence 0; its null `pos` and `seq_id` mean the next positions of it.
    `_flags` is n_batch zeros, then n_batch ones, and is never written: for logits of the last k
    of n tokens, `logits` points n - k zeros before the first one.
    """

    def __init__(
        self,
        n_batch: int,
        n_sequences: int,
        *,
        n_embd: int,
        embeddings: EmbeddingsFn | None,
        takes_inputs: bool = False,
        with_tokens: bool = False,
        tokens_alone: bool = False,
    ) -> None:
        """Prepare passes of up to `n_batch` tokens of up to `n_sequences` sequences.

        `takes_inputs`: each pass brings the rows for its tokens. `with_tokens`: rows come beside the tokens,
        not in their place; `tokens_alone`: or a pass is of the one or the other.
        """
        self._n_batch, self._n_sequences, self._n_embd = n_batch, n_sequences, n_embd
        self._embeddings = embeddings
        self._takes_rows = takes_inputs or embeddings is not None
        self._takes_tokens = with_tokens or not self._takes_rows
        self._tokens_alone = tokens_alone
        self._tokens = (ctypes.c_int32 * n_batch)()
        self._packed = memoryview(self._tokens).cast("B").cast("i")
        self._flags = (ctypes.c_int8 * (2 * n_batch))(*[0] * n_batch, *[1] * n_batch)
        self._first_one = ctypes.addressof(self._flags) + n_batch
        self._rows: npt.NDArray[np.float32] | None = None
        self.chain = Batch(self._tokens_in_use)

    @property
    def _tokens_in_use(self) -> object:
        return self._tokens if self._takes_tokens else None

    @cached_property
    def parts(self) -> PartsBatch:
        """The batch for all other passes, made for the first of them."""
        return PartsBatch(self._tokens_in_use, self._n_batch, self._n_sequences)

    def fill(
        self, batch: Batch, tokens: Sequence[int], n_logits: int | None, inputs: Inputs | None = None
    ) -> None:
        """Put `tokens`, or `inputs` in their place or beside them, into `batch`.

        Logits are asked for of the last `n_logits`; None: as it is laid out.
        """
        n = len(tokens)
        if self._takes_tokens:
            self._packed[:n] = array("i", tokens)
        if self._takes_rows and inputs is None and self._embeddings:
            inputs = self._embeddings(tokens)
        if self._tokens_alone:
            batch.token.value = ctypes.addressof(self._tokens) if inputs is None else None
        if inputs is None and self._tokens_alone:
            batch.embd.value = None
        elif self._takes_rows:
            if inputs is None:
                raise ValueError("a pass without the rows for its tokens")
            # An attribute keeps the array alive: the pass reads it in place.
            self._rows = np.ascontiguousarray(inputs, np.float32)
            if self._rows.shape != (n, self._n_embd):
                raise ValueError(f"embeddings of shape {self._rows.shape}, not {(n, self._n_embd)}")
            batch.embd.value = self._rows.ctypes.data
        batch.struct.n_tokens = n
        if n_logits is None:
            batch.logits.value = self.parts.flags
        else:
            batch.logits.value = self._first_one - (n - n_logits)
