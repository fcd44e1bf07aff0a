"""The results of a benchmark: tables in the terminal, a cell by category or many in numbered rows; files."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.table import Table

from edgespec.apps.bench.report import write_report
from edgespec.apps.bench.rows import (
    NOT_APPLICABLE,
    NOT_EXACT,
    UNAVAILABLE,
    ReportData,
    Summaries,
    accuracy_figures,
    document,
    fixed,
    identical,
    megabytes,
    milliseconds,
    passed,
    rate,
    read_outcome,
    sentences,
    significant,
    speedup,
    summarise,
    title,
    write_csv,
)
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome
from edgespec.apps.bench.summary import (
    VariantComparison,
    VariantSummary,
)
from edgespec.cli.console import out, print_table, tell_written

if TYPE_CHECKING:
    from edgespec.apps.bench.commands.bench_options import ReportOutputs


def write_results(outcome: BenchmarkOutcome, outputs: ReportOutputs) -> None:
    """Write the files and print the outcome, even if one of the files cannot be written.

    Raises EdgespecError for that file. Files come first, because the reader of stdout may have gone.
    """
    summaries = summarise(outcome)
    with ExitStack() as stack:  # runs all callbacks, the last first, and raises at the end
        if outputs.json:
            stack.callback(sys.stdout.buffer.write, document(outcome, summaries))
        else:
            stack.callback(print_outcome, outcome, summaries)
        files = ((write_report, outputs.report), (write_csv, outputs.csv))
        for write, path in files:
            if path:  # the last first, here too
                stack.callback(tell_written, path)
                stack.callback(write, outcome, path, summaries)


def print_outcome(outcome: BenchmarkOutcome, summaries: Summaries | None = None) -> None:
    """Print an outcome's tables to stdout; `summaries`: the result of `exports.summarise`, if it exists."""
    reading = read_outcome(outcome, summaries)
    out.print(title(outcome))
    if len(reading.cells) == 1 and not reading.skipped:
        _print_categories(reading)
    elif reading.cells:
        _print_rows(reading)
    _print_skipped(reading)
    _print_accuracy(reading)
    if reading.rows:
        out.print()
        for line in sentences(reading):
            out.print(line)


def figures_table(*names: str, texts: int = 1) -> Table:
    """Return an empty table; the columns after the first `texts` hold figures and are aligned right."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < texts else "right", overflow="fold")
    return table


def _joules_heading(reading: ReportData) -> str:
    return reading.energy.label.replace(", ", "\n").replace(" (", "\n(") if reading.energy else "J/token"


def _figures(reading: ReportData, variant: VariantSummary, comparison: VariantComparison | None) -> list[str]:
    return [
        speedup(comparison),
        milliseconds(variant.ttft_s),
        rate(variant, variant.tau),
        rate(variant, variant.alpha),
        significant(reading.energy.of(variant)) if reading.energy else UNAVAILABLE,
        identical(comparison),
    ]


# ---- one cell ----


def _print_categories(reading: ReportData) -> None:
    """Print a table for each variant but plain: a row per category, and last one for all together."""
    (cell, summaries), *_ = reading.cells
    ordered = [*summaries[1:], summaries[0]]
    variants = {row.variant.variant: row.variant.exact for row in reading.rows if row.comparison} or {
        PLAIN: True
    }
    for name, exact in variants.items():
        table = figures_table(
            "category",
            "n",
            "plain\ntokens/s",
            f"{name}\n{'' if exact else NOT_EXACT + chr(10)}tokens/s",
            "speed-up\n[95 %]",
            "TTFT\nms",
            "tau",
            "alpha",
            _joules_heading(reading),
            "identical",
        )
        for summary in ordered:
            found = {variant.variant: variant for variant in summary.variants}
            if name not in found:
                continue
            plain = found.get(PLAIN)
            table.add_row(
                summary.category,
                str(summary.n_prompts),
                fixed(plain.decode_tokens_per_s if plain else None, 1),
                fixed(found[name].decode_tokens_per_s, 1),
                *_figures(reading, found[name], summary.comparison(name)),
                style="bold" if summary is summaries[0] else None,
            )
        out.print()
        print_table(table)
    out.print()
    out.print(f"kernels {cell.kernels}; peak memory {megabytes(cell.peak_rss_bytes)}")


# ---- several ----


def _print_rows(reading: ReportData) -> None:
    table = figures_table(
        "row",
        "target",
        "draft",
        "kernels",
        "variant",
        "tokens/s",
        "speed-up [95 %]",
        "TTFT\nms",
        "tau",
        "alpha",
        _joules_heading(reading),
        "identical",
        "memory",
        texts=5,
    )
    table.columns[0].justify = "right"
    for row in reading.rows:
        table.add_row(
            *(str(row.number), row.cell.target, row.draft, row.kernels, row.variant_name),
            fixed(row.variant.decode_tokens_per_s, 1),
            *_figures(reading, row.variant, row.comparison),
            megabytes(row.peak_rss_bytes),
        )
    out.print()
    print_table(table)


def _print_skipped(reading: ReportData) -> None:
    if reading.skipped:
        table = figures_table("skipped: target", "draft", "kernels", "why", texts=4)
        for cell in reading.skipped:
            table.add_row(cell.target, cell.draft or NOT_APPLICABLE, cell.kernels, cell.skipped)
        out.print()
        print_table(table)


def _print_accuracy(reading: ReportData) -> None:
    scores = reading.outcome.accuracy
    if not scores:
        return
    names = ("tokens", "perplexity", "KL, nats/token", "top-1", "exact match")
    table = figures_table("target", "kernels", "compared with", *names, texts=3)
    for score in scores:
        *found, reference, _ = accuracy_figures(score)
        answered = passed(score) or "not asked for"
        table.add_row(score.target, score.kernels, reference, str(score.n_tokens), *found, answered)
    out.print()
    print_table(table)


# ---- many requests at once ----
