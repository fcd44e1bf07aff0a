"""Batches: texts packed into rows of equal length, several in a row, with little padding.

A text longer than a row is cut into pieces, each beginning with columns of the piece before, for attention
only. Seed and epoch determine the order, so a resumed training sees the same batches.

A batch has n rows of m columns. A row holds the ends of one or several texts; attention stays inside a text
(`text` tells them apart). For a column c:

    tokens[c]      its token
    features[c]    the target's hidden state after it, from which the target predicts tokens[c + 1]

A draft learns to predict what follows the columns in `answers`: the target wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import REJECTED, TrainingText

N_DRAFTED = 5
"""Tokens of the drafts by which heads are evaluated."""

MOST = 8192
"""Tokens of the texts of each kind on which heads are evaluated."""

BEST, CHECKPOINT = "best.npz", "latest.npz"
"""Files in the folder of a training: the parameters with the best acceptance, and what it resumes from."""

EmbedFn = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float16]]


class TrainingBatch(NamedTuple):
    """Texts of one training step: numpy arrays on the host, JAX arrays in a traced function."""

    tokens: Any
    """int32 (n, m)."""
    embeddings: Any
    """float16 (n, m, width): `ModelWeights.embed` of the tokens."""
    features: Any
    """float16 (n, m, n_embd); 0 where unknown (last token of a text, padding)."""
    text: Any
    """int32 (n, m): number of the column's text in its row, from 0; -1: padding at the row's end.

    RoPE depends on distances only, so a column's number serves as its position.
    """
    answers: Any
    """int32 (n, a): columns c to learn, ascending; 0: padding.

    tokens[c + 1] is of the same text and the target wrote it, features[c] is known, c is not the text's first
    column. A text's answers are neighbours: c, c + 1, c + 2, ...
    """
    weights: Any
    """float32 (n, a): of an answer in the loss, mostly 1; 0 for padding."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The shape of a batch: `n` rows of `columns` tokens."""

    n: int = 6
    columns: int = 640
    answers: int = 448
    """Most answers in a row."""
    overlap: int = 128
    """Columns that a piece of a long text shares with the piece before."""


@dataclass(frozen=True, slots=True)
class _TextPiece:
    """Columns `begin` .. `end` - 1 of a text; those from `learnt` on are answers."""

    text: int
    begin: int
    learnt: int
    end: int

    @property
    def columns(self) -> int:
        return self.end - self.begin

    @property
    def answers(self) -> int:
        return self.end - 1 - self.learnt  # the last token predicts nothing


class TextPacking:
    """Rows that texts are packed into."""

    def __init__(self, texts: Sequence[TrainingText], rows: BatchSize, *, mixes: bool = False) -> None:
        """Prepare to pack `texts`, without those that have no answer."""
        self._texts, self._rows = texts, rows
        pieces = [piece for i, text in enumerate(texts) for piece in self._cut(i, text)]
        failed = {i for i, text in enumerate(texts) if mixes and text.source == REJECTED}
        self._rejected = [piece for piece in pieces if piece.text in failed]
        self._others = [piece for piece in pieces if piece.text not in failed]
        self.n_answers = sum(piece.answers for piece in pieces)

    def epoch(self, seed: int, epoch: int) -> list[list[_TextPiece]]:
        """Return the rows of an epoch in training order.

        Where it `mixes`, an epoch is all texts in which drafts were rejected, and after each row of them one
        of other texts, drawn anew in each epoch: what the draft knew is not unlearned.
        """
        rejected = self._packed(self._rejected, seed, epoch)
        others = self._packed(self._others, seed, epoch)
        if not (rejected and others):
            return rejected or others
        n = max(len(rejected), self._rows.n // 2)  # a whole batch, however few they are
        pairs = zip(islice(cycle(rejected), n), cycle(others), strict=False)
        return [row for pair in pairs for row in pair]

    def _packed(self, pieces: Sequence[_TextPiece], seed: int, epoch: int) -> list[list[_TextPiece]]:
        order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
        rows: list[list[_TextPiece]] = []
        # By the hundred, large pieces first: packed tightly, with other neighbours in each epoch.
        for at in range(0, len(order), 100):
            some = sorted((pieces[i] for i in order[at : at + 100]), key=lambda piece: -piece.columns)
            rows += self._pack(some)
        return [rows[i] for i in np.random.default_rng([seed, epoch, 1]).permutation(len(rows))]

    def batch(self, rows: Sequence[Sequence[_TextPiece]], embed: EmbedFn) -> TrainingBatch:
        """Return the batch of at most `BatchSize.n` rows; missing rows are padding."""
        size = self._rows
        width = self._texts[0].features.shape[1]
        tokens = np.zeros((size.n, size.columns), np.int32)
        text = np.full((size.n, size.columns), -1, np.int32)
        features = np.zeros((size.n, size.columns, width), np.float16)
        answers = np.zeros((size.n, size.answers), np.int32)
        weights = np.zeros((size.n, size.answers), np.float32)
        for r, row in enumerate(rows):
            at = n_answers = 0
            for number, piece in enumerate(row):
                source = self._texts[piece.text]
                n = piece.columns
                tokens[r, at : at + n] = source.tokens[piece.begin : piece.end]
                text[r, at : at + n] = number
                features_of_piece = source.features[piece.begin - source.first : piece.end - 1 - source.first]
                features[r, at : at + n - 1] = features_of_piece
                learnt = at + piece.learnt - piece.begin
                here = slice(n_answers, n_answers + piece.answers)
                answers[r, here] = np.arange(learnt, at + n - 1)
                own = source.weights
                weights[r, here] = 1.0 if own is None else own[piece.learnt + 1 : piece.end]
                at, n_answers = at + n, n_answers + piece.answers
        return TrainingBatch(tokens, embed(tokens), features, text, answers, weights)

    def _cut(self, number: int, text: TrainingText) -> Iterator[_TextPiece]:
        size = self._rows
        end = len(text.tokens)
        learnt = max(text.n_prompt - 1, text.first + 1)
        while learnt < end - 1:
            begin = max(text.first, learnt - size.overlap)
            if end - text.first <= size.columns and end - 1 - learnt <= size.answers:
                begin = text.first
            stop = min(end, begin + size.columns, learnt + size.answers + 1)
            yield _TextPiece(number, begin, learnt, stop)
            learnt = stop - 1

    def _pack(self, pieces: Sequence[_TextPiece]) -> list[list[_TextPiece]]:
        """Put each piece into the first row with room."""
        rows: list[list[_TextPiece]] = []
        for piece in pieces:
            for row in rows:
                fits = sum(one.columns for one in (*row, piece)) <= self._rows.columns
                if fits and sum(one.answers for one in (*row, piece)) <= self._rows.answers:
                    row.append(piece)
                    break
            else:
                rows.append([piece])
        return rows


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """Position of a training in its data."""

    epoch: int = 0
    row: int = 0


def batches(
    packing: TextPacking, embed: EmbedFn, n: int, seed: int, place: EpochPosition
) -> Iterator[tuple[TrainingBatch, EpochPosition]]:
    """Yield batches of `n` rows from `place` on, without end, each with the position after it."""
    epoch, at = place.epoch, place.row
    while True:
        rows = packing.epoch(seed, epoch)
        while at < len(rows):
            some = rows[at : at + n]
            at += n
            after = EpochPosition(epoch, at) if at < len(rows) else EpochPosition(epoch + 1, 0)
            yield packing.batch(some, embed), after
        epoch, at = epoch + 1, 0
