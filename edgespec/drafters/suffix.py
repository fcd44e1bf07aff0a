"""Drafts without a model: what followed the same words before, in the prompt, the output, earlier answers.

Prompt lookup and n-grams are the same thing here: the suffix store (csrc/suffix.h) finds the longest
suffix of the text that occurred before, down to a single token, and counts what followed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec import _core
from edgespec.drafters.base import Tokens

_TAIL = 32  # tokens of the text's end that the store compares
_END = np.array([-1], np.int32)  # of a document: nothing matches across it


class SuffixDrafts:
    """The suffix store over this engine's timelines and what was loaded from earlier ones."""

    def __init__(self, capacity: int) -> None:
        """Remember the last `capacity` tokens."""
        self._capacity = capacity
        self._store = _core.SuffixStore(capacity)
        self._tail = np.empty(2 * _TAIL + 64, np.int32)
        self._n = 0  # of `_tail` in use

    def load(self, tokens: Tokens) -> None:
        """Take in earlier documents, each ended by -1. Any thread, as long as it is the only one."""
        self._store.extend(tokens)

    def forget(self) -> None:
        """Empty the store."""
        self._store = _core.SuffixStore(self._capacity)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new document with `tokens`."""
        self._store.extend(_END)
        self._n = 0
        self._append(np.asarray(tokens, np.int32))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the document."""
        self._append(np.asarray(tokens, np.int32))

    def _append(self, tokens: Tokens) -> None:
        self._store.extend(tokens)
        recent = tokens[-_TAIL:]
        if self._n + len(recent) > len(self._tail) - 64:
            kept = min(self._n, _TAIL)
            self._tail[:kept] = self._tail[self._n - kept : self._n].copy()
            self._n = kept
        self._tail[self._n : self._n + len(recent)] = recent
        self._n += len(recent)

    def offer(self, drafted: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Return up to `n` tokens to follow the document and `drafted` (at most 64), and their probabilities.

        Each probability is given that the tokens before it were right.
        """
        end = self._n + len(drafted)
        if drafted:
            self._tail[self._n : end] = drafted
        return self._store.propose(self._tail[max(0, end - _TAIL) : end], n)
