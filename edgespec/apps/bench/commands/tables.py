"""The results of a benchmark in the terminal, a cell by category or many in numbered rows; files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.table import Table as Shown

from edgespec.apps.bench.report import write_report
from edgespec.apps.bench.rows import (
    ACCURACY,
    GROSS,
    NAMES,
    SPEED,
    UNAVAILABLE,
    Column,
    Report,
    Table,
    accuracy_columns,
    sentences,
    table,
    title,
)
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome
from edgespec.apps.bench.summary import ESTIMATED
from edgespec.cli.console import out, print_table, tell_written

if TYPE_CHECKING:
    from edgespec.apps.bench.commands.bench_options import ReportOutputs


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
            stack.callback(tell_written, outputs.report)
            stack.callback(write_report, report, outputs.report)
        if outputs.csv:
            stack.callback(tell_written, outputs.csv)
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
