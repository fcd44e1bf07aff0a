"""The chart of tokens a second against texts at once, beside the limit n / T(n)."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from edgespec.benchmark.curves import ThroughputCurve
from edgespec.benchmark.report.drawing import Chart, Palette, add_legend, marker, new_figure
from edgespec.benchmark.report.rows import ReportData
from edgespec.benchmark.report.throughput import cell_name, names

_CAPTION = (
    "Tokens a second of all texts together, the median of the rounds with the slowest and the fastest. "
    "Dashed: n / T(n), what passes over n tokens allow without drafts and without reading prompts."
)


def curve_charts(reading: ReportData) -> list[Chart]:
    """Return a chart for each cell whose throughput was measured."""
    several = len(reading.curves) > 1
    return [
        Chart(
            f"throughput-{i}",
            f"Throughput: {cell_name(curve)}" if several else "Throughput of many texts at once",
            _CAPTION,
            lambda palette, curve=curve: _draw(palette, curve),  # type: ignore[misc] # keeps this one
        )
        for i, curve in enumerate(reading.curves, 1)
    ]


def _draw(palette: Palette, curve: ThroughputCurve) -> Figure:
    figure, axes = new_figure(palette, 3.0)
    limits = {point.at_once: point.limit for point in curve.points if point.limit is not None}
    entries = []
    if limits:
        line = Line2D([*limits], [*limits.values()], color=palette.ink, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.add_line(line)
        entries.append(("limit n / T(n)", line))
    for series, variant in enumerate(curve.variants):
        points = curve.of(variant)
        line = marker(palette, series, size=5.5)
        colour = line.get_markeredgecolor()
        line.set(color=colour, linestyle="-", linewidth=1.4)
        line.set_data([point.at_once for point in points], [point.tokens_per_s for point in points])
        axes.add_line(line)
        for point in points:
            axes.plot([point.at_once] * 2, [point.low, point.high], color=colour, linewidth=1.6, zorder=1.9)
        entries.append((names(variant), line))
    numbers = sorted({point.at_once for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(0.06, 0.08)
    axes.autoscale_view()
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("texts at once")
    axes.set_ylabel("tokens/s, all texts together")
    add_legend(figure, palette, entries)
    return figure
