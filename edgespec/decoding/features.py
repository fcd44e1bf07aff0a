"""The target's hidden states along one sequence, from which a draft head continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.decoding.session import Features, n_common

KEPT = 512
"""Most recent hidden states that are kept: a head was trained on texts hardly longer, and what it has not
read of a longer one is left out. 4 MB for a target of 1,536 elements."""
_ROOM = 128  # for more, so that they are moved rarely


class TargetFeatures:
    """The hidden states after the last norm at sequence indices `first` .. `end` - 1, without gaps."""

    def __init__(self, n_embd: int) -> None:
        """Keep rows of `n_embd` elements."""
        self.n_prompt: Callable[[], int] = int
        """Returns at how many tokens of a prompt's end states are wanted, asked as it is read; else 0."""
        self._rows = np.empty((KEPT + _ROOM, n_embd), np.float32)
        self.first = 0
        self._tokens: list[int] = []

    @property
    def end(self) -> int:
        """The index after the last one that is known."""
        return self.first + len(self._tokens)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start on the sequence `tokens`; keep what is known of one that begins like it."""
        del self._tokens[n_common(self._tokens, tokens[self.first :]) :]

    def put(self, at: int, tokens: Sequence[int], features: Features) -> None:
        """Set those of `tokens`, at most KEPT, which stand from index `at` on; forget what was known after.

        Where a gap lies between, what was known before is forgotten too.
        """
        if not self.first <= at <= self.end:
            self._tokens.clear()
        if not self._tokens:
            self.first = at
        del self._tokens[at - self.first :]
        if len(self._tokens) + len(tokens) > len(self._rows):  # rarely, since the others are moved
            n_first = len(self._tokens) + len(tokens) - KEPT
            del self._tokens[:n_first]
            self._rows[: len(self._tokens)] = self._rows[n_first : n_first + len(self._tokens)].copy()
            self.first += n_first
        n = len(self._tokens)
        self._rows[n : n + len(tokens)] = features
        self._tokens += tokens

    def rows(self, start: int, stop: int) -> Features:
        """Return the states at indices `start` .. `stop` - 1, all known, shape (stop - start, n_embd).

        A view, valid until the next `put`.
        """
        return self._rows[start - self.first : stop - self.first]
