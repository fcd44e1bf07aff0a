"""Timed passes of a model, and the curve that follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from edgespec.drafting.costs import CONTEXTS, N_MAX, CostCurve, interpolated
from edgespec.llama.lent_cache import LentSession
from edgespec.llama.session import Session

ENERGY_SIZES = (1, 2, 4, 8, 16, N_MAX)
"""The n whose joules are counted."""


@dataclass
class TimedSession:
    """A session that was filled to `n_past` tokens, and the times of its passes."""

    session: Session | LentSession
    n_past: int
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """n -> seconds of each sweep."""
    joules: dict[int, float] = field(default_factory=dict)

    def timed(self, n: int) -> float:
        """Return the seconds of one pass over `n` tokens, which are taken back afterwards."""
        tokens = [(11 + 13 * i) % self.session.model.n_vocab for i in range(n)]
        self.session.keep()
        began = perf_counter()
        self.session.eval(tokens, n_logits=n)
        spent = max(perf_counter() - began, 1e-9)
        self.session.rewind(self.n_past)
        return spent

    def first_timed(self, n: int) -> float:
        """Return as `timed` the best of three, since the first warms up; slow ones are not repeated."""
        seconds = [self.timed(n)]
        while len(seconds) < 3 and sum(seconds) < 1.0:
            seconds.append(self.timed(n))
        return min(seconds)

    def typical(self) -> dict[int, float]:
        """Return the median for each n."""
        return {n: statistics.median(seconds) for n, seconds in self.seconds.items()}


@dataclass
class ModelTimings:
    """The timed passes of one model, at one or two contexts."""

    contexts: list[TimedSession]
    """The shorter context first."""
    read: float
    """Seconds of a token in prefill."""
    read_joules: float | None = None
    """The same in joules; None where they cannot be counted."""

    def curve(self) -> CostCurve:
        """Return the curve in seconds."""
        return _extended([(one.n_past, one.typical()) for one in self.contexts], self.read)

    def joules_curve(self) -> CostCurve | None:
        """Return the curve in joules; None when a figure is missing: no counters, or they went away."""
        if not self.read_joules or any(len(one.joules) < len(ENERGY_SIZES) for one in self.contexts):
            return None
        return _extended([(one.n_past, one.joules) for one in self.contexts], self.read_joules)


def _extended(known: Sequence[tuple[int, dict[int, float]]], read: float) -> CostCurve:
    """Return the curve through what is `known` at one or two contexts, extended to those of all curves.

    A pass at the longer context takes no less than one at the shorter: attention reads more there, and
    a slope the other way, carried on to longer contexts still, would be noise made large.
    """
    near_at, near = known[0][0], interpolated(known[0][1])
    far_at, far = known[-1][0], interpolated(known[-1][1])
    scale = (CONTEXTS[1] - near_at) / (far_at - near_at) if far_at > near_at else 0.0
    extended = [a + max(0.0, b - a) * scale for a, b in zip(near, far, strict=True)]
    return CostCurve((tuple(near), tuple(extended)), read)


def spread_of(contexts: Sequence[TimedSession]) -> float:
    """Return the median over all passes of (interquartile range / median); 0 if nothing was repeated."""
    spreads = []
    for context in contexts:
        for seconds in context.seconds.values():
            if len(seconds) > 1:
                low, median, high = statistics.quantiles(seconds, n=4)
                spreads.append((high - low) / median)
    return statistics.median(spreads) if spreads else 0.0
