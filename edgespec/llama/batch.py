"""What llama.cpp is given to decode: tokens or their embeddings, a chain or a tree of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from edgespec.llama.backend import llama


class Branches(NamedTuple):
    """A tree of tokens as llama.cpp sees it: a sequence for each leaf, in the order of the nodes."""

    depths: list[int]
    """Of each node; 0 below the token before the tree."""
    first_leaf: list[int]
    """Of the leaves that a node is above of, or is."""
    leaves: list[int]
    """How many these are."""
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
    """A `llama_batch` with null positions: a chain that goes on where sequence 0 ends."""

    def __init__(self, tokens: object, **arrays: object) -> None:
        """`tokens`: an array of c_int32; None where embeddings come in their place."""
        self.struct = llama.llama_batch(token=tokens, **arrays)
        self.embd = self._pointer("embd")
        self.logits = self._pointer("logits")

    def _pointer(self, name: str) -> ctypes.c_void_p:
        field: Any = getattr(llama.llama_batch, name)  # at run time a ctypes field, not what it describes
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

        The leaves below a node are neighbours, so a node's sequences are a piece of 0, 1, 2, ...
        """
        numbers = ctypes.addressof(self._numbers)
        n = n_before + len(branches.depths)
        self._positions[:n_before] = np.arange(n_past, n_past + n_before)
        self._positions[n_before:n] = np.array(branches.depths) + (n_past + n_before)
        self._n_sequences[:n_before] = branches.n_leaves
        self._n_sequences[n_before:n] = branches.leaves
        self._sequences[:n_before] = numbers
        self._sequences[n_before:n] = np.array(branches.first_leaf) * ctypes.sizeof(ctypes.c_int32) + numbers
