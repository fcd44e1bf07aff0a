"""Charts of speed against energy, accuracy, loss and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from edgespec.apps.bench.report.drawing import Chart, Palette, marker, new_figure
from edgespec.apps.bench.report.marks import RowStyles, place_labels
from edgespec.apps.bench.report.rows import ReportData, Row, energy_reason
from edgespec.apps.bench.runs import PLAIN


def scatters(reading: ReportData) -> list[Chart]:
    """Return the charts; those of energy and accuracy say why if they have no figures."""
    return [_energy(reading), _accuracy(reading), *_tradeoff(reading), *_memory(reading)]


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


@dataclass(frozen=True, slots=True)
class _Abscissa:
    """The figure that speed is drawn against; smaller is better."""

    key: str
    """`Chart.key`."""
    title: str
    label: str
    note: str
    of: Callable[[Row], float | None]
    lossy: bool = False
    """Whether rows that are not exact are drawn too."""


_Point = tuple[Row, float, float]


def _scatter(reading: ReportData, abscissa: _Abscissa) -> Chart | None:
    """Return a chart of tokens/s; None if no row has both figures."""
    points: list[_Point] = []
    for row in reading.rows:
        if row.variant.exact or abscissa.lossy:
            x, y = abscissa.of(row), row.variant.whole_tokens_per_s
            if x is not None and y is not None:
                points.append((row, x, y))
    if not points:
        return None
    front = [points[i] for i in pareto([(x, y) for _, x, y in points])]
    numbers = ", ".join(str(row.number) for row, _, _ in front)
    which = f"row{'s' if len(front) > 1 else ''} {numbers}"
    caption = f"{abscissa.note} Ringed and joined: the Pareto front, {which}, noise not considered."
    return Chart(
        abscissa.key, abscissa.title, caption, lambda palette: _draw(palette, points, front, abscissa.label)
    )


def _draw(palette: Palette, points: Sequence[_Point], front: Sequence[_Point], label: str) -> Figure:
    figure, axes = new_figure(palette, 3.0)
    rows = [row for row, _, _ in points]
    styles = RowStyles.of(rows)
    axes.plot(
        [x for _, x, _ in front],
        [y for _, _, y in front],
        color=palette.ink,
        linewidth=1.0,
        linestyle=(0, (4, 3)),
        zorder=1.5,
    )
    for row, x, y in points:
        hollow = row.variant.variant == PLAIN and styles.hollow(rows)
        dot = marker(palette, styles.series(row), hollow=hollow)
        dot.set_data([x], [y])
        axes.add_line(dot)
        if (row, x, y) in front:
            axes.plot(
                x,
                y,
                "o",
                markersize=12,
                markerfacecolor="none",
                markeredgecolor=palette.ink,
                markeredgewidth=0.9,
            )
    axes.margins(0.12, 0.14)
    axes.autoscale_view()
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.set_xlabel(label)
    axes.set_ylabel("whole generations, tokens/s")
    styles.legend(figure, palette, rows)
    place_labels(figure, axes, palette, [(x, y, str(row.number)) for row, x, y in points])
    return figure


def _energy(reading: ReportData) -> Chart:
    column, title = reading.energy, "Speed and energy"
    if column is None:
        why = f"Left out, as joules are unavailable: {energy_reason(reading)}"
        return Chart("energy", title, why, None)
    note = "Left is less energy, up is faster."
    if column.estimated:
        note += " The joules are estimated, not measured."
    found = _scatter(
        reading, _Abscissa("energy", title, column.label, note, lambda row: column.of(row.variant))
    )
    return found or Chart("energy", title, "Left out: no row has both a speed and joules.", None)


def _accuracy(reading: ReportData) -> Chart:
    title = "Speed and accuracy"
    known = [row.accuracy for row in reading.rows if row.accuracy]
    if not known:
        return Chart("accuracy", title, "Left out, as accuracy was not measured.", None)
    if any(accuracy.kl is not None for accuracy in known):
        label = "KL divergence, nats/token"
        note = "Left is closer to the best quantization, up is faster. That one itself stands at 0."
        if len({accuracy.reference for accuracy in known}) > 1:
            note += " Each target is compared with the best of its own kind."

        def x_of(row: Row) -> float | None:
            if row.accuracy is None:
                return None
            return 0.0 if row.accuracy.reference == row.cell.target else row.accuracy.kl
    else:
        label, note = "perplexity", "Left is more accurate, up is faster."

        def x_of(row: Row) -> float | None:
            return row.accuracy.perplexity if row.accuracy else None

    found = _scatter(reading, _Abscissa("accuracy", title, label, note, x_of))
    return found or Chart("accuracy", title, "Left out: no row has both a speed and an accuracy.", None)


def _tradeoff(reading: ReportData) -> list[Chart]:
    """Return the chart of speed over loss: inexact variants and exact ones, which lose nothing."""
    lossy = [row for row in reading.rows if not row.variant.exact]
    if not lossy:
        return []
    by_tokens = all(row.variant.agreement is not None for row in lossy)

    def x_of(row: Row) -> float | None:
        if row.variant.exact:
            return 0.0
        if by_tokens:
            return None if row.variant.agreement is None else 100 * (1.0 - row.variant.agreement)
        return row.variant.kl

    numbers = ", ".join(str(row.number) for row in lossy)
    label = "tokens that the target does not like best, %" if by_tokens else "KL from the target, nats/token"
    title = "Speed and what is lost"
    note = f"Left is closer to the target, up is faster. Not exact: row{'s'[: len(lossy) > 1]} {numbers}."
    found = _scatter(reading, _Abscissa("tradeoff", title, label, note, x_of, lossy=True))
    return [found] if found else []


def _memory(reading: ReportData) -> list[Chart]:
    fastest: dict[int, Row] = {}
    for row in reading.rows:
        if not row.variant.exact:
            continue
        held = fastest.get(id(row.cell))
        if held is None or (row.variant.whole_tokens_per_s or 0) > (held.variant.whole_tokens_per_s or 0):
            fastest[id(row.cell)] = row
    chosen = {row.number for row in fastest.values()}
    if len(chosen) < 2:
        return []

    def x_of(row: Row) -> float | None:
        peak = row.cell.peak_rss_bytes
        return peak / 1e9 if row.number in chosen and peak is not None else None

    note = "The fastest variant of each combination. Left is less memory, up is faster."
    found = _scatter(reading, _Abscissa("memory", "Speed and memory", "peak memory, GB", note, x_of))
    return [found] if found else []
