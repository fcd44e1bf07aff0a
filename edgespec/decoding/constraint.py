"""Apply a grammar, or a limit on thoughts, to one generation: which tokens may come next, and which must.

The logits of forbidden tokens are set to -inf before all filters; that defines the target's distribution. The
end-of-generation tokens are allowed exactly where the grammar may end. What is allowed depends on the tokens
before and on nothing else, so target and draft are masked alike at each node of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.session import Rows, SessionModel
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
        """Undo the last `n` tokens."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow: each is the only one allowed after those before it."""


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
        """Begin at the position of the matcher that `start` returns; `start` is called when first needed.

        `banned` tokens are never allowed. `name`: for errors.
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
        """Return how many of the first `tokens` may follow `path`, one after another."""
        for n, token in enumerate(tokens):
            if not self.allows((*path, *tokens[:n]), token):
                return n
        return len(tokens)

    def forced(self, path: Path) -> int | None:
        """Return the only token that may follow `path`; None if there is a choice, or nothing may."""
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


# ---- a limit on thoughts ----
#
# A thought that reaches its budget is ended by tokens that are forced.
#
#     start   white space, and what may become the marker that begins a thought
#     thought tokens count, up to the marker that ends it
#     end     the budget is spent: each token of the end is the only one allowed
#     answer  all tokens may follow, or those that a grammar allows
#
# The state is a function of the tokens, and so is what may follow: each drafter and rule is exact, and the
# end is drafted as what a grammar forces. Markers are found in the text, however it was cut into tokens.

_LONGEST_CHARACTER = 4  # bytes


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens of the thought at the start of an answer, and how it is ended there."""

    budget: int
    """Most tokens, 0 or more; a character that they cut is written to its end."""
    opener: bytes
    """The text that begins a thought."""
    closer: bytes
    """The text that ends it."""
    end: tuple[int, ...]
    """Tokens that end it at the budget; `closer` is part of their text."""
    begun: bool
    """Whether the prompt ends within a thought."""


class _State(NamedTuple):
    place: Literal["start", "thought", "end", "answer"]
    n: int = 0
    """Tokens of the thought, or of its end."""
    text: bytes = b""
    """The end of the text, as much as a marker may need."""


_ANSWER = _State("answer")


class ThoughtMatcher:
    """A position in an answer whose thought is limited; a Matcher."""

    def __init__(self, limit: ThoughtLimit, model: SessionModel, inner: Matcher | None) -> None:
        """Begin before the answer; `inner` allows its tokens, thought included. None: it allows all."""
        self._limit, self._model, self._inner = limit, model, inner
        self._states = [self._counted(0, b"") if limit.begun else _State("start")]

    @property
    def n_free(self) -> float:
        """Tokens before the first that the limit may force."""
        place, n, _ = self._states[-1]
        return {"thought": self._limit.budget - n, "answer": np.inf}.get(place, 0)

    def mask(self, out: Words) -> None:
        """Set the bits of the tokens that may come next, clear the others.

        An end that `inner` forbids is not forced: it is tried again after the next token.
        """
        if self._inner:
            self._inner.mask(out)
        else:
            out.fill(0xFFFFFFFF)
        place, n, _ = self._states[-1]
        if place == "end":
            token = self._limit.end[n]
            bit = out[token >> 5] & np.uint32(1 << (token & 31))
            if bit:
                out.fill(0)
                out[token >> 5] = bit

    def consume(self, token: int) -> None:
        """Advance by `token`, of a thought or of the answer."""
        if self._inner:
            self._inner.consume(token)
        self._states.append(self._after(self._states[-1], token))

    def rollback(self, n: int) -> None:
        """Undo the last `n` tokens."""
        if self._inner:
            self._inner.rollback(n)
        if n:
            del self._states[-n:]

    def forced(self) -> list[int]:
        """Return the tokens that must follow."""
        place, n, _ = self._states[-1]
        if place == "end":
            return [*self._limit.end[n:]]
        return self._inner.forced() if self._inner else []

    def _after(self, state: _State, token: int) -> _State:
        limit, (place, n, text) = self._limit, state
        if place == "answer":
            return state
        text += self._model.piece(token, special=True)
        if place == "end" and token == limit.end[n]:
            return _State("end", n + 1, text) if n + 1 < len(limit.end) else _ANSWER
        if place == "start":
            text = text.lstrip()
            if not text.startswith(limit.opener):
                return _State("start", 0, text) if limit.opener.startswith(text) else _ANSWER
            n, text = -1, text[len(limit.opener) :]
        return self._counted(limit.budget if place == "end" else n + 1, text)

    def _counted(self, n: int, text: bytes) -> _State:
        limit = self._limit
        if limit.closer in text:
            return _ANSWER
        text = text[-len(limit.closer) - _LONGEST_CHARACTER :]
        is_whole = not _is_cut(text) or n >= limit.budget + _LONGEST_CHARACTER
        is_spent = n >= limit.budget and is_whole
        return _State("end", 0, text) if is_spent else _State("thought", n, text)


class ThoughtConstraint(Constraint):
    """The tokens that a limit on thoughts, and maybe a grammar, allow."""

    def __init__(
        self,
        limit: ThoughtLimit,
        model: SessionModel,
        start: Callable[[], Matcher] | None = None,
        *,
        banned: Sequence[int] = (),
        name: str = "reasoning_budget",
    ) -> None:
        """Limit the thoughts of `model`; `start`, `banned` and `name`: the grammar's, as of Constraint."""
        self._thoughts: ThoughtMatcher | None = None
        self._has_grammar = start is not None
        self._may_force = True

        def begin() -> ThoughtMatcher:
            self._thoughts = ThoughtMatcher(limit, model, start() if start else None)
            return self._thoughts

        super().__init__(begin, model.n_vocab, is_eog=model.is_eog, banned=banned, name=name)

    @property
    def may_force(self) -> bool:
        """Whether a token of the next draft may be forced, judging only by what was emitted."""
        return self._may_force

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by `tokens`, which were emitted."""
        super().advance(tokens)
        if self._thoughts and not self._has_grammar:
            self._may_force = self._thoughts.n_free <= MAX_GAMMA


def _is_cut(text: bytes) -> bool:
    """Whether `text` ends within a character."""
    for n in range(1, min(_LONGEST_CHARACTER, len(text) + 1)):
        byte = text[-n]
        if byte & 0xC0 != 0x80:  # no continuation
            return byte >= 0xC0 and n < 2 + (byte >= 0xE0) + (byte >= 0xF0)
    return False
