"""Lessons of a training: what it learns from and is judged by, as the loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from edgespec.apps.forge.dataset import Dataset
from edgespec.apps.forge.training.acceptance import Acceptance, AcceptanceEvaluation
from edgespec.apps.forge.training.batches import BatchSize, EpochPosition, TextPacking, batches
from edgespec.apps.forge.training.family import (
    Batch,
    Params,
    Trainable,
    TrainableFamily,
    TrainingBatch,
    TrainingRecipe,
)
from edgespec.errors import EdgespecError


class Lessons(Trainable, Protocol):
    """A draft, and what it is trained on."""

    @property
    def n(self) -> int:
        """The number of texts or windows; where it changed, a resumed training begins an epoch."""

    def batches(self, seed: int, place: EpochPosition) -> Iterator[tuple[Batch, EpochPosition]]:
        """Yield batches from `place` on, without end, each with the position after it."""

    def evaluate(self, params: Params) -> Acceptance:
        """Return the acceptance on what is held out."""


_MOST_HELD_OUT = 8192  # tokens that drafts are judged on


class TextLessons:
    """Texts of a dataset, for a family of drafts."""

    def __init__(
        self,
        family: TrainableFamily,
        dataset: Dataset,
        *,
        recipe: TrainingRecipe | None = None,
        rows: BatchSize | None = None,
        n_positions: int = 5,
    ) -> None:
        """Pack the texts into `rows`, and judge drafts of `n_positions` tokens on some held-out texts.

        `recipe`, `rows`: None: the family's own. Raises EdgespecError if there are too few texts.
        """
        texts = list(dataset.texts(held_out=False))
        held_out = [text for text in dataset.texts(held_out=True) if text.temperature == 0.0]
        self.recipe, self.n = recipe or family.recipe, len(texts)
        self.frozen, self.init, self.loss = family.frozen, family.init, family.loss
        self._family, self._rows = family, rows or BatchSize(self.recipe.n_rows)
        self._packing = TextPacking(texts, self._rows)
        if not self._packing.n_answers or not held_out:
            raise EdgespecError(
                f"too few texts to train on ({len(texts)}, and {len(held_out)} to judge by); "
                "let the target write more"
            )
        self.evaluate = AcceptanceEvaluation(
            family, held_out, self._rows, n_positions=n_positions, n_most=_MOST_HELD_OUT
        )

    def batches(self, seed: int, place: EpochPosition) -> Iterator[tuple[TrainingBatch, EpochPosition]]:
        """Yield batches from `place` on, without end, each with the position after it."""
        return batches(self._packing, self._family.embed, self._rows.n, seed, place)
