"""The tokens of one generation: prompt and answer, where they end, and what the filters look back on.

A text may be as long as the context, so that nothing of a step copies it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import overload

from edgespec.decoding.options import Options
from edgespec.decoding.records import StopReason


class TokenView(Sequence[int]):
    """The first tokens of a text that only grows, and perhaps others after them, read in place.

    A slice is a tuple.
    """

    __slots__ = ("_more", "_n", "_tokens")

    def __init__(self, tokens: Sequence[int], more: Sequence[int] = (), n: int | None = None) -> None:
        """View the first `n` of `tokens` (None: all that there are now), then `more`."""
        self._tokens, self._more, self._n = tokens, more, len(tokens) if n is None else n

    def __len__(self) -> int:
        return self._n + len(self._more)

    @overload
    def __getitem__(self, place: int, /) -> int: ...
    @overload
    def __getitem__(self, place: slice, /) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice, /) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                return tuple(self[i] for i in range(start, stop, step))
            n, tokens, more = self._n, self._tokens, self._more
            return (*tokens[start : min(stop, n)], *more[max(0, start - n) : max(0, stop - n)])
        i = place + len(self) if place < 0 else place
        if not 0 <= i < len(self):
            raise IndexError(f"no token {place} of {len(self)}")
        return self._tokens[i] if i < self._n else self._more[i - self._n]


class TokenSequence:
    """The prompt and what was emitted after it."""

    def __init__(
        self, prompt: Sequence[int], options: Options, *, n_ctx: int, is_eog: Callable[[int], bool]
    ) -> None:
        """Begin with `prompt`. The context is full at `n_ctx` tokens."""
        self.tokens = list(prompt)
        self.n_prompt = len(prompt)
        self.n_ctx = n_ctx
        self._text = array("i")  # for `recent`: the tokens, and those that were drafted last
        self._n_text = 0
        self._looks_back = options.params.looks_back
        self._n_predict = options.n_predict
        self._is_eog = is_eog

    @property
    def n_left(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        return None if self._n_predict is None else self._n_predict - (len(self.tokens) - self.n_prompt)

    @property
    def room(self) -> int:
        """Tokens that may be drafted: as many as can still be held and emitted, less the target's own."""
        room = self.n_ctx - len(self.tokens)
        n_left = self.n_left
        return (room if n_left is None else min(room, n_left)) - 1

    def end(self) -> StopReason | None:
        """Return why nothing may follow; None if something may."""
        if len(self.tokens) > self.n_prompt and self._is_eog(self.tokens[-1]):
            return "eog"
        if self._n_predict is not None and len(self.tokens) - self.n_prompt >= self._n_predict:
            return "length"
        return "context" if len(self.tokens) >= self.n_ctx else None

    def recent(self, drafted: Sequence[int] = ()) -> array[int]:
        """The text that the filters look back on, C ints, at the position after `drafted` tokens.

        Valid until the next call.
        """
        text = self._text
        del text[self._n_text :]
        if self._looks_back:
            text.extend(self.tokens[self._n_text :])
            self._n_text = len(text)
        text.extend(drafted)
        return text
