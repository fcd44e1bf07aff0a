"""Costs of a model's passes on this machine: curves, measured or guessed, corrected by timed passes.

A curve is T(n): the seconds of one pass over n tokens with all their logits, at two lengths of context;
between them it is interpolated, beyond them extended. A run starts from the stored curve (profile.py) or
from a guess out of the file's size, and `OnlineCurve` moves it with every pass that is timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.decoding.options import MAX_GAMMA

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
    """Return what a pass over `n` tokens costs one of `m` requests that add i tokens each, i = 0, 1 ..

    Element i is T(n) + (T(n + m i) - T(n)) / m: each pays an equal part of what all of them add. The price of
    the last token alone would not do: T has steps, so that it may be nothing, and then every one seems free.
    `costs`: T(0) .. T(N_MAX).
    """
    together = extrapolated(costs, n + m * (n_values - 1), n, m)
    return [together[0] + (cost - together[0]) / m for cost in together]


@dataclass(frozen=True)
class CostCurve:
    """T(n) of one model on one machine, with its kernels and threads; in seconds, or in joules."""

    passes: tuple[tuple[float, ...], tuple[float, ...]]
    """Element [i][n - 1]: one pass over n = 1 .. N_MAX tokens at context CONTEXTS[i]."""
    read: float
    """Cost of a token in prefill, where many are read at once without logits."""

    def at(self, n_past: int) -> list[float]:
        """Return T(0) = 0, T(1) .. T(N_MAX) after `n_past` tokens, in the curve's unit."""
        near, far = self.passes
        share = (n_past - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
        share = max(share, -CONTEXTS[0] / CONTEXTS[1])
        return [0.0, *(max(a + (b - a) * share, a * 0.5) for a, b in zip(near, far, strict=True))]


# T(n) / T(1) of edgespec's kernels and of llama.cpp's (1.5B Q4_K_M, context 128), for the first steps on a
# machine that was never measured: those of the processor on which a further token costs most. Guesses that
# were too low made first answers slower than plain ones; guesses that are too high cost little.
_SHAPES = {
    True: {1: 1.0, 2: 1.1, 4: 1.4, 8: 2.0, 16: 3.8, 33: 7.6},
    False: {1: 1.0, 2: 1.9, 4: 3.1, 8: 5.1, 16: 6.0, 33: 9.0},
}
_GUESSED_BYTES_PER_S = 40e9
_NO_PASS = 1e-3  # of T: the curves are of positive numbers
_GUESSED_LONG = 1.13  # T(1) at the longer context over T(1) at the shorter one


def guessed_curve(file_bytes: int, *, own_kernels: bool) -> CostCurve:
    """Return the curve to expect of a model of that size before any of its passes was timed.

    Decoding one token reads every weight once, so T(1) follows the file's size. The first real steps correct
    the scale of the whole curve.
    """
    one = file_bytes / _GUESSED_BYTES_PER_S
    shape = interpolated(_SHAPES[own_kernels])
    near = tuple(one * factor for factor in shape)
    return CostCurve((near, tuple(_GUESSED_LONG * s for s in near)), read=near[-1] / N_MAX)


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


class OnlineCurve:
    """A curve that follows the passes timed while a program runs.

    The logarithm of (observed / expected) moves a factor of the whole curve fast, since a machine that
    slows down does so for every n, and factors of that n and of those near it, which correct the curve's
    shape: fast at first where it was not measured well, else slowly.
    """

    _COMMON, _RARE, _OWN, _READ = 0.1, 0.5, 0.05, 0.3
    _UNSURE = 3  # passes that a shape counts as which was not measured well
    _TIMED = 8  # passes near n after which T(n) is known
    _MOST = math.log(2.0)  # one pass beside a busy process must not spoil the curve
    _SCALING = 4  # passes that a guess takes its scale from
    _SPAN = 128  # tokens of context over which `at` is not computed anew

    def __init__(self, curve: CostCurve, *, guessed: bool = False, unsure: bool = False) -> None:
        """Start from `curve`; a `guessed` one takes its scale from the first passes.

        `unsure`: its shape was not measured, or on a busy machine. A guess is always unsure.
        """
        self._curve = curve
        self._common = 0.0
        self._own = [0.0] * (N_MAX + 1)
        self._n_own = [self._UNSURE if guessed or unsure else 1.0 / self._OWN] * (N_MAX + 1)
        self._read_log = 0.0
        self._n_scaling = self._SCALING if guessed else 0
        self._unread = guessed
        self._base: list[float] = []
        self._base_at = -1
        self._table: list[float] = []
        self.n_observed = 0

    def at(self, n_past: int) -> list[float]:
        """Return T(0) .. T(N_MAX) after `n_past` tokens, in seconds. Do not change the list."""
        if n_past // self._SPAN != self._base_at:
            self._base_at = n_past // self._SPAN
            self._base = self._curve.at(n_past)
            self._tabulate()
        return self._table

    def read(self, n_tokens: int, n_past: int) -> float:
        """Return the seconds of prefilling `n_tokens` into a cache of `n_past`, without logits."""
        if n_tokens < N_MAX:
            return self.at(n_past)[n_tokens]
        return n_tokens * self._curve.read * math.exp(self._read_log)

    def of(self, n: int, n_past: int) -> float:
        """Return T(n) after `n_past` tokens, for any n."""
        costs = self.at(n_past)
        return costs[n] if n <= N_MAX else extrapolated(costs, n, n)[0]

    def observe(self, n: int, n_past: int, seconds: float, *, rare: bool = False) -> None:
        """Learn that a pass over `n` <= N_MAX tokens after `n_past` took `seconds`.

        `rare`: few others will be timed, so this one counts for more.
        """
        error = min(self._MOST, math.log(max(seconds, 1e-9) / self.at(n_past)[n]))
        self.n_observed += 1
        scales = self._n_scaling > 0
        if scales:
            # The very first pass of a small model may take 20 times as long as the next: if it were believed,
            # there would be no next. So a guess rises in steps, and falls to what was really seen.
            self._n_scaling -= 1
            self._common += error
        else:
            error = max(-self._MOST, error)
            self._common += (self._RARE if rare else self._COMMON) * error
            self._correct_shape(n, error)
        if scales or rare or self.n_observed % 8 == 0:  # a table each time would cost more than it is worth
            self._tabulate()

    def _correct_shape(self, n: int, error: float) -> None:
        """Move the factors from n / 2 to 2 n, the less the farther they are: drafts vary around n."""
        for other in range(n // 2 + 1, min(N_MAX + 1, 2 * n)):
            near = 1.0 - abs(math.log2(other / n))
            self._own[other] += max(self._OWN, 1.0 / self._n_own[other]) * near * error
            self._n_own[other] += near

    def observe_read(self, n_tokens: int, seconds: float) -> None:
        """Learn that a prompt of `n_tokens` was prefilled in `seconds`."""
        if n_tokens >= N_MAX:
            error = math.log(max(seconds, 1e-9) / (n_tokens * self._curve.read)) - self._read_log
            self._read_log += error if self._unread else self._READ * error
            self._unread = False

    def is_known(self, n: int) -> bool:
        """Say whether T(n) was measured, or timed in some passes, and is no guess."""
        return self._n_own[n] >= self._UNSURE + self._TIMED

    def curve(self) -> CostCurve:
        """Return the curve as it is known now."""
        factors = [math.exp(self._common + own) for own in self._own[1:]]
        near, far = (tuple(s * f for s, f in zip(side, factors, strict=True)) for side in self._curve.passes)
        return CostCurve((near, far), self._curve.read * math.exp(self._read_log))

    def _tabulate(self) -> None:
        self._table = [s * math.exp(self._common + own) for s, own in zip(self._base, self._own, strict=True)]
        # While all steps draft none is over one token: what was known of those may be from a slower hour.
        self._table[1] = min(self._table[1:])


class PassCurves(NamedTuple):
    """Curves of the target's and the draft model's passes, in seconds; told of every pass."""

    target: OnlineCurve
    draft: OnlineCurve | None
