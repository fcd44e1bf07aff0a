"""How the sequences of a cache take tokens back: the only place that knows what kind of model it is.

    Cells    a model that only attends has a cell for each token: those of the last tokens are freed
    States   a recurrent or hybrid model keeps a state that every token changes (states.py)

A sequence is a sequence of llama.cpp. What takes tokens back may need more of them, beside the sequences':

    sequence   0 .. n_sequences - 1           the sequences
               n_sequences .. + n_spare - 1   spare ones: leaves of trees, or earlier states
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import SequenceTokens
from edgespec.llama.backend import llama

State: TypeAlias = npt.NDArray[np.uint8]
"""A copy of the cache of a sequence, or only of its recurrent state, as the library writes it."""

MAX_SEQUENCES = 256
"""Most sequences of llama.cpp."""


def bytes_of(state: State) -> ctypes._Pointer[ctypes.c_uint8]:
    """Return the buffer of a copy, as the library takes it."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@dataclass(frozen=True, slots=True)
class RollbackSize:
    """Room that a cache sets aside to take tokens back where a model keeps a state; others need none."""

    n_snapshots: int = 0
    """Tokens of one pass that can be taken back at once; only where the library keeps snapshots, else 0."""
    n_marks: int = 1
    """Without snapshots: earlier states of a text that it can go back to. One serves passes that draft, after
    of each the text continues from its end or from its beginning; a draft model, whose passes have a
    token each, needs more."""
    n_kept: int = 0
    """Sequences that are only kept, and so need no marks."""

    def marks_each(self, n_sequences: int) -> int:
        """Return how many marks each text under way has, of `n_sequences` with those that are kept."""
        n_running = max(1, n_sequences - self.n_kept)
        return 0 if self.n_snapshots else min(self.n_marks, (MAX_SEQUENCES - n_sequences) // n_running)

    def n_states(self, n_sequences: int) -> int:
        """Return how many states a cache of `n_sequences` has room for."""
        n_marks = self.marks_each(n_sequences) * (n_sequences - self.n_kept)
        return n_sequences * (1 + self.n_snapshots) + n_marks


class Rollback(ABC):
    """Takes tokens back, for all sequences of a cache: the base of `Cells` and `States`."""

    n_snapshots = 0
    """Snapshots that the library must keep of each sequence."""
    n_spare = 0
    """Sequences that it needs beside the sequences'."""
    most_drafted: int | None = None
    """Most tokens of a pass that can be taken back without reading others again; None: any number."""

    _context: llama.llama_context_p
    _memory: object

    def __init__(self, n_sequences: int) -> None:
        self._n_sequences = n_sequences

    def attach(self, context: llama.llama_context_p) -> None:
        """Work on this context from now on."""
        self._context, self._memory = context, llama.llama_get_memory(context)

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        return int(llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def n_dropped(self, sequence: int) -> int:
        """Return how many of a sequence's first tokens are not in the cache any more."""
        return 0

    def drop_first(self, sequence: int, n_tokens: int) -> bool:
        """Free the cells of the first `n_tokens` of more; return whether that can be done.

        Those that remain keep their positions. What follows attends only to them.
        """
        return False

    def _remove(self, sequence: int, n_keep: int) -> bool:
        """Remove all but the first `n_keep` tokens of a sequence; return whether the library could."""
        return bool(llama.llama_memory_seq_rm(self._memory, sequence, n_keep or -1, -1))

    # ---- what is asked of it ----

    def n_reachable(self, sequence: int, n_keep: int) -> int:
        """Return how many tokens `cut` would leave."""
        return min(n_keep, self.n_past(sequence))

    @abstractmethod
    def cut(self, sequence: int, n_keep: int) -> int:
        """Cut a sequence back to `n_keep` tokens, or to the next possible number below; return how many."""

    @abstractmethod
    def share(self, source: int, sequence: int, n_tokens: int) -> int:
        """Let the empty sequence `sequence` begin as `source` does; return with how many tokens.

        With the first `n_tokens`, or the next possible number below.
        """

    # ---- what it is told ----

    def begin(self, parts: Sequence[SequenceTokens]) -> None:  # noqa: B027 - most need not know
        """Prepare to undo the passes that append `parts`."""

    def begin_pass(self, parts: Sequence[SequenceTokens]) -> bool:
        """Note that one of these passes begins; return whether it may be broken off in its middle."""
        return True

    def break_off(self) -> None:  # noqa: B027
        """Note that the pass under way ended in its middle."""

    @abstractmethod
    def undo(self, parts: Sequence[SequenceTokens]) -> None:
        """Make sequences as they were before passes that added this, all of it or a part.

        If that is impossible, a sequence may end with the first of the tokens that were to stay, or
        become empty.
        """

    def clear(self) -> None:
        """Empty all sequences; sessions stay open."""
        llama.llama_memory_clear(self._memory, False)

    # ---- earlier places to continue from ----

    def stop_before(self, sequence: int, n_past: int, n_tokens: int) -> int:
        """Return how many of `n_tokens` that are to be read to read first."""
        return n_tokens

    def keep(self, sequence: int) -> None:  # noqa: B027
        """Make it possible for `cut` to go back to where a sequence is now, whatever it reads."""

    def keep_at(self, sequence: int, places: Sequence[int]) -> None:  # noqa: B027
        """Make it possible for `cut` to go back to these numbers of tokens, once they are read."""

    def rest(self, sequence: int) -> None:  # noqa: B027
        """Free what only a sequence under way needs; this one is kept as it is."""

    def copies(self, sequence: int) -> dict[int, State]:
        """Return the kept states of a sequence by their number of tokens, for `adopt`."""
        return {}

    def adopt(self, sequence: int, copies: Mapping[int, State]) -> None:  # noqa: B027
        """Take over the kept states of a sequence that moved here from another cache."""


class Cells(Rollback):
    """A model that only attends: a token's cell is freed, and a tree's leaves share the cells before it."""

    def __init__(self, n_sequences: int, n_leaves: int) -> None:
        """Serve trees of up to `n_leaves` leaves in a pass: a spare sequence for each but the trunk."""
        super().__init__(n_sequences)
        self.n_spare = n_leaves - 1
        self._sides = [-1] * self.n_spare  # whose cells each spare sequence shares; -1: nobody's
        self._has_branches = False  # in the cache: Ctrl-C may come right after a tree's pass

    def n_dropped(self, sequence: int) -> int:
        """Return the position of the first cell."""
        return max(0, int(llama.llama_memory_seq_pos_min(self._memory, sequence)))

    def drop_first(self, sequence: int, n_tokens: int) -> bool:
        """Free the cells of the first, also those that leaves of trees share."""
        sides = (self._n_sequences + i for i, owner in enumerate(self._sides) if owner == sequence)
        removed = [llama.llama_memory_seq_rm(self._memory, one, 0, n_tokens) for one in (sequence, *sides)]
        return all(removed)

    def cut(self, sequence: int, n_keep: int) -> int:
        """Free the cells of the others; all of them, where none of the first `n_keep` is left."""
        n_keep = min(n_keep, self.n_past(sequence))
        if n_keep <= self.n_dropped(sequence):
            n_keep = 0
        if not self._remove(sequence, n_keep):
            n_keep = 0
            self._remove(sequence, n_keep)
        for i, owner in enumerate(self._sides):
            if owner == sequence:
                self._remove(self._n_sequences + i, n_keep)
        return n_keep

    def share(self, source: int, sequence: int, n_tokens: int) -> int:
        """Let both have the same cells, unless the first are gone."""
        if self.n_dropped(source):
            return 0
        llama.llama_memory_seq_cp(self._memory, source, sequence, 0, n_tokens)
        return n_tokens

    def begin(self, parts: Sequence[SequenceTokens]) -> None:
        """Drop branches that an interrupted pass left."""
        if self._has_branches:
            self._drop_branches()

    def undo(self, parts: Sequence[SequenceTokens]) -> None:
        """Free the cells that were added."""
        for part in parts:
            self.cut(part.sequence, part.n_past)
        if self._has_branches:
            self._drop_branches()

    def side(self, sequence: int, i: int, n_past: int) -> int:
        """Let spare sequence `i` share all of a sequence of `n_past` tokens; return its number.

        It keeps sharing between trees: sharing and dropping 2000 cells takes 0.13 ms per sequence; sharing
        only those new since the last tree takes 5 us.
        """
        if i >= self.n_spare:
            raise ValueError(f"trees of more than {self.n_spare + 1} leaves in one pass")
        side = self._n_sequences + i
        if self._sides[i] != sequence:
            llama.llama_memory_seq_rm(self._memory, side, -1, -1)
            self._sides[i] = sequence
        n_shared = llama.llama_memory_seq_pos_max(self._memory, side) + 1
        llama.llama_memory_seq_cp(self._memory, sequence, side, n_shared, n_past)
        self._has_branches = True
        return side

    def drop_tree(self, sides: Sequence[int], n_keep: int) -> None:
        """Drop of a tree that was evaluated all beside its trunk; it came after `n_keep` tokens."""
        for side in sides:
            llama.llama_memory_seq_rm(self._memory, side, n_keep, -1)

    def end_trees(self) -> None:
        """Note that all trees of a pass were dropped."""
        self._has_branches = False

    @contextmanager
    def lent(self, sequence: int, start: int, stop: int) -> Iterator[int]:
        """Let a spare sequence share the cells of a sequence's tokens `start` .. `stop` - 1, in the block.

        Yields its number. There must be one: `n_spare`.
        """
        side = self._n_sequences
        self._sides[0] = -1
        self._remove(side, 0)
        llama.llama_memory_seq_cp(self._memory, sequence, side, start, stop)
        try:
            yield side
        finally:
            self._remove(side, 0)

    def _drop_branches(self) -> None:
        for i in range(self.n_spare):
            llama.llama_memory_seq_rm(self._memory, self._n_sequences + i, -1, -1)
            self._sides[i] = -1
        self._has_branches = False
