"""Acceptance of a draft on held-out texts, computed during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import TrainingText
from edgespec.apps.forge.training.arithmetic import Params
from edgespec.apps.forge.training.batches import BatchSize, EpochPosition, TextPacking, TrainingBatch, batches
from edgespec.apps.forge.training.head import HeadFamily


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of greedy drafts of a fixed length that begin everywhere in the target's answers.

    A token at position n counts only if all before it were right, as at run time.
    """

    n_drafts: int
    accepted: tuple[int, ...]
    """Drafts whose first n tokens were right, for n = 1, 2, ..."""

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share of right tokens at each position, of the drafts right up to there."""
        tested = (self.n_drafts, *self.accepted)
        return tuple(
            right / before if before else 0.0 for right, before in zip(self.accepted, tested, strict=False)
        )

    @property
    def mean_accepted(self) -> float:
        """The mean number of accepted tokens of a draft."""
        return sum(self.accepted) / self.n_drafts if self.n_drafts else 0.0


class AcceptanceEvaluation:
    """Held-out texts, packed once, and the draft's rollout, compiled once."""

    def __init__(
        self,
        family: HeadFamily,
        texts: Sequence[TrainingText],
        rows: BatchSize,
        *,
        n_positions: int,
        n_most: int,
    ) -> None:
        """Evaluate on up to `n_most` answers of `texts`, in drafts of `n_positions` tokens."""
        packing = TextPacking(texts, rows)
        self._n = n_positions
        self._batches: list[TrainingBatch] = []
        n_answers = 0
        for batch, place in batches(packing, family.embed, rows.n, 0, EpochPosition()):
            self._batches.append(batch)
            n_answers += int((batch.weights > 0).sum())
            if place.epoch or n_answers >= n_most:
                break
        self._walk = jax.jit(family.rollout, static_argnums=3)
        self._frozen = family.frozen

    def __call__(self, params: Params) -> Acceptance:
        """Return the acceptance of a draft with `params`."""
        n_drafts, accepted = 0, np.zeros(self._n, np.int64)
        for batch in self._batches:
            right = np.asarray(self._walk(params, self._frozen, batch, self._n))
            began = starts(batch, self._n)
            n_drafts += int(began.sum())
            accepted += np.cumprod(right[began], -1).sum(0)
        return Acceptance(n_drafts, tuple(map(int, accepted)))


def starts(batch: TrainingBatch, n: int) -> npt.NDArray[np.bool_]:
    """Return bool (rows, a): whether a draft of `n` tokens fits into its text at each answer."""
    answers = np.asarray(batch.answers)
    last = np.full_like(answers, -1)
    weights = np.zeros_like(batch.weights)
    last[:, : answers.shape[1] - n + 1] = answers[:, n - 1 :]
    weights[:, : answers.shape[1] - n + 1] = batch.weights[:, n - 1 :]
    found: npt.NDArray[np.bool_] = (np.asarray(batch.weights) > 0) & (weights > 0) & (last == answers + n - 1)
    return found
