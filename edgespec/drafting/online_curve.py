"""A cost curve that follows the passes timed while a program runs.

The logarithms of (what a pass takes now / what the curve says) are estimated for all n at once, by an
extended Kalman filter (Kalman 1960). A pass over n tokens tells most of that n, less the farther another n
is: what slows down the reading of weights slows down passes over few tokens and leaves those over many as
they are, which arithmetic bounds. Two more estimates are of what the context adds: to a pass over one token,
and for each further token. A pass in a long text tells most of these, one in a short text next to nothing. An
estimate that no pass confirms stays, and becomes less sure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from edgespec.drafting.costs import extrapolated
from edgespec.drafting.profile import CONTEXTS, N_MAX, CostCurve

_SPREAD = 0.3
"""Standard deviation of the logarithm of a pass's time: how far hours differ, and guesses are wrong."""
_MEASURED_SPREAD = 0.08
"""The same of a measured curve, at the start."""
_NOISE = 0.06
"""The same from one pass to the next."""
_GROWTH_SPREAD = 0.5
"""The same of what the context adds, in a guess and as hours differ."""
_MEASURED_GROWTH_SPREAD = 0.15
_GROWTH_COMMON = 0.6  # of its variance, what one token and further ones share
_GROWN = slice(N_MAX, N_MAX + 2)  # of an estimate: what the context adds, to one token and for further ones
_COMMON = 0.2  # of the variance, what all n share
_REACH = 1.5  # of the rest; in square roots of n, as 1 and 3 tokens have less in common than 9 and 11
_MEMORY = 600.0  # passes after which an estimate that none confirms is nearly as unsure as at first
_TRUSTED = 2.0  # standard deviations: no pass counts for more, lest one beside a busy process spoil the curve
_DOUBT = 0.1  # of log(T(n) / T(m))
_EVERY = 4  # passes: a table each time would cost more than it is worth
_RARE = 64  # passes that a rare one stands for
_TIMED = 8  # passes over n tokens after which T(n) is known
_MOST = math.log(2.0)
_SCALING = 4  # passes that a guess takes its scale from
_READ = 0.3  # weight of a prompt in the mean of what reading costs
_SPAN = 128  # tokens of context over which `at` is not computed anew

_ROOTS = np.sqrt(np.arange(1, N_MAX + 1))
_ALIKE = _COMMON + (1.0 - _COMMON) * np.exp(-np.abs(_ROOTS[:, None] - _ROOTS) / _REACH)


def _covariance(spread: float, growth: float) -> np.ndarray:
    """The covariance of the logarithms of T(1) .. T(N_MAX), and of what the context adds."""
    found = np.zeros((N_MAX + 2, N_MAX + 2))
    found[:N_MAX, :N_MAX] = spread**2 * _ALIKE
    found[_GROWN, _GROWN] = growth**2 * (_GROWTH_COMMON + (1.0 - _GROWTH_COMMON) * np.eye(2))
    return found


_UNKNOWN = _covariance(_SPREAD, _GROWTH_SPREAD)


