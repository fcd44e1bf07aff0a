"""A running sum of the energy spent since a start, which can be asked for any moment."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from edgespec.apps.energy.base import EnergyReading, EnergySource

MOST_INTERVALS = 4.0
"""Power samples further apart than this many intervals leave a gap."""


class TrailPoint(NamedTuple):
    """The sums up to a moment."""

    joules: tuple[float, ...]
    """Energy spent in each domain."""
    gap_s: float
    """Seconds in which samples were too far apart."""


class EnergyTrail:
    """Successive readings of a source and the running sums of their joules.

    Of a counter only the last reading is kept: it is never interpolated.
    """

    def __init__(self, source: EnergySource) -> None:
        self._source = source
        self._readings: list[EnergyReading] = []
        self._points: list[TrailPoint] = []

    def clear(self) -> None:
        """Forget all readings: the next one begins a new trail."""
        self._readings.clear()
        self._points.clear()

    @property
    def last(self) -> TrailPoint | None:
        """The sums up to the last reading; None before the first."""
        return self._points[-1] if self._points else None

    def add(self, reading: EnergyReading) -> None:
        """Add a reading. Raises UnreadableError, and adds nothing, if the energy spent cannot be told."""
        if not self._readings:
            point = TrailPoint((0.0,) * len(reading.figures), 0.0)
        else:
            before, last = self._readings[-1], self._points[-1]
            spent = self._source.joules(before, reading)
            gap_s = last.gap_s + self._gap_s(before, reading)
            point = TrailPoint(tuple(a + b for a, b in zip(last.joules, spent, strict=True)), gap_s)
        if self._source.counts:
            self.clear()
        self._readings.append(reading)
        self._points.append(point)

    def at(self, moment: float) -> TrailPoint:
        """Return the sums up to `moment`, which is limited to between the first and the last reading."""
        i = bisect_right(self._readings, moment, key=lambda reading: reading.at)
        if i == len(self._readings):
            return self._points[-1]
        if i == 0:
            return self._points[0]
        before, after, point = self._readings[i - 1], self._readings[i], self._points[i - 1]
        share = (moment - before.at) / (after.at - before.at)
        pairs = zip(before.figures, after.figures, strict=True)
        between = EnergyReading(moment, tuple(a + share * (b - a) for a, b in pairs))
        spent = self._source.joules(before, between)
        return TrailPoint(
            tuple(a + b for a, b in zip(point.joules, spent, strict=True)),
            point.gap_s + share * self._gap_s(before, after),
        )

    def _gap_s(self, before: EnergyReading, after: EnergyReading) -> float:
        """Return the seconds between two samples if they are too far apart, else 0."""
        seconds = after.at - before.at
        is_gap = not self._source.counts and seconds > MOST_INTERVALS * self._source.interval_s
        return seconds if is_gap else 0.0
