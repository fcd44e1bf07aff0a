"""The results of a benchmark: in the terminal, in files, and as an HTML page with three charts (report.html).

In the terminal a cell is shown by category, or many in numbered rows. The page needs no other file; marks of
its charts have the row numbers of its table. The same figures give the same bytes. Names come from users,
model files and suites: jinja2 escapes them all.
"""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table as Shown

from edgespec.apps.bench import rows as words
from edgespec.apps.bench.rows import (
    ACCURACY,
    GROSS,
    NAMES,
    SPEED,
    UNAVAILABLE,
    Column,
    Report,
    Row,
    Table,
    accuracy_columns,
    sentences,
    table,
    title,
)
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome
from edgespec.apps.bench.summary import ESTIMATED
from edgespec.cli.console import out, print_table, report_written
from edgespec.platform.files import write_file

if TYPE_CHECKING:
    from edgespec.apps.bench.commands.bench_options import ReportOutputs


_Point = tuple[float, float]
_Line = tuple[Row | None, list[_Point]]

_WIDTH, _TOP, _RIGHT, _BOTTOM = 300, 8, 10, 34  # pixels of a chart, and of its margins
_MOST_ROWS = 3  # with more, the speed-ups of their categories do not fit in one chart
_LONGEST_NAME = 18  # letters of a category


