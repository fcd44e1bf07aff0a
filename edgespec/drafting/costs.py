"""Costs of a model's passes on this machine: curves, measured or guessed, corrected by timed passes.

A curve is T(n): the seconds of one pass over n tokens with all their logits, at two lengths of context;
between them it is interpolated, beyond them extended. A run starts from the stored curve (profile.py) or
from a guess out of the file's size, and `OnlineCurve` moves it with every pass that is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from edgespec.decoding.option_table import MAX_GAMMA

N_MAX = MAX_GAMMA + 1
"""Longest pass in a curve: the longest draft and the token before it."""

CONTEXTS = (128, 2048)
"""Tokens already in the cache, for which curves are made."""


def extrapolated(costs: Sequence[float], last: int, first: int = 0, step: int = 1) -> list[float]:
    """Return T(first), T(first + step) .. up to T(last) for `costs` T(0) .. T(N_MAX).

    Beyond them, T grows as in their upper half.
    """
    end = len(costs) - 1
    slope = max(0.0, (costs[end] - costs[len(costs) // 2]) / (end - len(costs) // 2))
    return [costs[n] if n <= end else costs[end] + slope * (n - end) for n in range(first, last + 1, step)]


def per_request(costs: Sequence[float], n: int) -> list[float]:
    """Return each one's share of the passes that `n` requests make together, with as many tokens each.

    `costs`: T(0) .. T(N_MAX). Returns S(0) .. S(N_MAX), S(i) = T(n i) / n.
    """
    return [cost / n for cost in extrapolated(costs, n * (len(costs) - 1), step=n)]


def one_more_each(costs: Sequence[float], n: int, m: int, n_values: int) -> list[float]:
    """The costs of a pass over `n` tokens for one of `m` requests that add i tokens each, i = 0, 1 ..

    Element i is T(n) + (T(n + m i) - T(n)) / m: each pays an equal part of what all of them add. The price of
    the last token alone would not do: T has steps, so that it may be nothing, and then every one seems free.
    `costs`: T(0) .. T(N_MAX).
    """
    together = extrapolated(costs, n + m * (n_values - 1), n, m)
    return [together[0] + (cost - together[0]) / m for cost in together]


Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e300)]
_Side = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=N_MAX, max_length=N_MAX)]


@dataclass(frozen=True)
class CostCurve:
    """T(n) of one model on one machine, with its kernels and threads; in seconds, or in joules."""

    passes: tuple[_Side, _Side]
    """Element [i][n - 1]: one pass over n = 1 .. N_MAX tokens at context CONTEXTS[i]."""
    read: Positive
    """Cost of a token in prefill, where many are read at once without logits."""
    contexts: tuple[Literal[128], Literal[2048]] = (128, 2048)
    """CONTEXTS, for a profile's file: one with others is not read."""

    def at(self, n_past: int) -> list[float]:
        """Return T(0) = 0, T(1) .. T(N_MAX) after `n_past` tokens, in the curve's unit."""
        near = self.passes[0]
        return [0.0, *(max(a + b, a * 0.5) for a, b in zip(near, self.growth(n_past), strict=True))]

    def growth(self, n_past: int) -> list[float]:
        """The part of T(1) .. T(N_MAX) that the context adds to what they cost at CONTEXTS[0]: attention."""
        share = (n_past - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
        share = max(share, -CONTEXTS[0] / CONTEXTS[1])
        return [(b - a) * share for a, b in zip(*self.passes, strict=True)]


# T(n) / T(1) of edgespec's kernels and of llama.cpp's (1.5B Q4_K_M, context 128), for the first steps on a
# machine that was never measured: those of the processor on which a further token costs most. Guesses that
# were too low made first answers slower than plain ones; guesses that are too high cost little.
_SHAPES = {
    True: {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.0, 16: 3.8, 33: 7.6},
    False: {1: 1.0, 2: 1.9, 4: 3.1, 8: 5.1, 16: 6.0, 33: 9.0},
}
_GUESSED_BYTES_PER_S = 40e9
_NO_PASS = 1e-3  # of T: the curves are of positive numbers
# What the longer context adds, over T(1): the cache is read once, and each of n tokens attends to all of it.
_GUESSED_GROWTH = (0.06, 0.08)


def guessed_curve(file_bytes: int, *, own_kernels: bool) -> CostCurve:
    """Return the curve to expect of a model of that size before any of its passes was timed.

    Decoding one token reads every weight once, so T(1) follows the file's size. The first real steps correct
    the scale of the whole curve.
    """
    one = file_bytes / _GUESSED_BYTES_PER_S
    shape = interpolated(_SHAPES[own_kernels])
    near = tuple(one * factor for factor in shape)
    once, each = (one * share for share in _GUESSED_GROWTH)
    far = tuple(cost + once + each * n for n, cost in enumerate(near, 1))
    return CostCurve((near, far), read=near[-1] / N_MAX)


def block_curve(curve: CostCurve, n_block: int) -> CostCurve:
    """Return the costs of drafting with a head that drafts `n_block` - 1 tokens in one pass over `n_block`.

    T(1) is that of one more token of a draft, which needs no pass; all others are that of the pass that
    begins it. A curve that was made so stays the same.
    """
    near, far = ((_NO_PASS * side[n_block - 1], *[side[n_block - 1]] * (N_MAX - 1)) for side in curve.passes)
    return CostCurve((near, far), curve.read)


def interpolated(known: dict[int, float]) -> list[float]:
    """Return values for n = 1 .. N_MAX, linear between the `known` n; 1 and N_MAX must be known."""
    points = sorted(known.items())
    values = []
    for n in range(1, N_MAX + 1):
        left, right = next(pair for pair in itertools.pairwise(points) if pair[1][0] >= n)
        share = (n - left[0]) / (right[0] - left[0])
        values.append(left[1] + (right[1] - left[1]) * share)
    return values
