"""The logits of each place of a block that a head drafts, given the token that was drafted before it.

    PlainRows    DFlash (arXiv 2602.06036): each place by itself
    MarkovRows   DSpark: the token before adds a row of a matrix of low rank to the logits, and a confidence
                 says how likely the place's token is accepted
    PathRows     DFlash 2: some candidates of each place; a pair of neighbours has a score

The library makes a DSpark block as if each place's likeliest token were drafted. Where another one was,
MarkovRows puts the difference right:

    logits(i | t) = logits(i | g) + W2 (W1[t] - W1[g])       g: the likeliest token of place i - 1
    confidence    = sigmoid(c . [h(i); W1[t]] + b)           likewise

Of a DFlash 2 block it gives the candidates and the scores of all pairs,

    score(a, b) = logit(b) + <A[a] * H h(i), B[b]>           a: a candidate of place i - 1; b: of place i

which are the logits of b after a. Whatever a row is, tokens are drawn from it and verified by it, so that it
changes no text.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import ForwardResult, Rows
from edgespec.llama.head_file import BlockHead, EightBitMatrix, MappedMatrix
from edgespec.llama.head_kinds import DFLASH_2, DSPARK

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTH = 32  # elements of a row of EightBitMatrix are a multiple of this


class PlainRows:
    """The rows of the last block of one sequence."""

    with_states = False
    """Whether the pass over a block leaves hidden states, which are what its further parts give."""

    def __init__(self, head: BlockHead, n_row: int) -> None:
        """Read blocks of `head`; a row has `n_row` logits."""
        self._first, self._n_row = head.first, n_row
        self._rows: Rows = np.empty((0, n_row), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def set(self, block: ForwardResult) -> None:
        """Keep the result of a pass over a block."""
        self._rows = block.rows[self._first :, : self._n_row].copy()

    def clear(self) -> None:
        """Forget the block."""
        self._rows = self._rows[:0]

    def at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits of a place, shape (1, n_row), after the token `before`, and its confidence."""
        return self._rows[place : place + 1], None


class MarkovHead:
    """The further parts of a DSpark head, from its file."""

    def __init__(self, head: BlockHead, n_threads: int) -> None:
        """Load the parts. Raises EdgespecError and MemoryError."""
        self._of_token = MappedMatrix(head.header, "markov_w1.weight")
        tensors = {tensor.name: tensor for tensor in head.header.gguf.tensors}
        second = MappedMatrix(head.header, "markov_w2.weight")
        rank = self._of_token.n_embd
        self._shape = len(second), -(-rank // _WIDTH) * _WIDTH
        matrix = np.zeros(self._shape, np.float32)
        matrix[:, :rank] = second(range(len(second)))
        if "markov_w2.scale" in tensors:
            matrix *= MappedMatrix(head.header, "markov_w2.scale")([0])[0, 0]
        self._to_logits = EightBitMatrix(matrix, n_threads, head.plugin)
        self._ids: npt.NDArray[np.int64] | None = None
        if ids := tensors.get("d2t"):
            start = head.header.gguf.data_start + ids.offset
            self._ids = np.fromfile(head.path, np.int64, ids.shape[0], offset=start)
        self._to_confidence: npt.NDArray[np.float32] | None = None
        if "conf_proj.weight" in tensors:
            self._to_confidence = MappedMatrix(head.header, "conf_proj.weight")([0])[0, -rank:]

    @property
    def has_confidence(self) -> bool:
        """Whether it says how likely a token is accepted."""
        return self._to_confidence is not None

    def difference(self, token: int, guess: int, n_row: int) -> tuple[Rows, float]:
        """Return what `token` in the place of `guess` adds to the logits of the next place, shape (1, n_row).

        And to the logarithm of the odds of its confidence, 0 without one.
        """
        of_token, of_guess = self._of_token([token, guess])
        step = of_token - of_guess
        vector = np.zeros((1, self._shape[1]), np.float32)
        vector[0, : len(step)] = step
        found = np.empty((1, self._shape[0]), np.float32)
        self._to_logits.multiply(vector, found)
        if self._ids is not None:
            kept = self._ids < n_row
            whole = np.zeros((1, n_row), np.float32)
            whole[0, self._ids[kept]] = found[0, kept]
            found = whole
        odds = 0.0 if self._to_confidence is None else float(self._to_confidence @ step)
        return found[:, :n_row], odds


class MarkovRows(PlainRows):
    """Rows of a DSpark block."""

    def __init__(self, head: BlockHead, n_row: int, markov: MarkovHead) -> None:
        """Read blocks of a head; arguments as for PlainRows."""
        super().__init__(head, n_row)
        self._markov = markov
        self.with_states = markov.has_confidence
        self._likeliest: list[int] = []
        self._confidences: list[float] = []

    def set(self, block: ForwardResult) -> None:
        """Keep the result of a pass over a block."""
        super().set(block)
        self._likeliest = block.rows[self._first :].argmax(axis=1).tolist()
        if block.features is not None:
            self._confidences = block.features[self._first :, 0].tolist()

    def at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits and the confidence of a place after the token `before`."""
        row = self._rows[place : place + 1]
        chance = self._confidences[place] if self.with_states else None
        guess = self._likeliest[place - 1] if place else before
        if before == guess:
            return row, chance
        more, odds = self._markov.difference(before, guess, self._n_row)
        if chance is not None:
            chance = _moved(chance, odds)
        return row + more, chance


class PathRows(PlainRows):
    """Rows of a DFlash 2 block: only the candidates of a place have logits above -inf."""

    with_states = True

    def __init__(self, head: BlockHead, n_row: int) -> None:
        """Read blocks of a head; arguments as for PlainRows."""
        super().__init__(head, n_row)
        self._k = max(head.header.gguf.integers("dflash.selector_top_k"))
        self._candidates: npt.NDArray[np.int64] = np.empty((0, self._k), np.int64)
        self._scores: npt.NDArray[np.float32] = np.empty((0, self._k, self._k), np.float32)

    def set(self, block: ForwardResult) -> None:
        """Keep the result of a pass over a block."""
        super().set(block)
        assert block.features is not None  # noqa: S101 - for the type checker
        k, packed = self._k, block.features[self._first :]
        self._candidates = packed[:, :k].astype(np.int64)
        self._scores = packed[:, k : k + k * k].reshape(-1, k, k).copy()

    def at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits of a place after the token `before`.

        Those of the place by itself, where `before` is none of the candidates: a grammar chose it.
        """
        above = 0
        if place:
            found = np.flatnonzero(self._candidates[place - 1] == before)
            if not len(found):
                return super().at(place, before)
            above = int(found[0])
        row = np.full((1, self._n_row), -np.inf, np.float32)
        known = self._candidates[place] < self._n_row
        row[0, self._candidates[place, known]] = self._scores[place, above, known]
        return row, None


def rows_maker(head: BlockHead, n_threads: int) -> Callable[[int], PlainRows]:
    """Return a function that makes the rows of a sequence, for a number of logits in each.

    Raises EdgespecError and MemoryError if the head's further parts cannot be loaded.
    """
    if head.kind is DSPARK:
        return partial(MarkovRows, head, markov=MarkovHead(head, n_threads))
    return partial(PathRows if head.kind is DFLASH_2 else PlainRows, head)


def _moved(chance: float, odds: float) -> float:
    """Return a chance with `odds` added to the logarithm of its odds."""
    chance = min(max(chance, 1e-7), 1.0 - 1e-7)
    return float(1.0 / (1.0 + (1.0 / chance - 1.0) * np.exp(-odds)))
