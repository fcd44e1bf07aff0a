"""Marks the rows of charts: their colours and shapes, the legend, and labels that do not overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgespec.apps.bench.report.drawing import Palette, add_legend, marker
from edgespec.apps.bench.report.rows import Row
from edgespec.apps.bench.runs import PLAIN

_Box = tuple[float, float, float, float]  # left, bottom, right, top in points


@dataclass(frozen=True, slots=True)
class RowStyles:
    """Colour and shape by what differs between rows: targets, else drafts, kernels or variants."""

    names: tuple[str, ...]
    key: Callable[[Row], str]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowStyles:
        """Return the styles for a chart of `rows`."""
        keys: tuple[Callable[[Row], str], ...] = (
            lambda row: row.cell.target,
            lambda row: row.cell.draft or "no draft model",
            lambda row: row.cell.kernels,
            lambda row: row.variant.variant,
        )
        for key in keys:
            names = tuple(dict.fromkeys(key(row) for row in rows))
            if len(names) > 1:
                break
        return cls(names, key)

    def series(self, row: Row) -> int:
        """Return the index of a row's series in the palette."""
        return self.names.index(self.key(row))

    def legend(self, figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
        """Put the legend of `rows` below a figure."""
        entries = [(name, marker(palette, i)) for i, name in enumerate(self.names)]
        if self.hollow(rows):
            hollow = marker(palette, 0, hollow=True)
            hollow.set_markeredgecolor(palette.soft)
            entries.append(("hollow: plain decoding", hollow))
        add_legend(figure, palette, entries)

    def hollow(self, rows: Sequence[Row]) -> bool:
        """Whether plain decoding is drawn hollow, because the colours mean something else."""
        return PLAIN not in self.names and any(row.variant.variant == PLAIN for row in rows)


def place_labels(
    figure: Figure,
    axes: Axes,
    palette: Palette,
    points: Sequence[tuple[float, float, str]],
    *,
    right: bool = False,
) -> None:
    """Write a short text next to each point, away from the other points and texts.

    `right`: only to the right of the point, for the ends of lines. If no place near a point is free, its
    text stands farther off, with a thin line to the point.
    """
    figure.draw_without_rendering()  # computes the position of the axes
    scale = 72.0 / figure.dpi
    where = axes.transData.transform([(x, y) for x, y, _ in points]) * scale
    frame = np.asarray(axes.get_window_extent().extents) * scale
    taken: list[_Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in where]
    for (x, y), (data_x, data_y, text) in zip(where, points, strict=True):
        offset, box = min(
            _places(x, y, text, right=right),
            key=lambda place: _cost(place[1], taken, tuple(frame), right=right) + 0.05 * _length(place[0]),
        )
        taken.append(box)
        far = _length(offset) > 15
        note = axes.annotate(
            text,
            (data_x, data_y),
            xytext=offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=9,
            color=palette.ink,
            annotation_clip=False,
            bbox={"boxstyle": "square,pad=0.05", "facecolor": palette.paper, "linewidth": 0, "alpha": 0.75}
            if right
            else None,
            arrowprops={
                "arrowstyle": "-",
                "color": palette.soft,
                "linewidth": 0.6,
                "shrinkA": 4,
                "shrinkB": 3,
            }
            if far
            else None,
        )
        note.set_in_layout(False)


def _places(x: float, y: float, text: str, *, right: bool) -> Iterator[tuple[tuple[float, float], _Box]]:
    half_width, half_height = 2.9 * len(text) + 0.8, 4.6
    angles = np.deg2rad([0] if right else [45, 0, 90, 135, 180, 225, 270, 315, 20, 70, 110, 160])
    for radius in (10.0, 16.0, 23.0, 31.0, 40.0):
        for angle in angles:
            steps = np.arange(-60, 61, 3) if right else (0,)
            for step in steps:
                dx = float(np.cos(angle) * (radius + half_width - 4))
                dy = float(np.sin(angle) * radius) + float(step)
                left, bottom = x + dx - half_width, y + dy - half_height
                yield (dx, dy), (left, bottom, left + 2 * half_width, bottom + 2 * half_height)


def _length(offset: tuple[float, float]) -> float:
    return float(np.hypot(*offset))


def _cost(box: _Box, taken: Sequence[_Box], frame: Sequence[float], *, right: bool) -> float:
    """Return the area that a text shares with others, in square points, plus a penalty outside the axes."""
    shared = sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )
    beyond = max(0.0, frame[0] - box[0]) + max(0.0, frame[1] - box[1]) + max(0.0, box[3] - frame[3] - 4)
    return shared + 20 * (beyond + (0.0 if right else max(0.0, box[2] - frame[2] - 6)))
