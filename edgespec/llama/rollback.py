"""How the sequences of a cache are rewound: the only place that distinguishes kinds of models.

    Rollback   a model with only attention has a cell for each token: those of the last tokens are freed
    States     a recurrent or hybrid model has a state that every token changes (below)

A sequence is a sequence of llama.cpp. Rewinding may need spare ones in addition:

    sequence   0 .. n_sequences - 1           the sequences
               n_sequences .. + n_spare - 1   spare ones: leaves of trees, or earlier states
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgespec.decoding.session import Folded, SequenceTokens, begins_span, n_positions
from edgespec.llama.backend import llama

State: TypeAlias = npt.NDArray[np.uint8]
"""A copy of the cache of a sequence, or only of its recurrent state, as the library writes it."""

MAX_SEQUENCES = 256
"""Most sequences of llama.cpp."""


def bytes_of(state: State) -> ctypes._Pointer[ctypes.c_uint8]:
    """Return the buffer of a copy in the library's form."""
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class RollbackSize(msgspec.Struct, frozen=True):
    """Room that a cache reserves for rewinding a model with a recurrent state; others need none."""

    n_snapshots: int = 0
    """Tokens of one pass that can be removed at once; 0 unless the library keeps snapshots."""
    n_marks: int = 1
    """Without snapshots: earlier states of a text that it can go back to. One serves passes that draft, after
    of each the text continues from its end or from its beginning; a draft model, whose passes have a
    token each, needs more."""
    n_kept: int = 0
    """Sequences that are only kept, and so need no marks."""

    def marks_each(self, n_sequences: int) -> int:
        """Return how many marks each text under way has; `n_sequences` include kept ones."""
        n_running = max(1, n_sequences - self.n_kept)
        return 0 if self.n_snapshots else min(self.n_marks, (MAX_SEQUENCES - n_sequences) // n_running)

    def n_states(self, n_sequences: int) -> int:
        """Return how many states a cache of `n_sequences` has room for."""
        n_marks = self.marks_each(n_sequences) * (n_sequences - self.n_kept)
        return n_sequences * (1 + self.n_snapshots) + n_marks


class Rollback:
    """Rewinds the sequences of a cache; a tree's leaves share the cells before it."""

    n_snapshots = 0
    """Snapshots that the library must keep of each sequence."""
    most_drafted: int | None = None
    """Most tokens of a pass that can be removed without reading others again; None: any number."""

    _context: llama.llama_context_p
    _memory: object

    def __init__(self, n_sequences: int, n_leaves: int = 1) -> None:
        """Serve trees of up to `n_leaves` leaves per pass: a spare sequence for each but the trunk's."""
        self._n_sequences = n_sequences
        self.n_spare = n_leaves - 1
        """Spare sequences that it needs in addition."""
        self._sides = [-1] * self.n_spare  # whose cells each spare sequence shares; -1: nobody's
        self._has_branches = False  # in the cache: Ctrl-C may come right after a tree's pass
        self._folded: dict[int, list[Folded]] = {}  # by sequence: where positions are not numbers of tokens

    def attach(self, context: llama.llama_context_p) -> None:
        """Work on this context from now on."""
        self._context, self._memory = context, llama.llama_get_memory(context)

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        n = int(llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1
        for span in reversed(self._folded.get(sequence, ())):
            if n > span.position:
                return span.end + max(0, n - span.position - span.n_positions)
        return n

    def position(self, sequence: int, n_tokens: int) -> int:
        """Return the position after the first `n_tokens` of a sequence."""
        for span in reversed(self._folded.get(sequence, ())):
            if n_tokens > span.start:
                return span.position + max(0, span.n_positions + n_tokens - span.end)
        return n_tokens

    def place(self, part: SequenceTokens) -> None:
        """Note the position of a part: if it continues a folded span, that of the span's first row."""
        spans = self._folded.get(part.sequence)
        if spans and part.places is not None and not begins_span(part.tokens[0]):
            part.position = spans[-1].position
        else:
            part.position = self.position(part.sequence, part.n_past)

    def note_rows(self, part: SequenceTokens) -> None:
        """Note that rows with places of their own were read."""
        spans, n = self._folded.setdefault(part.sequence, []), len(part.tokens)
        read = Folded(part.n_past, part.n_past + n, part.position, n_positions(part.tokens))
        if not begins_span(part.tokens[0]):
            last = spans.pop()
            read = Folded(last.start, read.end, last.position, last.n_positions + read.n_positions)
        spans.append(read)

    def fold(self, sequence: int, spans: list[Folded]) -> None:
        """Note where the positions of a sequence's tokens are not their numbers."""
        self._folded[sequence] = spans

    def _before(self, sequence: int, n_keep: int) -> int:
        """Return `n_keep`, or the start of the folded span that it would cut."""
        spans = self._folded.get(sequence, ())
        return next((span.start for span in spans if span.start < n_keep < span.end), n_keep)

    def _remove(self, sequence: int, n_keep: int) -> bool:
        """Remove all but the first `n_keep` tokens of a sequence; return whether the library could."""
        start = self.position(sequence, n_keep)
        if sequence in self._folded:
            self.fold(sequence, [span for span in self._folded[sequence] if span.end <= n_keep])
        return bool(llama.llama_memory_seq_rm(self._memory, sequence, start or -1, -1))

    def n_dropped(self, sequence: int) -> int:
        """Return how many of a sequence's first tokens are no longer in the cache."""
        return max(0, int(llama.llama_memory_seq_pos_min(self._memory, sequence)))

    def drop_first(self, sequence: int, n_tokens: int) -> bool:
        """Free the cells of the first `n_tokens`, but not of all; return whether that is possible.

        The others keep their positions, and later tokens attend only to them.
        """
        sides = (self._n_sequences + i for i, owner in enumerate(self._sides) if owner == sequence)
        removed = [llama.llama_memory_seq_rm(self._memory, one, 0, n_tokens) for one in (sequence, *sides)]
        return all(removed)

    def n_reachable(self, sequence: int, n_keep: int) -> int:
        """Return how many tokens `cut` would leave."""
        return self._before(sequence, min(n_keep, self.n_past(sequence)))

    def cut(self, sequence: int, n_keep: int) -> int:
        """Cut a sequence back to `n_keep` tokens, or to the next possible number below; return how many."""
        n_keep = self._before(sequence, min(n_keep, self.n_past(sequence)))
        if n_keep <= self.n_dropped(sequence):
            n_keep = 0
        start = self.position(sequence, n_keep)
        if not self._remove(sequence, n_keep):
            n_keep = start = 0
            self._remove(sequence, n_keep)
        for i, owner in enumerate(self._sides):
            if owner == sequence:
                llama.llama_memory_seq_rm(self._memory, self._n_sequences + i, start or -1, -1)
        return n_keep

    def share(self, source: int, sequence: int, n_tokens: int) -> int:
        """Let the empty `sequence` share the first tokens of `source`; return how many.

        They are the first `n_tokens`, or the next possible number below: none, if the first are gone.
        """
        if self.n_dropped(source):
            return 0
        n_tokens = self._before(source, n_tokens)
        self._share_cells(source, sequence, n_tokens)
        return n_tokens

    def _share_cells(self, source: int, sequence: int, n_tokens: int) -> None:
        llama.llama_memory_seq_cp(self._memory, source, sequence, 0, self.position(source, n_tokens))
        if source in self._folded:
            self.fold(sequence, [span for span in self._folded[source] if span.end <= n_tokens])

    def clear(self) -> None:
        """Empty all sequences; sessions stay open."""
        self._folded.clear()
        llama.llama_memory_clear(self._memory, False)

    # ---- passes ----

    def begin(self, parts: Sequence[SequenceTokens]) -> None:
        """Prepare to undo the passes that append `parts`; drop branches that an interrupted one left."""
        if self._has_branches:
            self._drop_branches()

    def begin_pass(self, parts: Sequence[SequenceTokens]) -> bool:
        """Note that one of these passes begins; return whether it may be interrupted in its middle."""
        return True

    def break_off(self) -> None:
        """Note that the pass under way was interrupted."""

    def undo(self, parts: Sequence[SequenceTokens]) -> None:
        """Restore the sequences to the state before passes that appended these parts, wholly or partly.

        If that is impossible, a sequence may end with the first of the tokens to be kept, or become empty.
        """
        for part in parts:
            self.cut(part.sequence, part.n_past)
        if self._has_branches:
            self._drop_branches()

    # ---- spare sequences, which share cells of others ----

    def side(self, sequence: int, i: int, position: int) -> int:
        """Let spare sequence `i` share all of a sequence that ends before `position`; return its number.

        The sharing continues between trees: sharing and dropping 2000 cells takes 0.13 ms per sequence,
        sharing only the new ones since the last tree 5 us.
        """
        if i >= self.n_spare:
            raise ValueError(f"trees of more than {self.n_spare + 1} leaves in one pass")
        side = self._n_sequences + i
        if self._sides[i] != sequence:
            llama.llama_memory_seq_rm(self._memory, side, -1, -1)
            self._sides[i] = sequence
        n_shared = llama.llama_memory_seq_pos_max(self._memory, side) + 1
        llama.llama_memory_seq_cp(self._memory, sequence, side, n_shared, position)
        self._has_branches = True
        return side

    def drop_trees(self, parts: Sequence[SequenceTokens]) -> None:
        """Drop all of the evaluated trees except their trunks."""
        if self._has_branches:
            for part in parts:
                for side in part.leaves:
                    llama.llama_memory_seq_rm(self._memory, side, part.position + part.n_chain, -1)
            self._has_branches = False

    def _drop_branches(self) -> None:
        for i in range(self.n_spare):
            llama.llama_memory_seq_rm(self._memory, self._n_sequences + i, -1, -1)
            self._sides[i] = -1
        self._has_branches = False

    # ---- earlier places to continue from: where a model only attends, all are ----

    def stop_before(self, sequence: int, n_past: int, n_tokens: int) -> int:
        """Return how many of the next `n_tokens` to read in the first pass."""
        return n_tokens

    def checkpoint(self, sequence: int) -> None:
        """Make sure that `cut` can go back to a sequence's present length, whatever it reads."""

    def checkpoint_at(self, sequence: int, places: Sequence[int]) -> None:
        """Make sure that `cut` can go back to these lengths, once they are read."""

    def rest(self, sequence: int) -> None:
        """Free what only a sequence under way needs; this one ended and is kept."""

    def copies(self, sequence: int) -> dict[int, State]:
        """Return the kept states of a sequence by their number of tokens, for `adopt`."""
        return {}

    def adopt(self, sequence: int, copies: Mapping[int, State]) -> None:
        """Take over the kept states of a sequence that moved here from another cache."""


# ---- recurrent and hybrid models, which keep a state that every token changes ----
#
# A state cannot be cut: an earlier one must be at hand. There are three kinds, all of the pinned llama.cpp:
#
# snapshots   With `n_rs_seq` = n a pass also leaves the state after each of its last n + 1 tokens. So up to n
#             tokens can be taken back, but fewer than the pass had: the state before it is not among them
#             (the library says yes to that as well, and continues from an older one). Only once after a pass:
#             then another pass must come. 1 + n states of memory for each sequence; only some architectures
#             (gguf_header.SNAPSHOTS).
# marks       A spare sequence is told to share the state (`llama_memory_seq_cp`). The next pass sees that it
#             is shared, reads it where it is and writes the new one to another place: nothing is copied and
#             nothing is computed twice. A state of memory for each mark; all architectures.
# copies      The state in memory of our own (`llama_state_seq_get_data_ext`): copied there and back. For
#             places that are gone back to much later, and before long passes, which Ctrl-C may break off.
#
# With snapshots a verified draft costs no pass more than with cells. With marks the accepted tokens of a
# draft that was not wholly accepted are read again, together with the next ones.
#
# The attention layers of a hybrid model have cells as in other models. `llama_memory_seq_rm` takes both back,
# the state first, and changes nothing where it cannot.

LONG = 64
"""Number of tokens from which a pass may be interrupted: copying the state before it then costs little."""

MOST_COPIES = 2
"""Most copies of states for each sequence: the one after the fewest tokens, and the last."""

_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without the cells of attention


class _SequenceStates(msgspec.Struct):
    """The earlier states of a sequence. The keys are numbers of tokens."""

    marks: dict[int, int] = msgspec.field(default_factory=dict)
    """Spare sequences that hold states."""
    copies: dict[int, State] = msgspec.field(default_factory=dict)
    undo: tuple[int, State] | None = None
    """The state before the pass under way, if it is long."""
    last: SequenceTokens | None = None
    """The last pass, if its snapshots are still right."""
    wanted: list[int] = msgspec.field(default_factory=list)
    """Where copies are to be made."""


class States(Rollback):
    """Rewinds by copies of states, for models without a cell for each token."""

    def __init__(self, n_sequences: int, size: RollbackSize, *, has_snapshots: bool) -> None:
        """`has_snapshots`: whether the library keeps snapshots for this architecture."""
        super().__init__(n_sequences)
        if not has_snapshots:
            size = replace(size, n_snapshots=0)
        self.n_snapshots = size.n_snapshots
        self._marks_each = size.marks_each(n_sequences)
        self.n_spare = self._marks_each * (n_sequences - size.n_kept)
        if self.n_snapshots:
            self.most_drafted = self.n_snapshots
        self._spare = list(range(n_sequences, n_sequences + self.n_spare))
        self._lines = [_SequenceStates() for _ in range(n_sequences)]
        self._broken: list[int] = []  # sequences of a pass that ended in its middle

    def n_past(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""
        for broken in self._broken:  # only if `undo` was interrupted too
            self._go_to(broken, 0)
        self._broken = []
        return super().n_past(sequence)

    def n_dropped(self, sequence: int) -> int:
        """Return 0: the first tokens cannot be dropped."""
        return 0

    def drop_first(self, sequence: int, n_tokens: int) -> bool:
        """Return False: a state depends on all tokens."""
        return False

    def n_reachable(self, sequence: int, n_keep: int) -> int:
        """Return the number of tokens of the newest state after at most `n_keep`."""
        line, n_past = self._lines[sequence], self.n_past(sequence)
        if n_keep >= n_past:
            return n_past
        if n_past - n_keep <= self._n_back(line, n_past):
            return n_keep
        return max((n for n in (*line.marks, *line.copies) if n <= n_keep), default=0)

    def _n_back(self, line: _SequenceStates, n_past: int) -> int:
        last = line.last
        if last is None or last.n_past + len(last.tokens) != n_past:
            return 0
        return min(self.n_snapshots, len(last.tokens) - 1)

    def cut(self, sequence: int, n_keep: int) -> int:
        """Go back to the newest state after at most `n_keep` tokens."""
        line, n_past = self._lines[sequence], self.n_past(sequence)
        n = self.n_reachable(sequence, n_keep)
        if n == n_past and n:
            return n
        by_snapshot = n and n_past - n <= self._n_back(line, n_past)
        self._forget_after(line, n)
        if by_snapshot and self._remove(sequence, n):
            return n
        return self._go_to(sequence, n)

    def _go_to(self, sequence: int, n: int) -> int:
        """Restore the state of a mark or copy after `n` tokens, or none; return its number of tokens."""
        line = self._lines[sequence]
        if n in line.marks:
            llama.llama_memory_seq_cp(self._memory, line.marks[n], sequence, 0, 0)
        elif n in line.copies and not self._restore(sequence, line.copies[n]):
            n = 0
        if n and self._remove(sequence, n) and super().n_past(sequence) == n:
            return n
        self._forget_after(line, 0)
        self._remove(sequence, 0)
        return 0

    def _forget_after(self, line: _SequenceStates, n: int) -> None:
        line.last = None
        for place in [place for place in line.marks if place > n or not n]:
            self._free(line.marks.pop(place))
        line.copies = {place: copy for place, copy in line.copies.items() if 0 < place <= n}
        if not n:
            line.undo, line.wanted = None, []

    def share(self, source: int, sequence: int, n_tokens: int) -> int:
        """Let both have the same cells, and the empty one a copy of the state."""
        line = self._lines[source]
        known = (self.n_past(source), *line.marks, *line.copies)
        n = max((n for n in known if n <= n_tokens), default=0)
        if not n:
            return 0
        state = line.copies[n] if n in line.copies else self._copy(line.marks.get(n, source))
        self._share_cells(source, sequence, n)
        self._lines[sequence].copies = {place: copy for place, copy in line.copies.items() if place <= n}
        return n if self._restore(sequence, state) else self.cut(sequence, 0)

    # ---- passes ----

    def begin(self, parts: Sequence[SequenceTokens]) -> None:
        """Mark or copy the states before these passes, if they may have to be restored."""
        for part in parts:
            line, n_past = self._lines[part.sequence], part.n_past
            line.undo = None
            if not n_past:
                continue
            if self._marks_each > 1 or (self._marks_each and part.n_drafted):
                self._mark(part.sequence, n_past)
            if len(part.tokens) >= LONG and n_past not in line.marks and n_past not in line.copies:
                line.undo = n_past, self._copy(part.sequence)

    def begin_pass(self, parts: Sequence[SequenceTokens]) -> bool:
        """Note which snapshots the pass makes; only a long one may be interrupted."""
        for line in self._lines:  # states of others may be moved, and their snapshots are not
            line.last = None
        for part in parts:
            self._checkpoint_wanted(part)
            self._lines[part.sequence].last = part
        self._broken = []
        return sum(len(part.tokens) for part in parts) >= LONG

    def break_off(self) -> None:
        """Trust no state that the pass wrote."""
        self._broken = [sequence for sequence, line in enumerate(self._lines) if line.last]
        for line in self._lines:
            line.last = None

    def undo(self, parts: Sequence[SequenceTokens]) -> None:
        """Go back to the states before; or leave the tokens that were to stay."""
        if len(self._broken) > 1:  # it may have moved states of all sequences
            self._broken = list(range(self._n_sequences))
            return  # the next look at one of them empties all
        for part in parts:
            line = self._lines[part.sequence]
            if line.undo and line.undo[0] == part.n_past:
                line.copies[part.n_past] = line.undo[1]
            if self._broken:
                n = max((n for n in (*line.marks, *line.copies) if n <= part.n_past), default=0)
                self._forget_after(line, n)
                self._go_to(part.sequence, n)
                self._broken = []
            elif (n_past := self.n_past(part.sequence)) > part.n_past:
                self.cut(part.sequence, self._best_end(part, n_past))
            if line.undo:
                line.copies.pop(line.undo[0], None)
                line.undo = None

    def _best_end(self, part: SequenceTokens, n_past: int) -> int:
        if self.n_reachable(part.sequence, part.n_past) == part.n_past:
            return part.n_past
        n_true = min(n_past, part.n_past + len(part.tokens) - part.n_drafted)
        return n_true if self.n_reachable(part.sequence, n_true) == n_true else part.n_past

    def clear(self) -> None:
        """Empty all sequences, and free all marks."""
        for line in self._lines:
            self._forget_after(line, 0)
        super().clear()

    # ---- marks ----

    def _mark(self, sequence: int, n_past: int) -> None:
        """Let a spare sequence share the state of a sequence, if one is free."""
        line = self._lines[sequence]
        if n_past in line.marks:
            return
        if len(line.marks) >= self._marks_each:
            self._free(line.marks.pop(self._least_useful(line, n_past)))
        if self._spare:
            spare = self._spare.pop()  # noted when it is one: Ctrl-C may come between any two lines
            # An empty range of cells: attention need not know of a mark.
            llama.llama_memory_seq_cp(self._memory, sequence, spare, 0, 0)
            line.marks[n_past] = spare

    def _least_useful(self, line: _SequenceStates, n_past: int) -> int:
        """Return the mark whose neighbours are closest, relative to their distance from the sequence's end.

        So marks thin out with distance: going back d tokens reads at most 2 d again.
        """
        ends = [0, *sorted(line.marks), n_past]
        return min(line.marks, key=lambda n: (ends[(i := ends.index(n)) + 1] - ends[i - 1]) / (n_past - n))

    def _free(self, spare: int) -> None:
        llama.llama_memory_seq_rm(self._memory, spare, -1, -1)
        self._spare.append(spare)

    # ---- copies ----

    def _copy(self, sequence: int) -> State:
        """Return a copy of the state of a sequence."""
        size = llama.llama_state_seq_get_size_ext(self._context, sequence, _STATE_ONLY)
        state: State = np.empty(size, np.uint8)
        llama.llama_state_seq_get_data_ext(self._context, bytes_of(state), size, sequence, _STATE_ONLY)
        return state

    def _restore(self, sequence: int, state: State) -> bool:
        """Restore a sequence's state from a copy; return whether the library could."""
        n = llama.llama_state_seq_set_data_ext(
            self._context, bytes_of(state), state.nbytes, sequence, _STATE_ONLY
        )
        return bool(n == state.nbytes)

    def stop_before(self, sequence: int, n_past: int, n_tokens: int) -> int:
        """Stop where a copy is wanted."""
        stops = (n - n_past for n in self._lines[sequence].wanted)
        return min((n for n in stops if 0 < n < n_tokens), default=n_tokens)

    def _checkpoint_wanted(self, part: SequenceTokens) -> None:
        line, end = self._lines[part.sequence], part.n_past + len(part.tokens)
        if any(n < end for n in line.wanted):
            line.wanted = [n for n in line.wanted if n >= end]
            self.checkpoint(part.sequence)

    def checkpoint(self, sequence: int) -> None:
        """Copy the state; of too many copies, one that is neither the first nor the last is freed."""
        line, n_past = self._lines[sequence], self.n_past(sequence)
        if n_past and n_past not in line.copies:
            line.copies[n_past] = self._copy(sequence)
            while len(line.copies) > MOST_COPIES:
                del line.copies[sorted(line.copies)[1]]

    def checkpoint_at(self, sequence: int, places: Sequence[int]) -> None:
        """Note the lengths at which a sequence's state is to be copied when it reads on."""
        n_past = self.n_past(sequence)
        self._lines[sequence].wanted = [n for n in places if n > n_past]

    def rest(self, sequence: int) -> None:
        """Free the marks of a sequence that is not under way; its last state stays."""
        line = self._lines[sequence]
        while line.marks:
            self._free(line.marks.popitem()[1])
        line.wanted = []

    def copies(self, sequence: int) -> dict[int, State]:
        """Return the copies by their number of tokens."""
        return self._lines[sequence].copies

    def adopt(self, sequence: int, copies: Mapping[int, State]) -> None:
        """Take over copies: they do not depend on the cache's size."""
        self._lines[sequence].copies = dict(copies)
