"""The interface of drafters, which propose the next tokens and learn what became of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.session import Rows
from edgespec.decoding.tree import Tree

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Position:
    """The means to sample a token after the sequence or after drafted tokens, for both models alike."""

    sampler: _core.Sampler
    """Keeps in its slots what drafted tokens were sampled from."""
    recent: Callable[[Sequence[int]], array[int]]
    """The tokens that the filters look back on after these drafted ones, C ints."""
    coins: Callable[[int], list[float]]
    """Return the next n random numbers of the generation, each in [0, 1)."""


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """The verified part of a draft, and what verifying it took."""

    path: Sequence[int]
    """The accepted nodes of the tree, root to leaf."""
    emitted: Sequence[int]
    """The accepted tokens and the target's own after them."""
    n_pending: int
    """Tokens always in the target's next pass: the last one, and those before it that its cache lacks."""
    n_evaluated: int
    """Tokens in the target's pass, those of other texts among them."""
    verify_s: float
    """The target's pass alone, in seconds."""
    judged: Sequence[tuple[int, float, float]] = ()
    """(node, p, q) of those that were tested, if the rule computes them: nodes below the root and below
    accepted ones, up to the accepted one among siblings."""
    rows: Rows | None = None
    """The target's logits after the sequence and after each node, which the target's next pass overwrites."""


class Drafter(Protocol):
    """The three verbs of a drafter, called in this order: begin, then draft and accept in turns.

    For exactness, a drafter must sample each token from the q it leaves in the node's slot (a
    deterministic proposal is a point mass and has none), and whether a sampled token is proposed may depend
    on what came before and on the drafter's own distributions, never on what the token turned out to be.
    """

    n_max: int
    """Most nodes of a tree it makes: the slots that the sampler needs."""

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new sequence that holds `tokens` (the prompt and the first emitted token).

        `sampled`: the rule weighs p against q, so that sampled tokens may be proposed; else a token
        is accepted when it is the target's own sample, and only point masses make sense. At most
        `n_predict` tokens are emitted in all.
        """

    def draft(self, tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Return a tree of at most `room` nodes, maybe none, to follow `tokens`, in `tree.order`."""

    def accept(self, tokens: Sequence[int], outcome: DraftOutcome) -> None:
        """Learn what became of the last draft; the sequence now holds `tokens`."""

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted so far of each source of drafts."""

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""

    def note(self) -> str:
        """Return a sentence about what was drafted, or why nothing was."""
