"""Writes a benchmark's report: one HTML file that needs no other file, and one PNG.

    rows.py      an outcome as numbered rows, and sentences about it
    drawing.py   matplotlib's figures as SVG and PNG, and their colours
    marks.py     colours, shapes and labels of rows
    charts.py    the charts
    throughput.py   throughput of many requests as text
    scatters.py  the charts of speed against something else
    page.py      the page around the charts
    elements.py  the page's elements

matplotlib is optional (`edgespec[report]`) and is loaded only when something is drawn.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from edgespec.apps.bench.exports import Summaries
from edgespec.apps.bench.report.rows import read_outcome
from edgespec.apps.bench.runs import BenchmarkOutcome
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_file

__all__ = ["require_plotting", "write_png", "write_report"]


def require_plotting(field: str = "report") -> None:
    """Raise EdgespecError if matplotlib, which `field` needs, is missing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        problem = "needs matplotlib: pip install 'edgespec[report]'"
        raise EdgespecError(problem, field=field) from None


def write_report(outcome: BenchmarkOutcome, path: Path, summaries: Summaries | None = None) -> None:
    """Write one HTML file with all tables and charts, without scripts; nothing is loaded from elsewhere.

    `summaries`: the result of `exports.summarise`, if it exists already.
    Raises EdgespecError if matplotlib is missing or the file cannot be written.
    """
    require_plotting("report")
    from edgespec.apps.bench.report.page import page

    write_file(path, page(read_outcome(outcome, summaries)).encode(), field="report")


def write_png(outcome: BenchmarkOutcome, path: Path, summaries: Summaries | None = None) -> None:
    """Write all charts as one PNG on white; otherwise as `write_report`."""
    require_plotting("png")
    from edgespec.apps.bench.report.charts import charts
    from edgespec.apps.bench.report.drawing import png
    from edgespec.apps.bench.report.rows import title

    reading = read_outcome(outcome, summaries)
    rows = [f"{row.number}  {row.name}" for row in reading.rows]
    write_file(path, png(title(outcome), outcome.date, charts(reading), rows), field="png")
