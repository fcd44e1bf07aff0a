"""Tokens a second against concurrent requests: the figures of a curve, from raw throughputs (clients.py).

Formulas are in docs/measuring.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome, Cell, PassTime, Throughput
from edgespec.apps.bench.summary import Interval, paired_interval


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One variant with `at_once` concurrent requests, over the rounds."""

    variant: str
    at_once: int
    n_rounds: int
    tokens_per_s: float
    """All texts together: the median over the rounds."""
    low: float
    """Tokens a second of the slowest round."""
    high: float
    """Tokens a second of the fastest round."""
    ttft_s: float
    """Median over all answers."""
    longest_ttft_s: float
    """The longest of a round, the median over the rounds."""
    gain: Interval | None
    """Tokens a second over those of the same variant with the fewest requests; None for these."""
    speedup: Interval | None
    """Tokens a second over plain decoding's with as many; None for plain decoding."""
    limit: float | None
    """n / T(n): tokens a second if each pass gave each text a token and nothing else took time."""
    n_identical: int
    """Answers equal to plain decoding's with the fewest requests, token by token."""
    n_compared: int


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """The throughputs measured of a cell."""

    cell: Cell
    points: tuple[ThroughputPoint, ...]
    """Sorted by number of requests, plain first in each."""

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants, plain first."""
        return tuple(dict.fromkeys(point.variant for point in self.points))

    def of(self, variant: str) -> tuple[ThroughputPoint, ...]:
        """Return the points of a variant, by number of texts."""
        return tuple(point for point in self.points if point.variant == variant)


def curves(outcome: BenchmarkOutcome) -> tuple[ThroughputCurve, ...]:
    """Return the curve of each cell whose throughput was measured."""
    return tuple(
        ThroughputCurve(cell, summarise_throughput(cell)) for cell in outcome.cells if cell.throughput
    )


def summarise_throughput(cell: Cell) -> tuple[ThroughputPoint, ...]:
    """Return the points of a cell's curve; () without throughputs."""
    numbers = sorted({one.at_once for one in cell.throughput})
    variants = sorted({one.variant: None for one in cell.throughput}, key=lambda variant: variant != PLAIN)
    found = []
    for n in numbers:
        for variant in variants:
            own = _rounds(cell.throughput, variant, n)
            if own:
                fewest, plain = (
                    _rounds(cell.throughput, variant, numbers[0]),
                    _rounds(cell.throughput, PLAIN, n),
                )
                texts = _rounds(cell.throughput, PLAIN, numbers[0])
                found.append(_point(own, fewest, plain, texts, _limit(cell.passes, n)))
    return tuple(found)


_Rounds = dict[int, Throughput]
"""The throughputs of one variant and number, by round."""


def _rounds(throughput: Iterable[Throughput], variant: str, n: int) -> _Rounds:
    return {one.round: one for one in throughput if (one.variant, one.at_once) == (variant, n)}


def _speed(one: Throughput) -> float:
    return one.tokens / one.total_s


def _point(
    own: _Rounds, fewest: _Rounds, plain: _Rounds, texts: _Rounds, limit: float | None
) -> ThroughputPoint:
    one = next(iter(own.values()))
    speeds = [_speed(each) for each in own.values()]
    pairs = [
        (text, texts[round_].texts[prompt])
        for round_, each in own.items()
        if round_ in texts
        for prompt, text in each.texts.items()
        if prompt in texts[round_].texts
    ]
    first = next(iter(fewest.values()), None)
    return ThroughputPoint(
        variant=one.variant,
        at_once=one.at_once,
        n_rounds=len(own),
        tokens_per_s=statistics.median(speeds),
        low=min(speeds),
        high=max(speeds),
        ttft_s=statistics.median(s for each in own.values() for s in each.ttft_s),
        longest_ttft_s=statistics.median(max(each.ttft_s) for each in own.values()),
        gain=_ratio(own, fewest) if first and first.at_once != one.at_once else None,
        speedup=_ratio(own, plain) if one.variant != PLAIN else None,
        limit=limit,
        n_identical=sum(text == other for text, other in pairs),
        n_compared=len(pairs),
    )


def _ratio(own: _Rounds, base: _Rounds) -> Interval | None:
    return paired_interval([[_speed(own[r]) / _speed(base[r]) for r in own.keys() & base.keys()]])


def _limit(passes: Sequence[PassTime], n: int) -> float | None:
    seconds = [one.seconds for one in passes if one.n == n]
    return n / statistics.median(seconds) if seconds else None
