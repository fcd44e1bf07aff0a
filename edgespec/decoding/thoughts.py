"""A limit on thoughts: a thought that reaches its budget is ended by tokens that are forced.

    start   white space, and what may become the marker that begins a thought
    thought tokens count, up to the marker that ends it
    end     the budget is spent: each token of the end is the only one allowed
    answer  all tokens may follow, or those that a grammar allows

The state is a function of the tokens, and so is what may follow: each drafter and rule is exact, and the end
is drafted as what a grammar forces. Markers are found in the text, however it was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from edgespec.decoding.constraint import Constraint, Matcher, Words
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.session import SessionModel

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
        """Take the last `n` tokens back."""
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
