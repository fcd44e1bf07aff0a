"""How finely a source tells energy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from edgespec.energy.base import Reading, Source

_LOOKED_S = 0.2  # at a counter
_LOOKED_AT = 50  # steps of it, which are enough


@dataclass(frozen=True, slots=True)
class Resolution:
    """How finely a source tells energy."""

    step_j: float | None = None
    """Of a counter: its smallest step seen. None: a source of power, or it stood still."""
    step_s: float | None = None
    """Of a counter: the median time between two steps."""
    interval_s: float | None = None
    """Of a source of power: the time between two samples; None: a counter, or an assumption."""


def find_resolution(source: Source, read: Callable[[], Reading | None]) -> Resolution:
    """Return the resolution of `source`, which `read` reads (None: it could not be); a counter for 0.2 s."""
    if not source.counts:
        if math.isinf(source.interval_s):
            return Resolution()
        read()
        return Resolution(interval_s=source.interval_s)
    steps: list[float] = []
    times: list[float] = []
    began = before = read()
    while before and began and len(steps) < _LOOKED_AT:
        now = read()
        if now is None or now.at - began.at > _LOOKED_S:
            break
        pairs = zip(source.counted, before.figures, now.figures, strict=True)
        changes = [after - start for counted, start, after in pairs if counted and after > start]
        if changes:
            steps.append(min(changes) / 1e6)
            times.append(now.at)
            before = now
    apart = [after - start for start, after in pairwise(times)]
    return Resolution(min(steps, default=None), median(apart) if apart else None)
