"""Where the figures of `bench` and `compare` go: a table, or JSON, and files."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import OUTPUT
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.benchmark.runs import BenchmarkOutcome


@dataclass(frozen=True, kw_only=True)
class ReportOutputs:
    """The files written in addition to the table on stdout, and JSON in its place."""

    json: Annotated[
        bool,
        typer.Option("--json", help="Print all, raw runs too, as one JSON object.", rich_help_panel=OUTPUT),
    ] = False
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the tables as CSV.", rich_help_panel=OUTPUT),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a page with tables and curves (HTML).", rich_help_panel=OUTPUT
        ),
    ] = None
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the curves as a picture.", rich_help_panel=OUTPUT),
    ] = None

    def check(self) -> None:
        """Raise UsageError or EdgespecError for what cannot be written, before anything is measured."""
        from edgespec.benchmark.exports import check_writable
        from edgespec.benchmark.report import require_plotting

        files: dict[Path, str] = {}
        for path, field in ((self.csv, "csv"), (self.report, "report"), (self.png, "png")):
            if path:
                check_writable(path, field)
                other = files.setdefault(path.resolve(), field)
                if other != field:
                    problem = f"--{other} writes that file already; choose another"
                    raise UsageError(problem, field=field, value=path)
        if self.report or self.png:
            require_plotting("report" if self.report else "png")

    def write(self, outcome: BenchmarkOutcome) -> None:
        """Write the files and print the outcome, even if one of the files cannot be written.

        Raises EdgespecError for that file. Files come first, because the reader of stdout may have gone.
        """
        from edgespec.benchmark.exports import document, summarise, write_csv
        from edgespec.benchmark.report import write_png, write_report
        from edgespec.cli.tables import print_outcome

        summaries = summarise(outcome)
        with ExitStack() as stack:  # runs all callbacks, the last first, and raises at the end
            if self.json:
                stack.callback(sys.stdout.buffer.write, document(outcome, summaries))
            else:
                stack.callback(print_outcome, outcome, summaries)
            if self.png:
                stack.callback(write_png, outcome, self.png, summaries)
            if self.report:
                stack.callback(write_report, outcome, self.report, summaries)
            if self.csv:
                stack.callback(write_csv, outcome, self.csv, summaries)
