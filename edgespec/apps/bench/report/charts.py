"""The charts of a report. Points and lines are labelled with the row numbers of its table."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from edgespec.apps.bench.curves import ThroughputCurve
from edgespec.apps.bench.report.drawing import Chart, Palette, add_legend, marker, new_figure
from edgespec.apps.bench.report.marks import RowStyles, place_labels
from edgespec.apps.bench.report.rows import ReportData, Row
from edgespec.apps.bench.report.scatters import scatters
from edgespec.apps.bench.report.throughput import names
from edgespec.apps.bench.summary import Interval
from edgespec.models.suites import OVERALL

_PHASES = ("prefill", "draft", "verify", "rest")
_FEW = 3  # for more variants, the categories do not fit in one chart

_THROUGHPUT_CAPTION = (
    "Tokens a second of all texts together, the median of the rounds with the slowest and the fastest. "
    "Dashed: n / T(n), what passes over n tokens allow without drafts and without reading prompts."
)


def charts(reading: ReportData) -> tuple[Chart, ...]:
    """Return the charts of an outcome; a chart without figures says so instead."""
    if reading.curves:
        return tuple(_throughput(reading))
    return (
        *scatters(reading),
        *_speedups(reading),
        _acceptance(reading),
        _time_shares(reading),
        *_joule_shares(reading),
    )


# ---- speed-up over plain ----

_Whisker = tuple[str, Row, Interval]


def _speedups(reading: ReportData) -> list[Chart]:
    rows = [row for row in reading.rows if row.comparison and row.comparison.speedup]
    if not rows:
        why = "Left out: nothing was compared with plain decoding."
        return [Chart("speedup", "Speed-up over plain decoding", why, None)]
    overall = [
        (OVERALL, row, row.comparison.speedup) for row in rows if row.comparison and row.comparison.speedup
    ]
    by_category: dict[str, list[_Whisker]] = {}
    for category in reading.categories:
        for row in rows:
            found = row.of_category(category)
            if found and found[1] and found[1].speedup:
                by_category.setdefault(category, []).append((category, row, found[1].speedup))
    if len(rows) <= _FEW:
        whiskers = [*overall, *(one for found in by_category.values() for one in found)]
        return [_whiskers("speedup", "Speed-up over plain, by category", whiskers, rows, by_row=False)]
    return [
        _whiskers("speedup", "Speed-up over plain, overall", overall, rows, by_row=True),
        *(
            _whiskers(f"speedup-{i}", f"Speed-up over plain: {category}", found, rows, by_row=True)
            for i, (category, found) in enumerate(by_category.items(), 1)
        ),
    ]


def _whiskers(key: str, title: str, whiskers: list[_Whisker], rows: list[Row], *, by_row: bool) -> Chart:
    """Return dots with their intervals, one below the other: a line per row, or a block per category."""

    def draw(palette: Palette) -> Figure:
        blocks = list(dict.fromkeys(category for category, _, _ in whiskers))
        per_block = len(whiskers) // len(blocks)
        gap = 0.5 if per_block > 1 and not by_row else 0.0
        heights = [i + gap * blocks.index(category) for i, (category, _, _) in enumerate(whiskers)]
        figure, axes = new_figure(palette, 0.75 + (0.16 if by_row else 0.24) * (heights[-1] + 1))
        styles = RowStyles.of(rows)
        axes.axvline(1.0, color=palette.ink, linewidth=1.0)
        for y, (_, row, speedup) in zip(heights, whiskers, strict=True):
            dot = marker(palette, styles.series(row), size=5.5)
            dot.set_data([speedup.median], [y])
            axes.add_line(dot)
            if speedup.low is not None and speedup.high is not None:
                colour = dot.get_markeredgecolor()
                axes.plot([speedup.low, speedup.high], [y, y], color=colour, linewidth=1.6, zorder=1.9)
        if by_row:
            axes.set_yticks(heights, [str(row.number) for _, row, _ in whiskers])
            axes.set_ylabel("row")
        else:
            middles = [
                [y for y, one in zip(heights, whiskers, strict=True) if one[0] == block] for block in blocks
            ]
            axes.set_yticks([(ys[0] + ys[-1]) / 2 for ys in middles], [_cut(block) for block in blocks])
        axes.set_ylim(heights[-1] + 0.6, -0.6)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.08)
        axes.autoscale_view(scaley=False)
        axes.set_xlabel("times as fast as plain decoding")
        if len(styles.names) > 1:
            styles.legend(figure, palette, rows)
        return figure

    caption = "Median of paired whole generations with its 95 % interval; right of 1 is faster."
    return Chart(key, title, caption, draw)


def _cut(label: str) -> str:
    return label if len(label) <= 18 else f"{label[:17]}…"


# ---- acceptance ----


def _acceptance(reading: ReportData) -> Chart:
    title = "Acceptance by position"
    rows = [row for row in reading.rows if row.variant.acceptance_by_position]
    if not rows:
        return Chart("acceptance", title, "Left out: nothing was drafted.", None)

    def draw(palette: Palette) -> Figure:
        figure, axes = new_figure(palette, 3.0)
        styles = RowStyles.of(rows)
        ends = []
        for row in rows:
            shares = row.variant.acceptance_by_position
            line = marker(palette, styles.series(row), size=4)
            line.set_data(range(1, len(shares) + 1), shares)
            line.set_color(line.get_markeredgecolor())
            line.set_linestyle("-")
            line.set_linewidth(1.2)
            axes.add_line(line)
            ends.append((float(len(shares)), shares[-1], str(row.number)))
        longest = max(len(row.variant.acceptance_by_position) for row in rows)
        axes.set_xlim(0.6, longest + max(0.4, 0.1 * longest))
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share accepted")
        if len(styles.names) > 1:
            styles.legend(figure, palette, rows)
        place_labels(figure, axes, palette, sorted(ends, key=lambda end: (-end[0], end[1])), right=True)
        return figure

    caption = (
        "Of the steps that drafted so far, the share that accepted so far. Lengths are chosen: few steps, "
        "and promising ones, reach far."
    )
    return Chart("acceptance", title, caption, draw)


# ---- where the time and the joules went ----


def _time_shares(reading: ReportData) -> Chart:
    bars = [(row, row.variant.time_shares) for row in reading.rows if row.variant.time_shares]
    title = "Where the time went"
    if not bars:
        return Chart("time", title, "Left out: no row tells its phases.", None)
    return _shares("time", title, "Shares of the time of whole generations.", bars)


def _joule_shares(reading: ReportData) -> list[Chart]:
    # Only RAPL can tell phases apart: power samples are too coarse, and assumed watts would repeat the times.
    rows = [row for row in reading.rows if row.variant.energy_source.startswith("RAPL")]
    bars = [(row, row.variant.joule_shares) for row in rows if row.variant.joule_shares]
    if not bars:
        return []
    title, caption = "Where the joules went", "Shares of the gross joules."
    return [_shares("joules", title, caption, bars)]


def _shares(key: str, title: str, caption: str, bars: list[tuple[Row, dict[str, float]]]) -> Chart:
    few = len(bars) <= 8

    def draw(palette: Palette) -> Figure:
        figure, axes = new_figure(palette, 0.7 + (0.3 if few else 0.16) * len(bars))
        for i, (_, shares) in enumerate(bars):
            left = 0.0
            for phase, colour in zip(_PHASES, palette.phases, strict=True):
                percent = 100 * shares.get(phase, 0.0)
                axes.barh(i, percent, left=left, height=0.78, color=colour, linewidth=0)
                if few and percent >= 9:
                    axes.text(
                        left + percent / 2,
                        i,
                        f"{percent:.0f}",
                        ha="center",
                        va="center_baseline",
                        fontsize=9,
                        color=palette.on_phase,
                    )
                left += percent
        axes.set_yticks(
            range(len(bars)),
            [_cut(f"{row.number} {row.variant.variant}") if few else str(row.number) for row, _ in bars],
        )
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(0, 100)
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("%")
        if not few:
            axes.set_ylabel("row")
        entries = [
            (phase, Patch(facecolor=colour)) for phase, colour in zip(_PHASES, palette.phases, strict=True)
        ]
        add_legend(figure, palette, entries)
        return figure

    return Chart(key, title, caption, draw)


# ---- throughput ----


def _throughput(reading: ReportData) -> list[Chart]:
    """Return a chart for each cell whose throughput was measured."""
    several = len(reading.curves) > 1
    return [
        Chart(
            f"throughput-{i}",
            f"Throughput: {curve.cell.name}" if several else "Throughput of many texts at once",
            _THROUGHPUT_CAPTION,
            lambda palette, curve=curve: _draw_curve(palette, curve),  # type: ignore[misc] # keeps this one
        )
        for i, curve in enumerate(reading.curves, 1)
    ]


def _draw_curve(palette: Palette, curve: ThroughputCurve) -> Figure:
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
