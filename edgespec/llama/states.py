"""Taking tokens back on recurrent and hybrid models, which keep a state that every token changes.

A state cannot be cut: an earlier one must be at hand. There are three kinds, all of the pinned llama.cpp:

snapshots   With `n_rs_seq` = n a pass also leaves the state after each of its last n + 1 tokens. So up to n
            tokens can be taken back, but fewer than the pass had: the state before it is not among them (the
            library says yes to that as well, and continues from an older one). Only once after a pass: then
            another pass must come. 1 + n states of memory for each sequence; only some architectures
            (recurrent.SNAPSHOTS).
marks       A spare sequence is told to share the state (`llama_memory_seq_cp`). The next pass sees that it is
            shared, reads it where it is and writes the new one to another place: nothing is copied and
            nothing is computed twice. A state of memory for each mark; all architectures.
copies      The state in memory of our own (`llama_state_seq_get_data_ext`): copied there and back. For places
            that are gone back to much later, and before long passes, which Ctrl-C may break off.

With snapshots a verified draft costs no pass more than with cells. With marks the accepted tokens of a draft
that was not wholly accepted are read again, together with the next ones.

The attention layers of a hybrid model have cells as in other models. `llama_memory_seq_rm` takes both back,
the state first, and changes nothing where it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.decoding.session import SequenceTokens
from edgespec.llama.backend import llama
from edgespec.llama.rollback import Rollback, RollbackSize, State, bytes_of

LONG = 64
"""Tokens from which on a pass may be broken off: the state is copied before, which costs little beside it."""

MOST_COPIES = 2
"""Most copies of states for each sequence: the one after the fewest tokens, and the last."""

_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without the cells of attention


@dataclass(slots=True)
class _SequenceStates:
    """The earlier states of a sequence. The keys are numbers of tokens."""

    marks: dict[int, int] = field(default_factory=dict)
    """Spare sequences that hold states."""
    copies: dict[int, State] = field(default_factory=dict)
    undo: tuple[int, State] | None = None
    """The state before the pass under way, if it is long."""
    last: SequenceTokens | None = None
    """The last pass, if its snapshots are still right."""
    wanted: list[int] = field(default_factory=list)
    """Where copies are to be made."""


class States(Rollback):
    """Takes tokens back by copies of states, where a model keeps no cell for each token."""

    def __init__(self, n_sequences: int, size: RollbackSize, *, has_snapshots: bool) -> None:
        """`has_snapshots`: whether the library keeps them for this architecture."""
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
        elif n in line.copies and not self._put(sequence, line.copies[n]):
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
        llama.llama_memory_seq_cp(self._memory, source, sequence, 0, n)
        self._lines[sequence].copies = {place: copy for place, copy in line.copies.items() if place <= n}
        return n if self._put(sequence, state) else self.cut(sequence, 0)

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
        """Note which snapshots it makes; only a long pass may be broken off."""
        for line in self._lines:  # states of others may be moved, and their snapshots are not
            line.last = None
        for part in parts:
            self._keep_wanted(part)
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
        """Return the mark whose neighbours are closest, seen from the sequence's end.

        So marks become rarer with their distance: going back d tokens reads at most 2 d again.
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

    def _put(self, sequence: int, state: State) -> bool:
        """Give a sequence the state of a copy; return whether the library could."""
        n = llama.llama_state_seq_set_data_ext(
            self._context, bytes_of(state), state.nbytes, sequence, _STATE_ONLY
        )
        return bool(n == state.nbytes)

    def stop_before(self, sequence: int, n_past: int, n_tokens: int) -> int:
        """Stop where a copy is wanted."""
        stops = (n - n_past for n in self._lines[sequence].wanted)
        return min((n for n in stops if 0 < n < n_tokens), default=n_tokens)

    def _keep_wanted(self, part: SequenceTokens) -> None:
        line, end = self._lines[part.sequence], part.n_past + len(part.tokens)
        if any(n < end for n in line.wanted):
            line.wanted = [n for n in line.wanted if n >= end]
            self.keep(part.sequence)

    def keep(self, sequence: int) -> None:
        """Make a copy; of too many the one goes that is neither the first nor the last."""
        line, n_past = self._lines[sequence], self.n_past(sequence)
        if n_past and n_past not in line.copies:
            line.copies[n_past] = self._copy(sequence)
            while len(line.copies) > MOST_COPIES:
                del line.copies[sorted(line.copies)[1]]

    def keep_at(self, sequence: int, places: Sequence[int]) -> None:
        """Note after how many tokens of a sequence its state is to be copied, when it reads on."""
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
