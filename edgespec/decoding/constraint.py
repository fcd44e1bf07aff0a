"""Apply a grammar to one generation: which tokens may come next, and which must.

The logits of forbidden tokens are set to -inf before all filters; that defines the target's distribution. The
end-of-generation tokens are allowed exactly where the grammar may end. What is allowed depends on the tokens
before and on nothing else, so target and draft are masked alike at each node of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import Rows
from edgespec.errors import EdgespecError
from edgespec.platform.closing import Closing

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Path = Sequence[int]
"""Drafted tokens that follow the sequence, one after the other."""


class Matcher(Protocol):
    """A position in a grammar, which advances token by token, and goes back."""

    def mask(self, out: Words) -> None:
        """Set bit `token % 32` of word `token // 32` where a token may come next, clear the others."""

    def consume(self, token: int) -> None:
        """Advance by `token`, which must be allowed."""

    def rollback(self, n: int) -> None:
        """Take the last `n` tokens back."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow, the only ones allowed one after the other."""


class Allowed:
    """The tokens that may stand at one place."""

    __slots__ = ("ids", "is_most", "n", "words")

    def __init__(self, words: Words, n_vocab: int) -> None:
        """Read the mask `words`, a bit for each of `n_vocab` tokens."""
        self.words = words
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=n_vocab).view(np.bool_)
        self.n = int(np.count_nonzero(bits))
        """Number of allowed tokens."""
        self.is_most = 2 * self.n > n_vocab
        """Whether `ids` are the forbidden tokens; else they are the allowed ones."""
        self.ids: Ids = np.flatnonzero(~bits if self.is_most else bits).astype(np.int32)

    def __contains__(self, token: int) -> bool:
        """Whether `token` is allowed."""
        return bool(self.words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


class Constraint(Closing):
    """The tokens that a grammar allows after a generation's sequence, and after paths of drafted tokens.

    Not for use by two threads at once.
    """

    def __init__(
        self,
        start: Callable[[], Matcher],
        n_vocab: int,
        *,
        is_eog: Callable[[int], bool],
        banned: Sequence[int] = (),
        name: str = "the grammar",
    ) -> None:
        """Begin where the matcher that `start` returns begins; it is called when it is first needed.

        `banned` tokens are never allowed. `name` stands in errors.
        """
        self._start, self._n_vocab, self._is_eog, self._name = start, n_vocab, is_eog, name
        self._matcher: Matcher | None = None
        self._at: list[int] = []  # the path that the matcher has followed
        self._ended = False
        self._found: dict[tuple[int, ...], Allowed] = {}
        self._last: Allowed | None = None
        self._usable = np.full((n_vocab + 31) // 32, 0xFFFFFFFF, np.uint32)
        for token in banned:
            self._usable[token >> 5] &= ~np.uint32(1 << (token & 31))
        self._rows: Rows = np.empty((0, n_vocab), np.float32)
        self._written: list[Allowed | None] = []  # what each of `_rows` was masked with; None: nothing

    @property
    def may_force(self) -> bool:
        """Whether a token of the next draft may be forced; if none is, a drafter may rest."""
        return True

    def mask(self, row: Rows, path: Path, *, place: int = 0) -> Rows | None:
        """Return the logits `row`, which follow `path`, with forbidden tokens at -inf.

        The result is a buffer of this object, one for each `place`, valid until the next call with that
        place. None if nothing may follow: after an end, or a path that the grammar forbids. Raises
        EdgespecError if the grammar allows no token of the model. A row of fewer than n_vocab logits, a draft
        model's, may be -inf everywhere then.
        """
        allowed = self._allowed(tuple(path))
        if allowed is None:
            return None
        self._make_room(place + 1)
        out, before, n = self._rows[place], self._written[place], len(row)
        ids = allowed.ids if n == self._n_vocab else allowed.ids[allowed.ids < n]
        if allowed.is_most:
            out[:n] = row
            out[ids] = -np.inf
        else:
            if before is None or before.is_most:
                out.fill(-np.inf)
            else:
                out[before.ids] = -np.inf
            out[ids] = row[ids]
        self._written[place] = allowed
        masked: Rows = out[:n]
        return masked

    def masked(self, rows: Rows, paths: Sequence[Path]) -> Rows:
        """Return `rows` (len(paths), n_vocab) masked, each after its path; unmasked if nothing may follow."""
        self._make_room(len(paths))
        for place, path in enumerate(paths):
            if self.mask(rows[place], path, place=place) is None:
                self._rows[place] = rows[place]
                self._written[place] = None
        return self._rows[: len(paths)]

    def allows(self, path: Path, token: int) -> bool:
        """Whether `token` may follow `path`."""
        allowed = self._allowed(tuple(path))
        return allowed is not None and token in allowed

    def fitting(self, path: Path, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow `path`, one after the other."""
        for n, token in enumerate(tokens):
            if not self.allows((*path, *tokens[:n]), token):
                return n
        return len(tokens)

    def forced(self, path: Path) -> int | None:
        """Return the only token that may follow `path`; None where there is a choice, or nothing may."""
        allowed = self._allowed(tuple(path))
        return int(allowed.ids[0]) if allowed is not None and allowed.n == 1 else None

    def forced_run(self, path: Path) -> list[int]:
        """Return the tokens that must follow `path`: at each place the only one allowed."""
        if self.forced(path) is None or not self._go(path):
            return []
        assert self._matcher  # noqa: S101 - for the type checker: `_go` made it
        tokens = self._matcher.forced()
        return tokens[: self.fitting(path, tokens)]

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by `tokens`, which were emitted."""
        if tokens:
            self._ended = not self._go(tokens) or self._is_eog(tokens[-1])
        self._at = []
        self._found = {}

    def close(self) -> None:
        """Free the matcher; nothing may follow from now on."""
        self._matcher, self._ended, self._found = None, True, {}

    def _allowed(self, path: tuple[int, ...]) -> Allowed | None:
        found = self._found.get(path)
        if found is None and not (path and self._is_eog(path[-1])) and self._go(path):
            found = self._found[path] = self._look()
        return found

    def _go(self, path: Path) -> bool:
        """Move the matcher to the end of `path`; return False if the grammar forbids it, or has ended."""
        if self._ended:
            return False
        if self._matcher is None:
            self._matcher = self._start()
        at, n = self._at, 0
        while n < len(at) and n < len(path) and at[n] == path[n]:
            n += 1
        if n < len(at):
            self._matcher.rollback(len(at) - n)
            del at[n:]
        for token in path[n:]:
            allowed = self._allowed(tuple(at))
            if allowed is None or token not in allowed:
                return False
            self._matcher.consume(token)
            at.append(token)
        return True

    def _look(self) -> Allowed:
        assert self._matcher  # noqa: S101 - for the type checker: `_go` made it
        words = np.empty_like(self._usable)
        self._matcher.mask(words)
        words &= self._usable
        last = self._last
        if last is not None and np.array_equal(words, last.words):  # as within a string
            return last
        self._last = Allowed(words, self._n_vocab)
        if not self._last.n:
            raise EdgespecError(
                "no token of the model may follow here: the grammar has a dead end, "
                "or the logit bias forbids what it allows",
                field=self._name,
            )
        return self._last

    def _make_room(self, n_rows: int) -> None:
        n_more = n_rows - len(self._rows)
        if n_more > 0:
            more = np.empty((n_more, self._n_vocab), np.float32)
            self._rows = np.concatenate([self._rows, more])
            self._written += [None] * n_more
