"""Throughput of concurrent requests as text: the table's columns and rows, and sentences about them.

Shared by the page and the terminal, as rows.py is for single texts.
"""

from __future__ import annotations

from edgespec.apps.bench.curves import ThroughputCurve, ThroughputPoint
from edgespec.apps.bench.report.rows import (
    NOT_APPLICABLE,
    UNAVAILABLE,
    ReportData,
    fixed,
    milliseconds,
    with_interval,
)
from edgespec.apps.bench.runs import PLAIN

COLUMNS = (
    ("at once", True),
    ("variant", False),
    ("tokens/s [rounds]", True),
    ("times as many as with the fewest at once", True),
    ("times plain", True),
    ("limit n / T(n)", True),
    ("of the limit", True),
    ("TTFT, ms", True),
    ("longest, ms", True),
    ("identical", True),
)
"""Headings, and whether the column holds figures."""

HOW = (
    "All numbers of texts have the same prompts: as many as given are answered at a time, and the next "
    "begins when one has ended. Tokens/s are those of all texts together over the whole time, the reading "
    "of the prompts included: the median of the rounds, with the slowest and the fastest. T(n) is the "
    "target's pass over n tokens, timed in each round beside; n / T(n) is what n texts would get if each "
    "pass gave each of them its next token and nothing else took time. Drafts can exceed it. Formulas are "
    "in docs/measuring.md."
)


def figures(point: ThroughputPoint) -> list[str]:
    """Return the cells below `COLUMNS`."""
    same = f"{point.n_identical}/{point.n_compared}" if point.n_compared else UNAVAILABLE
    share = None if point.limit is None else 100 * point.tokens_per_s / point.limit
    return [
        str(point.at_once),
        point.variant,
        f"{point.tokens_per_s:.1f} [{point.low:.1f} - {point.high:.1f}]",
        with_interval(point.gain) if point.gain else NOT_APPLICABLE,
        with_interval(point.speedup) if point.speedup else NOT_APPLICABLE,
        fixed(point.limit, 1),
        UNAVAILABLE if share is None else f"{share:.0f} %",
        milliseconds(point.ttft_s),
        milliseconds(point.longest_ttft_s),
        same,
    ]


def sentences(reading: ReportData) -> list[str]:
    """Return the headline, and how many texts equal those of plain decoding with the fewest at once."""
    points = [(curve, point) for curve in reading.curves for point in curve.points]
    curve, best = max(points, key=lambda one: one[1].tokens_per_s)
    where = f" ({curve.cell.name})" if len(reading.curves) > 1 else ""
    gain = f", {with_interval(best.gain)} times {fewest_name(curve, best)}" if best.gain else ""
    lines = [
        f"Most tokens a second: {best.tokens_per_s:.1f} of {_texts(best.at_once)}, "
        f"{best.variant}{gain}{where}."
    ]
    same = sum(point.n_identical for _, point in points)
    compared = sum(point.n_compared for _, point in points)
    how_many = f"all {compared}" if same == compared else f"{same} of {compared}"
    lines.append(
        f"Outputs: {how_many} identical to plain decoding's with the fewest at once, token by token."
    )
    return lines


def fewest_name(curve: ThroughputCurve, point: ThroughputPoint) -> str:
    """Return what `ThroughputPoint.gain` compares with, in words."""
    fewest = curve.of(point.variant)[0].at_once
    return f"{'one' if fewest == 1 else fewest} at a time"


def _texts(n: int) -> str:
    return "one text at a time" if n == 1 else f"{n} texts at once"


def names(variant: str) -> str:
    """Return a variant's name in a legend."""
    return "plain decoding" if variant == PLAIN else f"drafting ({variant})"