def write_report(report: Report, path: Path) -> None:
    """Write one HTML file with all tables and charts, without scripts; nothing is loaded from elsewhere.

    Raises EdgespecError if the file cannot be written.
    """
    import jinja2  # llama-cpp-python needs it

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = resources.files("edgespec.apps.bench").joinpath("report.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(report=report, words=words, charts=charts(report))
    write_file(path, page.encode(), field="report")


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report, or the reason why it is missing: marks of rows, and lines."""

    key: str
    """Unique in the report, usable in an id."""
    title: str
    caption: str
    """Also why it is left out, if it has no rows."""
    axes: tuple[str, str] = ("", "")
    """What x and y are."""
    rows: Sequence[Row] = ()
    points: Sequence[_Point] = ()
    """The place of each row's mark."""
    lines: Sequence[_Line] = ()
    """Lines in the colour of a row; dashed ones have none."""
    spans: tuple[_Point, _Point] = ((0.0, 1.0), (0.0, 1.0))
    """Values of x from left to right, of y from bottom to top."""
    names: Sequence[str] = ()
    """Of y = 0, 1, ...: in place of its figures, and of the rows' numbers."""
    height: int = 190
    """Pixels of the field."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, without the legend."""
        return _WIDTH, _TOP + self.height + _BOTTOM

    @property
    def left(self) -> int:
        """The left margin in pixels, for the labels of y."""
        return 48 + 4 * max([0, *(min(len(name), _LONGEST_NAME) - 7 for name in self.names)])

    def pixel(self, x: float, y: float) -> _Point:
        """Return the pixel position of a point."""
        (x0, x1), (y0, y1) = self.spans
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return round(self.left + across * (_WIDTH - self.left - _RIGHT), 1), round(
            _TOP + (1 - up) * self.height, 1
        )

    def ticks(self, axis: int) -> list[tuple[float, str]]:
        """Return values along an axis with their texts: at most eight, or the names."""
        if axis and self.names:
            return [(i, name) for i, name in enumerate(self.names) if i == self.names.index(name)]
        low, high = self.spans[axis]
        unit = 10.0 ** math.floor(math.log10((high - low) / 5))
        step = next(unit * n for n in (1, 2, 5, 10) if (high - low) / (unit * n) <= 7)
        return [
            (i * step, f"{i * step:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)
        ]

    def series(self, row: Row) -> str:
        """Return the series of a row, which its colour shows: its target if they differ, else its variant."""
        return row["target" if len({row.cell.target for row in self.rows}) > 1 else "variant"].text

    @property
    def legend(self) -> list[str]:
        """The series, in the order of their colours."""
        return list(dict.fromkeys(map(self.series, self.rows)))

    def numbers(self) -> list[tuple[_Point, str]]:
        """Return the rows' numbers, each in the nearest place of 11 x 10 pixels that is free."""
        if self.names:
            return []
        taken = [complex(*self.pixel(*point)) for point in self.points]
        width, height = self.size
        around = [
            cmath.rect(r, math.radians(-angle)) for r in range(10, 80, 4) for angle in range(45, 405, 30)
        ]
        for mark in [*taken]:
            near = [mark + step for step in around]
            inside = (p for p in near if self.left < p.real < width - 6 and 10 < p.imag < height - _BOTTOM)
            free = (p for p in inside if all(abs((p - q).real) > 11 or abs((p - q).imag) > 10 for q in taken))
            taken.append(next(free, near[0]))
        places = taken[len(self.points) :]
        return [
            ((round(place.real, 1), round(place.imag, 1)), row["row"].text)
            for place, row in zip(places, self.rows, strict=True)
        ]


def charts(report: Report) -> tuple[Chart, ...]:
    """Return the charts of an outcome; a chart without figures says so instead."""
    return _speedup(report), _scatter(report), _acceptance(report)


def _span(values: Sequence[float]) -> _Point:
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return min(low, max(0.0, low - margin)), high + margin


def pareto(points: Sequence[_Point]) -> tuple[int, ...]:
    """Return the indices of the points that no other beats (small x, large y are good), in order of x.

    Of equal points, only the first is returned.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i))
    return tuple(i for n, i in enumerate(order) if all(points[j][1] < points[i][1] for j in order[:n]))


def _scatter(report: Report) -> Chart:
    """Return the chart of tokens/s of the exact rows over joules, or over accuracy if those are unknown."""
    exact = [row for row in report.rows if row.variant.exact and row.variant.whole_tokens_per_s]
    if report.energy:
        key, note = "energy", "Left is less energy, up is faster."
        label = exact[0][report.energy].heading.lstrip(">") if exact else ""
        if any(row.variant.is_estimated for row in exact):
            note, label = f"{note} The joules are estimated, not measured.", f"{label} {ESTIMATED}"
        figures = [(row, row[report.energy].value) for row in exact]
    else:
        key, label = "accuracy", "KL divergence, nats/token"
        note = "Left is closer to the best quantization of the model, which stands at 0; up is faster."
        figures = [(row, row["kl_nats_per_token"].value or 0.0) for row in exact if row["perplexity"].value]
    known = [(row, (x, row.variant.whole_tokens_per_s or 0.0)) for row, x in figures if x is not None]
    heading = f"Speed and {key}"
    if not known:
        return Chart(key, heading, "Left out: neither joules nor accuracy were measured.")
    rows, points = [row for row, _ in known], [point for _, point in known]
    front = pareto(points)
    which = f"row{'s' * (len(front) > 1)} {', '.join(rows[i]['row'].text for i in front)}"
    caption = f"{note} Hollow: plain decoding. Joined: the Pareto front, {which}, noise not considered."
    spans = _span([x for x, _ in points]), _span([y for _, y in points])
    lines: list[_Line] = [(None, [points[i] for i in front])]
    return Chart(key, heading, caption, (label, "whole generations, tokens/s"), rows, points, lines, spans)


def _speedup(report: Report) -> Chart:
    """Return the speed-ups as dots with their intervals, one below the other: of few rows by category."""
    rows = [row for row in report.rows if row["speedup"].value is not None]
    heading = "Speed-up over plain decoding"
    if not rows:
        return Chart("speedup", heading, "Left out: nothing was compared with plain decoding.")
    few = len(rows) <= _MOST_ROWS
    if few:
        rows = [row for row in report.every if not row.again and row["speedup"].value is not None]
        order = list(dict.fromkeys(row["category"].text for row in rows))
        rows.sort(key=lambda row: order.index(row["category"].text))
    points = [(row["speedup"].value, float(y)) for y, row in enumerate(rows)]
    lines: list[_Line] = [(None, [(1.0, -0.6), (1.0, len(rows) - 0.4)])]
    for row, (x, y) in zip(rows, points, strict=True):
        lines.append((row, [(row["speedup_low"].value or x, y), (row["speedup_high"].value or x, y)]))
    names = [row["category" if few else "row"].text for row in rows]
    xs = [x for _, line in lines for x, _ in line]
    caption = "Median of paired whole generations with its 95 % interval; right of 1 is faster."
    spans, height = (_span(xs), (len(rows) - 0.4, -0.6)), 14 * len(rows) + 14
    axes = ("times as fast as plain decoding", "")
    return Chart("speedup", heading, caption, axes, rows, points, lines, spans, names, height)


def _acceptance(report: Report) -> Chart:
    rows = [row for row in report.rows if row.variant.acceptance_by_position]
    heading = "Acceptance by position"
    if not rows:
        return Chart("acceptance", heading, "Left out: nothing was drafted.")
    lines: list[_Line] = [(row, [*enumerate(row.variant.acceptance_by_position, 1)]) for row in rows]
    ends = [line[-1] for _, line in lines]
    caption = (
        "Of the steps that drafted so far, the share that accepted so far. Lengths are chosen: few steps, "
        "and promising ones, reach far."
    )
    spans = (0.6, 1.2 * max(x for x, _ in ends) + 0.4), (0.0, 1.02)
    axes = ("position in the draft", "share accepted")
    return Chart("acceptance", heading, caption, axes, rows, ends, lines, spans)


def write_results(outcome: BenchmarkOutcome, outputs: ReportOutputs) -> None:
    """Write the files and print the outcome, even if one of the files cannot be written.

    Raises EdgespecError for that file. Files come first, because the reader of stdout may have gone.
    """
    report = Report(outcome)
    with ExitStack() as stack:  # runs all callbacks, the last first, and raises at the end
        if outputs.json:
            stack.callback(sys.stdout.buffer.write, report.document())
        else:
            stack.callback(print_report, report)
        if outputs.report:
            stack.callback(report_written, outputs.report)
            stack.callback(write_report, report, outputs.report)
        if outputs.csv:
            stack.callback(report_written, outputs.csv)
            stack.callback(report.write_csv, outputs.csv)


def print_report(report: Report) -> None:
    """Print the tables, and sentences about them, to stdout."""
    out.print(title(report.outcome))
    skipped = report.skipped()
    if len(report.cells) == 1 and not skipped[1:]:
        for found in _by_category(report):
            print_figures(found, last_is_bold=True)
        (cell,) = report.cells
        out.print()
        out.print(f"kernels {cell.kernels}; peak memory {report.rows[0]['peak_rss_bytes'].text}")
    elif report.rows:
        names = (*NAMES, *_figures(report), "peak_rss_bytes")
        print_figures(table([row.columns for row in report.rows], names))
    for found in (skipped, _accuracy(report.outcome)):
        if found[1:]:
            print_figures(found)
    if report.rows:
        out.print()
        for line in sentences(report):
            out.print(line)


def print_figures(found: Table, *, last_is_bold: bool = False) -> None:
    """Print a table after an empty line; the heading says what is estimated."""
    shown, mark = Shown(box=None, pad_edge=False, collapse_padding=True), f" {ESTIMATED}"
    columns = [list(column) for column in zip(*found[1:], strict=True)]
    for heading, texts in zip(found[0], columns, strict=True):
        is_figure = heading.startswith(">")
        lines = heading.lstrip(">").replace(", ", "\n").replace(" [", "\n[").replace(" (", "\n(")
        if is_figure and any(text.endswith(mark) for text in texts):
            texts[:] = [text.removesuffix(mark) for text in texts]
            lines += f"\n{ESTIMATED}"
        shown.add_column(lines, justify="right" if is_figure else "left", overflow="fold")
    for row in zip(*columns, strict=True):
        shown.add_row(*row)
    if last_is_bold:
        shown.rows[-1].style = "bold"
    out.print()
    print_table(shown)


def _figures(report: Report) -> tuple[str, ...]:
    return (*SPEED, report.energy or GROSS, "identical")


def _by_category(report: Report) -> Iterator[Table]:
    """Yield a table for each variant but plain: a row per category, and last one for all together."""
    every = [(row["variant"].text, row) for row in report.every]
    plain = {row["category"].text: row["decode_tokens_per_s"].text for name, row in every if name == PLAIN}
    for variant in [row["variant"].text for row in report.rows if row.comparison] or [PLAIN]:
        overall, *parts = [row.columns for name, row in every if name == variant]
        found = table([*parts, overall], ("category", "prompts", *_figures(report)))
        found[0][2:3] = [">plain\ntokens/s", f">{variant}\ntokens/s"]
        for texts in found[1:]:
            texts.insert(2, plain.get(texts[0], UNAVAILABLE))
        yield found


def _accuracy(outcome: BenchmarkOutcome) -> Table:
    lines = [
        {
            "target": Column(score.target, "target", score.target),
            "kernels": Column(score.kernels, "kernels", score.kernels),
            **accuracy_columns(score, score),
        }
        for score in outcome.accuracy
    ]
    return table(lines, ("target", "kernels", "accuracy_reference", "accuracy_tokens", *ACCURACY))
