"""A running sum of the energy spent since a start, which can be asked for any moment."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from edgespec.energy.base import Reading, Source

MOST_INTERVALS = 4.0
"""Power samples further apart than this many intervals leave a gap."""


class Point(NamedTuple):
    """The sums up to a moment."""

    joules: tuple[float, ...]
    """Energy spent in each domain."""
    gap_s: float
    """Seconds in which samples were too far apart."""


class Trail:
    """Successive readings of a source and the running sums of their joules.

    Of a counter only the last reading is kept: it is never interpolated.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._readings: list[Reading] = []
        self._points: list[Point] = []

    def clear(self) -> None:
        """Forget all readings: the next one begins a new trail."""
        self._readings.clear()
        self._points.clear()

    @property
    def last(self) -> Point | None:
        """The sums up to the last reading; None before the first."""
        return self._points[-1] if self._points else None

    def add(self, reading: Reading) -> None:
        """Add a reading. Raises UnreadableError, and adds nothing, if the energy spent cannot be told."""
        if not self._readings:
            point = Point((0.0,) * len(reading.figures), 0.0)
        else:
            before, last = self._readings[-1], self._points[-1]
            spent = self._source.joules(before, reading)
            gap_s = last.gap_s + self._gap_s(before, reading)
            point = Point(tuple(a + b for a, b in zip(last.joules, spent, strict=True)), gap_s)
        if self._source.counts:
            self.clear()
        self._readings.append(reading)
        self._points.append(point)

    def at(self, moment: float) -> Point:
        """Return the sums up to `moment`, which is limited to between the first and the last reading."""
        i = bisect_right(self._readings, moment, key=lambda reading: reading.at)
        if i == len(self._readings):
            return self._points[-1]
        if i == 0:
            return self._points[0]
        before, after, point = self._readings[i - 1], self._readings[i], self._points[i - 1]
        share = (moment - before.at) / (after.at - before.at)
        pairs = zip(before.figures, after.figures, strict=True)
        between = Reading(moment, tuple(a + share * (b - a) for a, b in pairs))
        spent = self._source.joules(before, between)
        return Point(
            tuple(a + b for a, b in zip(point.joules, spent, strict=True)),
            point.gap_s + share * self._gap_s(before, after),
        )

    def _gap_s(self, before: Reading, after: Reading) -> float:
        """Return the seconds between two samples if they are too far apart, else 0."""
        seconds = after.at - before.at
        is_gap = not self._source.counts and seconds > MOST_INTERVALS * self._source.interval_s
        return seconds if is_gap else 0.0
