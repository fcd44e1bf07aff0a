"""Find out how finely a source measures energy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from edgespec.apps.energy.base import EnergyReading, EnergySource

_OBSERVED_S = 0.2
_ENOUGH_STEPS = 50


@dataclass(frozen=True, slots=True)
class Resolution:
    """Smallest differences that a source measures."""

    step_j: float | None = None
    """The smallest step seen of a counter; None for a source of power or a counter that stood still."""
    step_s: float | None = None
    """The median time between two steps of a counter."""
    interval_s: float | None = None
    """The time between two samples of a source of power; None for a counter or an assumption."""


def find_resolution(source: EnergySource, read: Callable[[], EnergyReading | None]) -> Resolution:
    """Return the resolution of `source`; watches a counter for 0.2 s. `read` returns None on failure."""
    if not source.counts:
        if math.isinf(source.interval_s):
            return Resolution()
        read()
        return Resolution(interval_s=source.interval_s)
    steps: list[float] = []
    times: list[float] = []
    began = before = read()
    while before and began and len(steps) < _ENOUGH_STEPS:
        now = read()
        if now is None or now.at - began.at > _OBSERVED_S:
            break
        pairs = zip(source.counted, before.figures, now.figures, strict=True)
        changes = [after - start for counted, start, after in pairs if counted and after > start]
        if changes:
            steps.append(min(changes) / 1e6)
            times.append(now.at)
            before = now
    gaps = [after - start for start, after in pairwise(times)]
    return Resolution(min(steps, default=None), median(gaps) if gaps else None)
