"""What a drafter is: something that proposes the next tokens and learns what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec import _core

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens. Their distributions q stand in the sampler's slots 0 .. n - 1."""

    tokens: Sequence[int] = ()


class Drafter(Protocol):
    """The four verbs of a drafter, called in this order: begin, then draft and accept in turns, close.

    For exactness, a drafter must sample each token from the q it leaves in the slot (a
    deterministic proposal is a point mass), and how many it proposes may depend on what came before
    and on its own distributions, never on the probability of a token it sampled.
    """

    name: str

    def begin(self, tokens: Sequence[int]) -> None:
        """Start on a new timeline that holds `tokens` (the prompt and the first emitted token)."""

    def draft(
        self,
        tokens: Sequence[int],
        gamma: int,
        sampler: _core.Sampler,
        recent: Callable[[Sequence[int]], Tokens],
        coins: Callable[[int], list[float]],
    ) -> Draft:
        """Propose at most `gamma` >= 1 tokens to follow `tokens`.

        `recent` gives the penalties' history for a prefix, `coins(n)` the next n coins.
        """

    def accept(self, tokens: Sequence[int], n_accepted: int) -> None:
        """Learn that `n_accepted` of the last draft were kept; the timeline now holds `tokens`."""

    def close(self) -> None:
        """Give back what the drafter holds."""
