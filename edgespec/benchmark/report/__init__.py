"""Pictures and pages of a benchmark: one HTML file that needs nothing else, and one PNG.

    rows.py     an outcome as numbered rows, and what is said of it in words
    drawing.py  matplotlib's figures as SVG and PNG, and their colours
    labels.py   texts beside points, away from each other
    looks.py    colours and shapes of rows
    charts.py   which charts there are; scatters.py: those of speed against something else
    page.py     the page around them, made of elements.py

matplotlib is optional (`edgespec[report]`) and is loaded only when something is drawn.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from edgespec.benchmark.exports import Summaries, write_file
from edgespec.benchmark.report.rows import read_outcome
from edgespec.benchmark.runs import Outcome
from edgespec.errors import EdgespecError

__all__ = ["require_plotting", "write_png", "write_report"]


def require_plotting(field: str = "report") -> None:
    """Return if charts can be drawn. Raises EdgespecError: matplotlib is missing, which `field` needs."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        problem = "needs matplotlib: pip install 'edgespec[report]'"
        raise EdgespecError(problem, field=field) from None


def write_report(outcome: Outcome, path: Path, summaries: Summaries | None = None) -> None:
    """Write one HTML file with all tables and charts: no scripts, nothing loaded from elsewhere.

    `summaries`: what `exports.summarise` made of the outcome, where it is there already.
    Raises EdgespecError: matplotlib is missing, or the file cannot be written.
    """
    require_plotting("report")
    from edgespec.benchmark.report.page import page

    write_file(path, page(read_outcome(outcome, summaries)).encode(), field="report")


def write_png(outcome: Outcome, path: Path, summaries: Summaries | None = None) -> None:
    """Write all charts as one picture, on white. As `write_report` otherwise."""
    require_plotting("png")
    from edgespec.benchmark.report.charts import charts
    from edgespec.benchmark.report.drawing import png
    from edgespec.benchmark.report.rows import title

    reading = read_outcome(outcome, summaries)
    rows = [f"{row.number}  {row.name}" for row in reading.rows]
    write_file(path, png(title(outcome), outcome.date, charts(reading), rows), field="png")
