"""Apply a grammar to one generation: which tokens may come next, and which must.

The logits of forbidden tokens are set to -inf before all filters; that defines the target's distribution. The
end-of-generation tokens are allowed exactly where the grammar may end. Each path of drafted tokens has its
own copy of the grammar's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.errors import EdgespecError
from edgespec.grammar.masking import is_enough
from edgespec.grammar.spelling import Spelling
from edgespec.llama.session import Rows
from edgespec.platform.closing import Closing
from edgespec.sampling import SamplingParams

Ids = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Path = Sequence[int]
"""Drafted tokens that follow the timeline, one after the other."""

_JUDGED = (64, 1024)  # how many of the likeliest tokens to judge, before judging all
_LONGEST_FORCED = 64  # bytes to look ahead


class State(Protocol):
    """A text's position in a grammar."""

    def judge(self, ids: Ids) -> Bools:
        """Return for each token whether it may come next."""

    def accept(self, token: int) -> None:
        """Move on by `token`, which must be allowed and no end-of-generation token."""

    def copy(self) -> Self:
        """Return an independent copy."""


class Constraint(Closing):
    """What a grammar allows after the timeline of one generation, and after paths of drafted tokens.

    Not for use by two threads at once.
    """

    def __init__(
        self,
        start: State,
        params: SamplingParams,
        n_vocab: int,
        *,
        is_eog: Callable[[int], bool],
        spelling: Spelling | None = None,
        name: str = "the grammar",
    ) -> None:
        """Begin in the state `start`. Without a `spelling`, no forced tokens are found."""
        self._states: dict[tuple[int, ...], State | None] = {(): start}  # None: nothing may follow
        self._forced: dict[tuple[int, ...], list[int]] = {}
        self._params, self._is_eog, self._spelling, self._name = params, is_eog, spelling, name
        self._everything = np.arange(n_vocab, dtype=np.int32)
        self._rows: Rows = np.empty((0, n_vocab), np.float32)
        self._written: list[Ids | None] = []  # which elements of a row are not -inf; None: unknown
        self._ids: Ids = np.empty(_JUDGED[-1], np.int32)
        self._logits: Rows = np.empty(_JUDGED[-1], np.float32)
        self.n_masked = 0
        """Rows that were masked."""
        self.n_full = 0
        """Masked rows for which all tokens had to be judged."""

    def mask(
        self,
        row: Rows,
        path: Path,
        sampler: _core.Sampler,
        recent: Ids,
        *,
        place: int = 0,
        exact: bool = True,
    ) -> Rows | None:
        """Return the logits `row`, which follow `path`, with forbidden tokens at -inf.

        Unlikely tokens may be at -inf although allowed, but only if the filters give the same result; without
        `exact`, even if not. `sampler` and `recent` must be those that will filter the row. The result is a
        buffer of this object, one for each `place`, valid until the next call with that place. None if
        nothing may follow, as after an end, or (not `exact`) no likely token. Raises EdgespecError if the
        grammar allows no token of the model.
        """
        state = self._state(tuple(path))
        if state is None:
            return None
        self.n_masked += 1
        n = len(row)
        for most in _JUDGED:
            ids, logits = self._ids[:most], self._logits[:most]
            n_found = sampler.best(row, recent, ids, logits)
            ids, logits = ids[:n_found], logits[:n_found]
            allowed = state.judge(ids) if n_found else np.zeros(0, np.bool_)
            if not exact and (n_found < most or most == _JUDGED[-1]):
                return self._write(row, ids[allowed], place) if allowed.any() else None
            n_rest = n - n_found if n_found == most else 0
            if is_enough(logits[allowed], float(logits[-1]) if n_rest else 0.0, n_rest, self._params):
                return self._write(row, ids[allowed], place)
        self.n_full += 1
        everything = self._everything[:n]
        return self._write(row, everything[state.judge(everything)], place)

    def masked(
        self,
        rows: Rows,
        paths: Sequence[Path],
        sampler: _core.Sampler,
        recent: Callable[[Path], Ids],
    ) -> Rows:
        """Return `rows` (len(paths), n_vocab) masked, each after its path; unmasked if nothing may follow."""
        self._make_room(len(paths))
        for place, path in enumerate(paths):
            if self.mask(rows[place], path, sampler, recent(path), place=place) is None:
                self._rows[place] = rows[place]
                self._written[place] = None
        return self._rows[: len(paths)]

    def allows(self, path: Path, token: int) -> bool:
        """Return whether `token` may follow `path`."""
        return self.fitting(path, (token,)) == 1

    def fitting(self, path: Path, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `path`, one after the other."""
        state = self._state(tuple(path))
        ahead: State | None = None
        for n, token in enumerate(tokens):
            if state is None or not _allows(state, token):
                return n
            if self._is_eog(token):
                return n + 1
            if n + 1 < len(tokens):
                state = ahead = ahead or state.copy()
                ahead.accept(token)
        return len(tokens)

    def forced(self, path: Path) -> int | None:
        """Return the token to follow `path` if only one text may follow, else None."""
        run = self.forced_run(path)
        return run[0] if run else None

    def forced_run(self, path: Path) -> list[int]:
        """Return tokens to follow `path`, as far as only one text may follow.

        The text is certain; the tokens that the model will write it with are a good guess.
        """
        key = tuple(path)
        found = self._forced.get(key)
        if found is None:
            found = self._forced[key] = self._look_ahead(key)
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        """Move on by `tokens`, which were emitted."""
        for n in range(len(tokens)):
            self._state(tuple(tokens[: n + 1]))
        state = self._states.pop(tuple(tokens))
        self._states = {(): state}
        self._forced = {}

    def close(self) -> None:
        """Free the states; nothing may follow from now on."""
        self._states = {(): None}
        self._forced = {}

    def _state(self, path: tuple[int, ...]) -> State | None:
        """Return the state after `path`; None if `path` is forbidden or has ended the text."""
        if path in self._states:
            return self._states[path]
        before = self._state(path[:-1])
        state: State | None = None
        if before is not None and not self._is_eog(path[-1]) and _allows(before, path[-1]):
            state = before.copy()
            state.accept(path[-1])
        self._states[path] = state
        return state

    def _look_ahead(self, path: tuple[int, ...]) -> list[int]:
        spelling, state = self._spelling, self._state(path)
        if spelling is None or state is None:
            return []
        text = bytearray()
        ended = False
        ahead: State | None = None
        while len(text) < _LONGEST_FORCED:
            allowed = state.judge(spelling.probes)
            if allowed.sum() != 1:
                break
            token = int(spelling.probes[allowed.argmax()])
            if self._is_eog(token):
                ended = True
                break
            text += spelling.piece(token)
            state = ahead = ahead or state.copy()
            ahead.accept(token)
        tokens = spelling.write(bytes(text))
        if ended:
            tokens.append(int(spelling.probes[-1]))
        else:  # the model may write the last token as a longer one, which goes on beyond this text
            tokens = tokens[:-1]
        return tokens[: self.fitting(path, tokens)]

    def _write(self, row: Rows, ids: Ids, place: int) -> Rows:
        if not len(ids):
            problem = (
                "no token of the model may follow here: the grammar has a dead end, "
                "or the logit bias forbids what it allows"
            )
            raise EdgespecError(problem, field=self._name)
        self._make_room(place + 1)
        out, written = self._rows[place], self._written[place]
        if written is None:
            out.fill(-np.inf)
        else:
            out[written] = -np.inf
        out[ids] = row[ids]
        self._written[place] = ids.copy()
        masked: Rows = out[: len(row)]
        return masked

    def _make_room(self, n_rows: int) -> None:
        if n_rows > len(self._rows):
            self._rows = np.empty((n_rows, self._rows.shape[1]), np.float32)
            self._written = [None] * n_rows


def _allows(state: State, token: int) -> bool:
    return bool(state.judge(np.array([token], np.int32))[0])
