"""The tokens of one generation: prompt and answer, where they end, and what the filters look back on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from edgespec.decoding.options import Options
from edgespec.decoding.records import StopReason


class TokenSequence:
    """The prompt and what was emitted after it."""

    def __init__(
        self, prompt: Sequence[int], options: Options, *, n_ctx: int, is_eog: Callable[[int], bool]
    ) -> None:
        """Begin with `prompt`. The context is full at `n_ctx` tokens."""
        self.tokens = list(prompt)
        self.n_prompt = len(prompt)
        self.n_ctx = n_ctx
        self._look_back = options.params.look_back
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
        """The tokens that the filters look back on, C ints, at the position after `drafted` tokens."""
        last_n = self._look_back
        if last_n == 0:
            return array("i", drafted)
        history = self.tokens if last_n < 0 else self.tokens[-last_n:]
        return array("i", [*history, *drafted])
