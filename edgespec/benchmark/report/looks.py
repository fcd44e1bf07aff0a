"""Chooses the colours and shapes of rows in charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from edgespec.benchmark.report.drawing import Palette, add_legend, marker
from edgespec.benchmark.report.rows import Row
from edgespec.benchmark.runs import PLAIN


@dataclass(frozen=True, slots=True)
class Looks:
    """Colour and shape by what differs between rows: targets, else drafts, kernels or variants."""

    names: tuple[str, ...]
    key: Callable[[Row], str]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Looks:
        """Return the looks of a chart of `rows`."""
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
        """Whether plain decoding is drawn hollow, as it has no colour of its own."""
        return PLAIN not in self.names and any(row.variant.variant == PLAIN for row in rows)
