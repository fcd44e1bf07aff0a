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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft."""

    n_accepted: int
    emitted: Sequence[int]
    """The accepted tokens and the target's own after them."""
    verify_s: float
    """The target's pass and the verdict, in seconds."""
    judged: Sequence[tuple[float, float]] = ()
    """(p, q) of the accepted tokens and of the first rejected one, where the rule computes them."""


class Drafter(Protocol):
    """The three verbs of a drafter, called in this order: begin, then draft and accept in turns.

    For exactness, a drafter must sample each token from the q it leaves in the slot (a
    deterministic proposal is a point mass), and how many it proposes may depend on what came before
    and on its own distributions, never on the probability of a token it sampled.
    """

    n_max: int
    """Longest draft it makes: the slots that the sampler needs."""

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new timeline that holds `tokens` (the prompt and the first emitted token).

        `sampled`: the rule weighs p against q, so that sampled tokens may be proposed; else a token
        is accepted when it is the target's own sample, and only point masses make sense. At most
        `n_predict` tokens are emitted in all.
        """

    def draft(
        self,
        tokens: Sequence[int],
        room: int,
        sampler: _core.Sampler,
        recent: Callable[[Sequence[int]], Tokens],
        coins: Callable[[int], list[float]],
    ) -> Draft:
        """Propose at most `room` tokens, maybe none, to follow `tokens`.

        `recent` gives the penalties' history for a prefix, `coins(n)` the next n coins.
        """

    def accept(self, tokens: Sequence[int], outcome: Outcome) -> None:
        """Learn what became of the last draft; the timeline now holds `tokens`."""
