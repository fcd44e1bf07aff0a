"""Draws matplotlib's figures as SVG for the page and as PNG.

Figures are drawn without pyplot, in the colours of a Palette. The PNG's colours are real. The SVG's are
placeholders that occur nowhere else and are then replaced by the page's CSS variables, so that one drawing
serves light and dark pages. Drawing the same figures again gives the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from numpy.typing import NDArray

WIDTH = 4.0
"""Width of every figure in inches: narrow, so that its text can be read on a phone."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""A shape for each colour of `Palette.series`."""

_DOTS = 150  # per inch of the PNG
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a figure."""

    ink: str
    soft: str
    """Colour of axes and tick labels."""
    grid: str
    paper: str
    series: tuple[str, ...]
    """Okabe and Ito 2008: colours that colour-blind people can tell apart."""
    phases: tuple[str, ...]
    """Colours of prefill, draft, verify and rest: light enough for dark text."""
    on_phase: str


LIGHT = Palette(
    ink="#1b1f24",
    soft="#57606a",
    grid="#e3e6ea",
    paper="#ffffff",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b"),
    phases=("#56b4e9", "#e69f00", "#20b58c", "#c4c9cf"),
    on_phase="#16191d",
)

_SENTINELS = Palette(
    ink="#010203",
    soft="#010204",
    grid="#010205",
    paper="#010206",
    series=tuple(f"#0103{i:02x}" for i in range(len(LIGHT.series))),
    phases=tuple(f"#0104{i:02x}" for i in range(len(LIGHT.phases))),
    on_phase="#010207",
)

_VARIABLES = {
    _SENTINELS.ink: "currentColor",
    _SENTINELS.soft: "var(--soft)",
    _SENTINELS.grid: "var(--grid)",
    _SENTINELS.paper: "var(--paper)",
    _SENTINELS.on_phase: "var(--on-phase)",
    **{sentinel: f"var(--series-{i})" for i, sentinel in enumerate(_SENTINELS.series)},
    **{sentinel: f"var(--phase-{i})" for i, sentinel in enumerate(_SENTINELS.phases)},
}


Draw = Callable[[Palette], Figure]
"""Draws a chart in the colours of a palette."""

_Pixels = NDArray[np.uint8]
"""Rows, columns, RGBA."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report, or the reason why it is missing."""

    key: str
    """Unique in the report, usable in an id."""
    title: str
    caption: str
    draw: Draw | None
    """None: the chart is left out, and `caption` says why."""


@contextmanager
def _settings() -> Iterator[None]:
    """Draw the same everywhere: ignore the user's matplotlibrc, formulas in names and missing glyphs."""
    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.family": "DejaVu Sans",  # comes with matplotlib
                "font.size": 10.5,
                "svg.fonttype": "none",
                "svg.hashsalt": "edgespec",
                "text.parse_math": False,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "axes.formatter.useoffset": False,
                "figure.dpi": 72.0,
            }
        )
        yield