class OnlineCurve:
    """T(n), as the passes of this run tell."""

    def __init__(self, curve: CostCurve, *, guessed: bool = False, unsure: bool = False) -> None:
        """Start from `curve`; a `guessed` one takes its scale from the first passes.

        `unsure`: its shape was not measured, or on a busy machine. A guess is always unsure.
        """
        self._curve = curve
        self._is_measured = not (guessed or unsure)
        self._logs = np.zeros(N_MAX + 2)  # of T(1) .. T(N_MAX), then of what the context adds
        self._covariance = (
            _covariance(_MEASURED_SPREAD, _MEASURED_GROWTH_SPREAD) if self._is_measured else _UNKNOWN.copy()
        )
        self._n_timed = [0] * (N_MAX + 1)
        self._last = 1
        self._read_log = 0.0
        self._n_scaling = _SCALING if guessed else 0
        self._unread = guessed
        self._growths: dict[int, list[float]] = {}  # of the curve, by spans of context
        self._tables: dict[int, list[float]] = {}  # the same, as it was known when they were last forgotten
        self._known = self._logs.copy()
        self.n_observed = 0

    def at(self, n_past: int) -> list[float]:
        """Return T(0) .. T(N_MAX) after `n_past` tokens, in seconds. Do not change the list.

        It does not depend on who asked before: it is that of the middle of a span, and as it was known
        when all tables were last made anew.
        """
        span = round(n_past / _SPAN)
        table = self._tables.get(span)
        if table is None:
            near, growth = self._curve.passes[0], self._growth(n_past, self._known)
            costs = zip(near, growth, _factors(self._known), strict=True)
            table = [0.0, *(max(cost + added, cost * 0.5) * factor for cost, added, factor in costs)]
            # While all steps draft none is over one token: what was known of those may be from a slower hour.
            table[1] = min(table[1:])
            self._tables[span] = table
        return table

    def _growth(self, n_past: int, logs: np.ndarray) -> list[float]:
        """What the context adds to T(1) .. T(N_MAX) of the curve, by these estimates."""
        span = round(n_past / _SPAN)
        if span not in self._growths:
            self._growths[span] = self._curve.growth(span * _SPAN)
        growth = self._growths[span]
        one, further = np.exp(logs[_GROWN]).tolist()
        return [one * growth[0] + further * (added - growth[0]) for added in growth]

    def read(self, n_tokens: int, n_past: int) -> float:
        """Return the seconds of prefilling `n_tokens` into a cache of `n_past`, without logits."""
        if n_tokens < N_MAX:
            return self.at(n_past)[n_tokens]
        return self._read_by_curve(n_tokens, n_past) * math.exp(self._read_log)

    def _read_by_curve(self, n_tokens: int, n_past: int) -> float:
        """The same before any was timed: each token attends to all before it.

        The curve's own figure is of reading up to the longer of its contexts.
        """
        longer, usual = (self._growth(n, self._logs)[-1] for n in (n_past + n_tokens // 2, CONTEXTS[1] // 2))
        added = longer - usual
        return n_tokens * max(self._curve.read + added / N_MAX, self._curve.read * 0.5)

    def of(self, n: int, n_past: int) -> float:
        """Return T(n) after `n_past` tokens, for any n."""
        costs = self.at(n_past)
        return costs[n] if n <= N_MAX else extrapolated(costs, n, n)[0]

    def observe(self, n: int, n_past: int, seconds: float, *, rare: bool = False) -> None:
        """Learn that a pass over `n` <= N_MAX tokens after `n_past` took `seconds`.

        `rare`: few others will be timed, so this one counts for more.
        """
        self.n_observed += 1
        near, growth = self._curve.passes[0][n - 1], self._growth(n_past, self._logs)
        cost = max(near + growth[n - 1], near * 0.5)
        error = math.log(max(seconds, 1e-9) / cost) - self._logs[n - 1]
        scales = self._n_scaling > 0
        if scales:
            # The very first pass of a small model may take 20 times as long as the next: if it were believed,
            # there would be no next. So a guess rises in steps, and falls to what was really seen.
            self._n_scaling -= 1
            self._logs[:N_MAX] += min(_MOST, error)
        else:
            shares = max(0.0, growth[0] / cost), max(0.0, (growth[n - 1] - growth[0]) / cost)
            self._learn(n, error, np.array(shares), _RARE if rare else 1)
        if scales or rare or self.n_observed % _EVERY == 0:
            self._tables.clear()
            self._known = self._logs.copy()

    def _learn(self, n: int, error: float, shares: np.ndarray, n_passes: int) -> None:
        """Move the estimates; `n_passes` since the last one.

        `shares` of the cost are what the context adds to one token, and for further ones.
        """
        self._n_timed[n] += 1
        self._last = n
        kept = math.exp(-n_passes / _MEMORY)
        covariance = self._covariance
        covariance *= kept
        covariance += (1.0 - kept) * _UNKNOWN
        column = covariance[n - 1] + shares @ covariance[_GROWN]
        variance = column[n - 1] + shares @ column[_GROWN] + _NOISE**2
        most = _TRUSTED * math.sqrt(variance)
        self._logs += column * (max(-most, min(most, error)) / variance)
        covariance -= np.outer(column, column / variance)

    def observe_read(self, n_tokens: int, n_past: int, seconds: float) -> None:
        """Learn that `n_tokens` of a prompt were prefilled after `n_past` in `seconds`."""
        if n_tokens >= N_MAX:
            error = math.log(max(seconds, 1e-9) / self._read_by_curve(n_tokens, n_past)) - self._read_log
            self._read_log += error if self._unread else _READ * error
            self._unread = False

    def is_known(self, n: int) -> bool:
        """Whether T(n) was measured, or timed in some passes, and is no guess."""
        return self._is_measured or self._n_timed[n] >= _TIMED

    def is_doubtful(self, n: int) -> bool:
        """Whether T(n) may be another beside the last pass's than the table says: time one, to know."""
        if n > N_MAX:
            return False
        i, last, covariance = n - 1, self._last - 1, self._covariance
        return bool(covariance[i, i] + covariance[last, last] - 2.0 * covariance[i, last] > _DOUBT**2)

    def curve(self) -> CostCurve:
        """Return the curve as it is known now."""
        factors, near = _factors(self._logs), self._curve.passes[0]
        growth = self._growth(CONTEXTS[1], self._logs)
        far = tuple(cost + added for cost, added in zip(near, growth, strict=True))
        near, far = (tuple(s * f for s, f in zip(side, factors, strict=True)) for side in (near, far))
        return CostCurve((near, far), self._curve.read * math.exp(self._read_log))


def _factors(logs: np.ndarray) -> list[float]:
    factors: list[float] = np.exp(logs[:N_MAX]).tolist()
    return factors


class PassCurves(NamedTuple):
    """Curves of the target's and the draft model's passes, in seconds; told of every pass."""

    target: OnlineCurve
    draft: OnlineCurve | None
