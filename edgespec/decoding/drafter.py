"""What a drafter is: something that proposes the next tokens and learns what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.tree import Tree

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft."""

    path: Sequence[int]
    """The accepted nodes of the tree, root to leaf."""
    emitted: Sequence[int]
    """The accepted tokens and the target's own after them."""
    n_evaluated: int
    """Tokens in the target's pass."""
    verify_s: float
    """The target's pass alone, in seconds."""
    judged: Sequence[tuple[int, float, float]] = ()
    """(node, p, q) of those that were judged, where the rule computes them: nodes below the root and below
    accepted ones, up to the accepted one among siblings."""


class Drafter(Protocol):
    """The three verbs of a drafter, called in this order: begin, then draft and accept in turns.

    For exactness, a drafter must sample each token from the q it leaves in the node's slot (a
    deterministic proposal is a point mass and has none), and whether a sampled token is proposed may depend
    on what came before and on the drafter's own distributions, never on what the token turned out to be.
    """

    n_max: int
    """Most nodes of a tree it makes: the slots that the sampler needs."""

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
    ) -> Tree:
        """Propose at most `room` tokens, maybe none, to follow `tokens`: a tree as `tree.order` lays it out.

        `recent` gives the penalties' history for a prefix, `coins(n)` the next n coins.
        """

    def accept(self, tokens: Sequence[int], outcome: Outcome) -> None:
        """Learn what became of the last draft; the timeline now holds `tokens`."""
