"""The table of many texts at once in the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from edgespec.benchmark.curves import ThroughputCurve
from edgespec.benchmark.report.rows import ReportData
from edgespec.benchmark.report.throughput import cell_name, fewest_name, figures, sentences
from edgespec.cli.console import out, print_table


def print_throughput(reading: ReportData) -> None:
    """Print a table for each cell whose throughput was measured, and sentences about all."""
    for curve in reading.curves:
        out.print()
        if len(reading.curves) > 1:
            out.print(cell_name(curve), markup=False)
        print_table(_table(curve))
    out.print()
    for line in sentences(reading):
        out.print(line, markup=False)


def _table(curve: ThroughputCurve) -> Table:
    than = fewest_name(curve, curve.points[0])
    heads = (
        "at once",
        "variant",
        "tokens/s\n[rounds]",
        f"times\n{than}",
        "times\nplain",
        "limit\nn / T(n)",
        "of the\nlimit",
        "TTFT\nms",
        "longest\nms",
        "identical",
    )
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in heads:
        table.add_column(Text(name), justify="left" if name == "variant" else "right", overflow="fold")
    for point in curve.points:
        table.add_row(*map(Text, figures(point)))
    return table