def new_figure(palette: Palette, height: float) -> tuple[Figure, Axes]:
    """Return a figure of WIDTH by `height` inches with one set of axes, in the palette's colours."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.grid(color=palette.grid, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color(palette.soft)
    axes.tick_params(colors=palette.soft, labelcolor=palette.soft, labelsize=10)
    axes.xaxis.label.set_color(palette.ink)
    axes.yaxis.label.set_color(palette.ink)
    return figure, axes


def add_legend(figure: Figure, palette: Palette, entries: Sequence[tuple[str, Any]]) -> None:
    """Put a legend of labels and artists below the axes, and make the figure higher by as much."""
    labels = [_short(label) for label, _ in entries]
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), 46 // (longest + 4)))
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * lines + 0.1)
    figure.legend(
        [artist for _, artist in entries],
        [
            f" {label}" if label.startswith("_") else label for label in labels
        ],  # matplotlib drops labels with a leading _
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        labelcolor=palette.ink,
        fontsize=10,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.2,
    )


def _short(label: str) -> str:
    """Return a label that fits in a figure, cut in the middle: names differ mostly at their ends."""
    return label if len(label) <= 38 else f"{label[:20]}…{label[-17:]}"


def marker(palette: Palette, series: int, *, hollow: bool = False, size: float = 6.5) -> Line2D:
    """Return a marker of a series for a legend, or to copy the look of."""
    colour = palette.series[series % len(palette.series)]
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=MARKERS[series % len(MARKERS)],
        markersize=size,
        markerfacecolor=palette.paper if hollow else colour,
        markeredgecolor=colour,
        markeredgewidth=1.4,
    )


# ---- output ----


def svg(key: str, draw: Draw) -> str:
    """Return a drawing as an SVG element for a page, in the page's colours and font.

    Every id in it begins with `key`; the page's elements `key`-title and `key`-caption describe it.
    """
    stream = io.StringIO()
    with _settings():
        figure = draw(_SENTINELS)
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    width, height = 72 * figure.get_size_inches()
    text = stream.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)  # it would apply to the whole page
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.S)
    body = re.sub(r"<[^>]*>", lambda tag: _for_page(tag[0], key), body)  # only in tags, not in texts
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="100%" role="img" '
        f'aria-labelledby="{key}-title {key}-caption">{body}'
    )


def _for_page(tag: str, key: str) -> str:
    tag = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px var(--font)", tag)
    tag = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", tag)
    tag = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{key}-", tag)
    return re.sub(r"#01[0-9a-f]{4}", lambda match: _VARIABLES.get(match[0], match[0]), tag)


def png(title: str, date: str, all_charts: Sequence[Chart], rows: Sequence[str]) -> bytes:
    """Return all charts as one PNG on white, in columns, below a title.

    Below the charts: why others are left out, and `rows`, which explain the numbers in the charts.
    """
    left_out = [f"{chart.title}: {chart.caption}" for chart in all_charts if not chart.draw]
    with _settings():
        pictures = [_picture(chart.title, chart.draw) for chart in all_charts if chart.draw]
        head, foot = _headline(title, date), _footnotes(left_out, rows)
    columns: list[list[_Pixels]] = [[] for _ in range(_COLUMNS)]
    for picture in pictures:
        min(columns, key=lambda column: sum(len(above) for above in column)).append(picture)
    width, gap = int(WIDTH * _DOTS), int(0.25 * _DOTS)
    drawn = len(head) + max(sum(len(picture) + gap for picture in column) for column in columns)
    whole: _Pixels = np.full((drawn + len(foot) + gap, _COLUMNS * (width + gap) + gap, 4), 255, np.uint8)
    whole[: len(head), gap : gap + head.shape[1]] = head
    whole[drawn : drawn + len(foot), gap : gap + foot.shape[1]] = foot
    for i, column in enumerate(columns):
        top, left = len(head), gap + i * (width + gap)
        for picture in column:
            whole[top : top + len(picture), left : left + picture.shape[1]] = picture
            top += len(picture) + gap
    stream = io.BytesIO()
    imsave(stream, whole, format="png", metadata={"Software": "edgespec"})  # by default matplotlib's version
    return stream.getvalue()


def _picture(title: str, draw: Draw) -> _Pixels:
    figure = draw(LIGHT)
    figure.set_figheight(figure.get_figheight() + 0.25)
    figure.suptitle(title, x=0.02, ha="left", fontsize=10.5, fontweight="bold", color=LIGHT.ink)
    return _pixels(figure)


def _headline(title: str, date: str) -> _Pixels:
    figure = Figure(figsize=(_COLUMNS * WIDTH, 0.8))
    figure.text(0.0, 0.62, _short_title(title), fontsize=16, fontweight="bold", color=LIGHT.ink)
    figure.text(0.0, 0.28, f"edgespec, {date}", fontsize=10, color=LIGHT.soft)
    return _pixels(figure)


def _footnotes(left_out: Sequence[str], rows: Sequence[str]) -> _Pixels:
    """Return a picture of the sentences, and below them the rows in two columns."""
    half = -(-len(rows) // 2)
    n_lines = len(left_out) + half + 1
    figure = Figure(figsize=(_COLUMNS * WIDTH, 0.2 * n_lines))
    places = [(0.0, i, line) for i, line in enumerate(left_out)]
    places += [(0.5 * (i // half), len(left_out) + 1 + i % half, row) for i, row in enumerate(rows)]
    for x, line, text in places:
        figure.text(x, 1 - line / n_lines, text, fontsize=9, va="top", color=LIGHT.soft)
    return _pixels(figure)


def _short_title(title: str) -> str:
    return title if len(title) <= 80 else f"{title[:79]}…"


def _pixels(figure: Figure) -> _Pixels:
    stream = io.BytesIO()
    figure.savefig(stream, format="rgba", dpi=_DOTS, facecolor=LIGHT.paper)
    width = int(figure.get_size_inches()[0] * _DOTS)
    return np.frombuffer(stream.getvalue(), np.uint8).reshape(-1, width, 4)
