"""Writes a benchmark's report: one HTML page with three charts that needs no other file (report.html).

Points and lines of the charts are labelled with the row numbers of the page's table. matplotlib and jinja2
are optional (`edgespec[report]`) and are loaded only when something is drawn. Drawing the same figures again
gives the same bytes. Names come from users, model files and suites: jinja2 and matplotlib escape them all.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.apps.bench import rows as words
from edgespec.apps.bench.rows import UNAVAILABLE, ReportData, Row, Summaries
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome
from edgespec.apps.bench.summary import Interval
from edgespec.errors import EdgespecError
from edgespec.models.suites import OVERALL
from edgespec.platform.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_WIDTH = 4.0  # inches of every chart: narrow, so that its text can be read on a phone
_INK = "#010203"  # occurs nowhere else: in the page it becomes the text's colour, light or dark
_LOOK: dict[Any, Any] = {  # of matplotlib's settings
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "edgespec",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.dpi": 72.0,
}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#808080")
"""Okabe and Ito 2008: colours that colour-blind people can tell apart, on light and dark pages."""
_MARKERS = "os^DvPX"


def require_plotting() -> None:
    """Raise EdgespecError if matplotlib or jinja2 is missing."""
    for library in ("matplotlib", "jinja2"):
        try:
            importlib.import_module("matplotlib.figure" if library == "matplotlib" else library)
        except ImportError:
            problem = f"needs {library}: pip install 'edgespec[report]'"
            raise EdgespecError(problem, field="report") from None


def write_report(outcome: BenchmarkOutcome, path: Path, summaries: Summaries | None = None) -> None:
    """Write one HTML file with all tables and charts, without scripts; nothing is loaded from elsewhere.

    `summaries`: the result of `exports.summarise`, if it exists already. Raises EdgespecError if matplotlib
    or jinja2 is missing, or the file cannot be written.
    """
    require_plotting()
    import jinja2
    from markupsafe import Markup

    reading = words.read_outcome(outcome, summaries)
    found = charts(reading)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["fact"] = _fact
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        outcome=outcome,
        reading=reading,
        words=words,
        drawn=[(chart, Markup(_svg(chart))) for chart in found if chart.draw],  # noqa: S704 - drawn here
        left_out=[chart for chart in found if not chart.draw],
        runs=[(cell, run) for cell, _ in reading.cells for run in cell.runs],
    )
    write_file(path, page.encode(), field="report")


def _fact(value: object) -> str:
    if value is None or value == "":
        return UNAVAILABLE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_fact(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- charts ----


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report, or the reason why it is missing."""

    key: str
    """Unique in the report, usable in an id."""
    title: str
    caption: str
    draw: Callable[[FigureBase], None] | None = None
    """Draws it into an empty figure. None: the chart is left out, and `caption` says why."""
    height: float = 3.0
    """Inches."""


@contextmanager
def _settings() -> Iterator[None]:
    """Draw the same everywhere: ignore the user's matplotlibrc, formulas in names and missing glyphs."""
    import matplotlib as mpl

    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")
        mpl.rcdefaults()
        mpl.rcParams.update(_LOOK)
        yield


def _svg(chart: Chart) -> str:
    """Return a chart as an SVG element in the page's text colour; its ids begin with the chart's key."""
    from matplotlib.figure import Figure

    assert chart.draw is not None  # noqa: S101 - for the type checker
    stream = io.StringIO()
    with _settings():
        figure = Figure(figsize=(_WIDTH, chart.height), layout="constrained")
        chart.draw(figure)
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->\n?", "", body, flags=re.S)

    def for_page(tag: re.Match[str]) -> str:
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{chart.key}-", tag[0]).replace(_INK, "currentColor")

    body = re.sub(r"<[^>]*>", for_page, body)  # in tags only: texts stay as they are
    names = f"{chart.key}-title {chart.key}-caption"
    size = f"0 0 {72 * _WIDTH:g} {72 * chart.height:g}"
    return f'<svg viewBox="{size}" role="img" aria-labelledby="{names}">{body}'


def charts(reading: ReportData) -> tuple[Chart, ...]:
    """Return the charts of an outcome; a chart without figures says so instead."""
    return _speedup(reading), _scatter(reading), _acceptance(reading)


