"""Accept, resample, bonus: the reference ("twin") of `csrc/verify.c`.

Pure functions: no model, no clock, and coins come in. A draft x_1 .. x_n was sampled from
q_1 .. q_n; the target's probabilities stand in n + 1 rows, row i for the position of x_(i+1). What
is emitted, the first tau drafted tokens and one more, is distributed as the target alone would.

Chain rule: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
Block rule: Sun et al., arXiv 2403.10444, algorithm 2; it never accepts less than the chain rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec.sampling import Floats, sample

Rule = Literal["block", "chain", "match"]
"""The match rule is `Generation`'s own: the target samples each position with a coin of that position, and
drafted tokens, point masses all, are kept while they are what it samples. So the text for a seed does not
depend on what was drafted (drafter invariance: Daliri et al., arXiv 2408.07978)."""


@dataclass(frozen=True)
class Acceptance:
    """The probabilities behind a rule, for n drafted tokens.

    `accept[i - 1]` is the probability of coin i: min(1, p/q) for the chain rule, h_i for the block
    rule. `weight[i]`, i = 0 .. n, scales p in the residual when tau is i.
    """

    accept: list[float]
    weight: list[float]


def acceptance(target_probs: Floats, draft_probs: Floats, draft: Sequence[int], rule: Rule) -> Acceptance:
    """Return the rule's coin probabilities and residual weights.

    Shapes: `target_probs` (n + 1, n_vocab), `draft_probs` (n, n_vocab), `draft` n tokens. A
    deterministic proposal has a point mass as its row of `draft_probs`.
    """
    accept, weight = [], [1.0]
    for i, token in enumerate(draft, start=1):
        p, q = float(target_probs[i - 1, token]), float(draft_probs[i - 1, token])
        carried = weight[-1]
        ratio = 1.0 if carried * p >= q else carried * p / q
        if rule == "chain":
            accept.append(ratio)
            weight.append(1.0)
            continue
        weight.append(ratio)
        if i == len(draft):
            accept.append(ratio)
        else:
            left = float(np.maximum(0.0, ratio * target_probs[i] - draft_probs[i]).sum())
            accept.append(left / (left + (1.0 - ratio)) if left > 0.0 else 0.0)
    return Acceptance(accept, weight)


def next_probs(target_probs: Floats, draft_probs: Floats, tau: int, weight: float) -> Floats:
    """Return the distribution of the token after `tau` accepted ones: residual, or p as the bonus."""
    p: Floats = target_probs[tau]
    if tau == len(draft_probs):
        return p
    residual = np.maximum(0.0, weight * p - draft_probs[tau])
    return np.asarray(residual / residual.sum()) if residual.sum() > 0.0 else p


def verify(
    target_probs: Floats, draft_probs: Floats, draft: Sequence[int], coins: Sequence[float], rule: Rule
) -> tuple[int, int]:
    """Run the rule with n + 1 coins in [0, 1); return (n_accepted, next_token)."""
    found = acceptance(target_probs, draft_probs, draft, rule)
    tau = 0
    for i, (coin, probability) in enumerate(zip(coins, found.accept, strict=False), start=1):
        if coin < probability:
            tau = i
        elif rule == "chain":
            break
    return tau, sample(next_probs(target_probs, draft_probs, tau, found.weight[tau]), coins[-1])


def tau_probs(found: Acceptance, rule: Rule) -> list[float]:
    """Return the probability of each tau = 0 .. n over independent uniform coins."""
    accept = found.accept
    n = len(accept)
    if rule == "chain":
        reached = [float(np.prod(accept[:i])) for i in range(n + 1)]
        return [reached[i] * (1.0 - accept[i] if i < n else 1.0) for i in range(n + 1)]
    missed_after = [float(np.prod([1.0 - h for h in accept[i:]])) for i in range(n + 1)]
    return [(accept[i - 1] if i else 1.0) * missed_after[i] for i in range(n + 1)]
