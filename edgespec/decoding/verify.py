"""Verification: which drafted tokens are kept, and the token that follows them.

One pass of the target has given its logits after the sequence (row 0) and after each node of the tree (row
i + 1). Let p be the target's distribution at a place, after the filters; x a drafted token there; and q the
distribution that x was sampled from (for a point mass: 1 at x).

chain   From the root down, siblings in order: keep x with probability min(1, p(x) / q(x)); after a rejection
        p becomes the residual, the normalised max(0, p - q). The next token is sampled from the p at the end.
        Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. On a
        tree: Miao et al. (SpecInfer), arXiv 2305.09781, section 4; siblings sampled without replacement:
        Chen et al. (Sequoia), arXiv 2402.12374, section 3.
block   From the leaves up: keep the whole path to a leaf with probability weight(x) =
        min(1, weight(parent) p(x) / q(x)); after a rejection the leaf is taken away, and p becomes the
        normalised max(0, weight(parent) p - q). It never keeps less than the chain rule.
        Sun et al., arXiv 2403.10444, algorithm 2. On a tree: Weng et al., arXiv 2505.12398, section 3.
match   The target samples each position with a coin of that position, and x is kept if it is that token. No
        coin depends on what was drafted, so for a seed the text is plain decoding's own.
        Daliri et al., arXiv 2408.07978.

All three are exact: what is emitted is distributed as the target alone would emit it. Chain and block run in
the C core (`csrc/verify.c`); `tests/support/reference.py` has them in Python, and the tests compare the two.

A lenience l below 1 is not exact (Leviathan et al., appendix): the chain rule keeps x with probability
min(1, p(x) / (l q(x))). At temperature 0, the match rule also keeps an x that is at least l times as likely
as the target's likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from edgespec.decoding.choices import Rule
from edgespec.decoding.drafter import Position
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.session import Rows
from edgespec.decoding.tree import Lowered

Judged: TypeAlias = list[tuple[int, float, float]]
"""(node, p, q) of the nodes that were judged; none by the match rule, which computes no probability."""


class Verifier:
    """Verifies the trees of one generation, by one rule."""

    def __init__(
        self,
        rule: Rule,
        position: Position,
        *,
        is_eog: Callable[[int], bool],
        lenience: float = 1.0,
        constraint: Constraint | None = None,
    ) -> None:
        """Sample with `position` what `constraint` allows."""
        self._rule = rule
        self._position = position
        self._is_eog = is_eog
        self._lenience = lenience
        self._constraint = constraint

    def verify(self, tree: Lowered, rows: Rows) -> tuple[list[int], int, Judged]:
        """Return the kept nodes, root to leaf, the token that follows them, and what was judged.

        `rows` are the target's logits, shape (n_nodes + 1, n_vocab). Without nodes a token is sampled.
        """
        if self._rule == "match":
            path, following = self._match(tree, rows)
            return path, following, []
        sampler, recent = self._position.sampler, self._position.recent
        if self._constraint:
            rows = self._constraint.masked(rows, tree.paths())
        coins = self._position.coins(tree.n_nodes + 1)  # one for each node, the last for the token after
        is_block = self._rule == "block"
        return sampler.verify(rows, *tree, recent(()), coins, is_block, lenience=self._lenience)

    def _match(self, tree: Lowered, rows: Rows) -> tuple[list[int], int]:
        position = self._position
        tokens, parents, _ = tree
        path: list[int] = []
        kept: list[int] = []  # their tokens
        node = -1
        while True:
            (coin,) = position.coins(1)  # one for each emitted token and no other, as in plain decoding
            recent = position.recent(kept)
            row = self._allowed(rows[node + 1], kept)
            token = position.sampler.sample(row, recent, coin, -1)
            children = [i for i in range(node + 1, len(parents)) if parents[i] == node]
            if not children:
                return path, token
            drafted = [tokens[i] for i in children]
            found = matching(
                drafted, token, partial(position.sampler.adjusted, row, recent), lenience=self._lenience
            )
            if found is None:
                return path, token
            node = children[found]
            path.append(node)
            kept.append(drafted[found])
            if self._is_eog(drafted[found]):
                return path, token  # the loop drops it: nothing follows an end-of-generation token

    def _allowed(self, row: Rows, path: Sequence[int]) -> Rows:
        if not self._constraint:
            return row
        masked = self._constraint.mask(row, path, place=len(path))  # each stays until the text moves on
        return row if masked is None else masked


def matching(
    drafted: Sequence[int],
    token: int,
    adjusted: Callable[[list[int]], list[float]],
    *,
    lenience: float = 1.0,
) -> int | None:
    """Return which of the `drafted` tokens of one position is kept, as an index; None: none is.

    `token` is what the target sampled there: it goes before all others. With a `lenience` below 1, at
    temperature 0, the likeliest of the others may be kept. `adjusted` returns the target's logits of tokens
    after bias and penalties, so that a forbidden token never is.
    """
    if token in drafted:
        return drafted.index(token)
    if not drafted or lenience >= 1.0:
        return None
    *logits, own = adjusted([*drafted, token])
    likeliest = max(range(len(drafted)), key=logits.__getitem__)
    return likeliest if logits[likeliest] >= own + math.log(lenience) else None