# ---- the marks of rows ----


def _series(rows: Sequence[Row]) -> list[str]:
    """The meaning of each row's colour: its target if they differ, else draft, kernels, variant."""
    keys: tuple[Callable[[Row], str], ...] = (
        lambda row: row.cell.target,
        lambda row: row.cell.draft or "no draft model",
        lambda row: row.cell.kernels,
        lambda row: row.variant.variant,
    )
    every = [[key(row) for row in rows] for key in keys]
    return next((names for names in every if len(set(names)) > 1), every[-1])


def _style(series: int) -> dict[str, Any]:
    colour, mark = _COLOURS[series % len(_COLOURS)], _MARKERS[series % len(_MARKERS)]
    return {"color": colour, "marker": mark, "markersize": 6, "linestyle": "none"}


def _styles(axes: Axes, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the look of each row, plain decoding hollow if colours mean something else; add the legend's."""
    series = _series(rows)
    names = list(dict.fromkeys(series))
    for i, name in enumerate(names if len(names) > 1 else ()):
        axes.plot([], [], label=_label(name), **_style(i))
    hollow = [PLAIN not in names and row.variant.variant == PLAIN for row in rows]
    if any(hollow):
        axes.plot([], [], "o", color=_INK, markerfacecolor="none", label=" hollow: plain decoding")
    return [
        _style(names.index(name)) | ({"markerfacecolor": "none"} if empty else {})
        for name, empty in zip(series, hollow, strict=True)
    ]


def _legend_height(rows: Sequence[Row]) -> float:
    return 0.21 * (1 + len(set(_series(rows))))


def _label(name: str) -> str:
    """Return a name for a legend, cut in the middle: names differ mostly at their ends."""
    return f" {name if len(name) <= 38 else f'{name[:20]}…{name[-17:]}'}"  # a leading _ would be left out


def _cut(label: str) -> str:
    return label if len(label) <= 18 else f"{label[:17]}…"


def _add_legend(figure: FigureBase, axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower left", fontsize=9)


def _number(axes: Axes, points: Sequence[tuple[float, float, int]]) -> None:
    """Write the row's number beside each point, in the nearest place that others leave free."""
    angles = np.radians(np.arange(45, 405, 30))
    near = [(r * math.cos(a), r * math.sin(a)) for r in (13, 17, 23, 31, 40, 50, 65) for a in angles]
    places = axes.transLimits.transform([(x, y) for x, y, _ in points]) * (220, 150)  # about
    taken = [*places]
    for place, (x, y, number) in zip(places, points, strict=True):
        free = (o for o in near if (abs(np.array(taken) - place - o) / (11, 9)).max(axis=1).min() >= 1)
        offset = next(free, near[0])
        taken.append(place + offset)
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": _INK} if math.hypot(*offset) > 15 else None
        text = axes.annotate(
            f"{number}", (x, y), offset, textcoords="offset points", arrowprops=line, fontsize=8
        )
        text.set(ha="center", va="center", in_layout=False)


# ---- speed against something else ----


def pareto(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the indices of the points that no other beats (small x, large y are good), in order of x.

    Of equal points, only the first is returned.
    """
    front: list[int] = []
    best = -math.inf
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return tuple(front)


def _scatter(reading: ReportData) -> Chart:
    """Return tokens/s of the exact rows over their joules; where those are unknown, over their accuracy."""
    exact = [row for row in reading.rows if row.variant.exact]
    column = reading.energy
    if column:
        note = "Left is less energy, up is faster."
        note += " The joules are estimated, not measured." if column.estimated else ""
        chart, label = Chart("energy", "Speed and energy", note), column.label
        figures = [(row, column.of(row.variant)) for row in exact]
    else:
        note = (
            "Left is closer to the best quantization of the model, up is faster. That one itself stands at 0."
        )
        chart, label = Chart("accuracy", "Speed and accuracy", note), "KL divergence, nats/token"
        figures = [(row, row.accuracy.kl or 0.0) for row in exact if row.accuracy]
    speeds = [(row, x, row.variant.whole_tokens_per_s) for row, x in figures]
    points = [(row, x, y) for row, x, y in speeds if x is not None and y is not None]
    if not points:
        why = (
            f"Left out: accuracy was not measured, and joules are unavailable: {words.energy_reason(reading)}"
        )
        return replace(chart, title="Speed and energy", caption=why)
    shown = [row for row, _, _ in points]
    front = [points[i] for i in pareto([(x, y) for _, x, y in points])]
    numbers = ", ".join(str(row.number) for row, _, _ in front)

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        xs, ys = [x for _, x, _ in front], [y for _, _, y in front]
        axes.plot(xs, ys, "o--", color=_INK, linewidth=1.0, markersize=12, markerfacecolor="none")
        for (_, x, y), style in zip(points, _styles(axes, shown), strict=True):
            axes.plot([x], [y], **style)
        axes.margins(0.12, 0.14)
        axes.set(
            ylim=(max(0.0, axes.get_ylim()[0]), None), xlabel=label, ylabel="whole generations, tokens/s"
        )
        _number(axes, [(x, y, row.number) for row, x, y in points])
        _add_legend(figure, axes)

    which = f"row{'s'[: len(front) > 1]} {numbers}"
    caption = f"{chart.caption} Ringed and joined: the Pareto front, {which}, noise not considered."
    return replace(chart, caption=caption, draw=draw, height=3.0 + _legend_height(shown))


# ---- speed-up over plain ----

_MOST_ROWS = 3  # with more, their categories do not fit in one chart


def _speedup(reading: ReportData) -> Chart:
    """Return the speed-ups as dots with their intervals, one below the other: of few rows by category."""
    rows = [row for row in reading.rows if row.comparison and row.comparison.speedup]
    title = "Speed-up over plain decoding"
    if not rows:
        return Chart("speedup", title, "Left out: nothing was compared with plain decoding.")
    few = len(rows) <= _MOST_ROWS
    whiskers: list[tuple[str, Row, Interval]] = []
    for category in (OVERALL, *reading.categories) if few else (OVERALL,):
        for row in rows:
            found = (row.variant, row.comparison) if category == OVERALL else row.of_category(category)
            if found and found[1] and found[1].speedup:
                whiskers.append((category if few else str(row.number), row, found[1].speedup))
    rows = [row for _, row, _ in whiskers]

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        axes.axvline(1.0, color=_INK, linewidth=1.0)
        for y, ((_, _, speedup), style) in enumerate(zip(whiskers, _styles(axes, rows), strict=True)):
            axes.plot([speedup.median], [y], **style)
            if speedup.low is not None and speedup.high is not None:
                axes.plot([speedup.low, speedup.high], [y, y], color=style["color"])
        labels = [label for label, _, _ in whiskers]
        firsts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
        axes.set_yticks(firsts, [_cut(labels[i]) for i in firsts])
        axes.grid(visible=False, axis="y")
        axes.set(ylim=(len(whiskers) - 0.4, -0.6), xlabel="times as fast as plain decoding")
        _add_legend(figure, axes)

    caption = "Median of paired whole generations with its 95 % interval; right of 1 is faster."
    return Chart("speedup", title, caption, draw, 0.8 + 0.2 * len(whiskers) + _legend_height(rows))


# ---- acceptance ----


def _acceptance(reading: ReportData) -> Chart:
    rows = [row for row in reading.rows if row.variant.acceptance_by_position]
    chart = Chart("acceptance", "Acceptance by position", "Left out: nothing was drafted.")

    def draw(figure: FigureBase) -> None:
        axes = figure.subplots()
        ends = []
        for row, style in zip(rows, _styles(axes, rows), strict=True):
            shares = row.variant.acceptance_by_position
            axes.plot(range(1, len(shares) + 1), shares, **style | {"linestyle": "-", "markersize": 4})
            ends.append((float(len(shares)), shares[-1], row.number))
        axes.set(xlim=(0.6, 1.2 * max(end[0] for end in ends) + 0.4), ylim=(0, 1.02))
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="position in the draft", ylabel="share accepted")
        _number(axes, ends)
        _add_legend(figure, axes)

    caption = (
        "Of the steps that drafted so far, the share that accepted so far. Lengths are chosen: few steps, "
        "and promising ones, reach far."
    )
    shown = replace(chart, caption=caption, draw=draw, height=3.0 + _legend_height(rows))
    return shown if rows else chart
