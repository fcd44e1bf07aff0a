"""The tables of a benchmark in the terminal: a cell by category, or many cells in numbered rows."""

from __future__ import annotations

from rich.table import Table

from edgespec.apps.bench.curves import ThroughputCurve
from edgespec.apps.bench.exports import Summaries
from edgespec.apps.bench.heard_summary import HeardSummary
from edgespec.apps.bench.report.rows import (
    NOT_APPLICABLE,
    NOT_EXACT,
    UNAVAILABLE,
    ReportData,
    Row,
    energy_line,
    fixed,
    headline,
    identical,
    identical_line,
    lossy_lines,
    megabytes,
    milliseconds,
    passed,
    percent,
    rate,
    read_outcome,
    significant,
    title,
    with_error,
    with_interval,
)
from edgespec.apps.bench.report.throughput import fewest_name, figures, sentences
from edgespec.apps.bench.runs import PLAIN, BenchmarkOutcome
from edgespec.apps.bench.summary import (
    CategorySummary,
    VariantComparison,
    VariantSummary,
)
from edgespec.cli.console import out, print_table


def print_outcome(outcome: BenchmarkOutcome, summaries: Summaries | None = None) -> None:
    """Print an outcome's tables to stdout; `summaries`: the result of `exports.summarise`, if it exists."""
    reading = read_outcome(outcome, summaries)
    out.print(title(outcome))
    if any(row.variant.heard for row in reading.rows):
        _print_recordings(reading)
    elif len(reading.cells) == 1 and not reading.skipped:
        _print_categories(reading)
    elif reading.cells:
        _print_rows(reading)
    _print_skipped(reading)
    _print_accuracy(reading)
    if reading.curves:
        _print_throughput(reading)
    if reading.rows:
        out.print()
        lines = (headline(reading), *lossy_lines(reading), identical_line(reading), energy_line(reading))
        for line in lines:
            out.print(line)


def _table(*names: str, texts: int = 1) -> Table:
    """Return an empty table; the columns after the first `texts` hold figures and are aligned right."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < texts else "right", overflow="fold")
    return table


def _joules_heading(reading: ReportData) -> str:
    return reading.energy.label.replace(", ", "\n").replace(" (", "\n(") if reading.energy else "J/token"


def _figures(reading: ReportData, variant: VariantSummary, comparison: VariantComparison | None) -> list[str]:
    """Return speed-up, time to first token, tau, alpha, joules a token, identical."""
    return [
        with_interval(comparison.speedup) if comparison else NOT_APPLICABLE,
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
        table = _table(
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
            comparison = next((one for one in summary.comparisons if one.variant == name), None)
            plain = found.get(PLAIN)
            table.add_row(
                summary.category,
                str(summary.n_prompts),
                fixed(plain.decode_tokens_per_s if plain else None, 1),
                fixed(found[name].decode_tokens_per_s, 1),
                *_figures(reading, found[name], comparison),
                style="bold" if summary is summaries[0] else None,
            )
        out.print()
        print_table(table)
    out.print()
    out.print(f"kernels {cell.kernels}; peak memory {megabytes(cell.peak_rss_bytes)}")


# ---- recordings ----


def _print_recordings(reading: ReportData) -> None:
    """Print a table for each category of recordings, and one for all together: a row for each variant."""
    (cell, summaries), *_ = reading.cells
    for summary in summaries[1:] if len(summaries) == 2 else (*summaries[1:], summaries[0]):
        compared = {comparison.variant: comparison for comparison in summary.comparisons}
        table = _table(
            f"{summary.category}, n = {summary.n_prompts}",
            "seconds",
            "times\nreal time",
            "speed-up\n[95 %]",
            "encoder",
            "decoder",
            "tau",
            "alpha",
            f"word errors\nof {_n_words(summary)}",
            "J/min",
            "identical",
        )
        for variant in summary.variants:
            if variant.heard:
                table.add_row(variant.variant, *_heard(variant, variant.heard, compared.get(variant.variant)))
        out.print()
        print_table(table)
    out.print()
    out.print(f"kernels {cell.kernels}; peak memory {megabytes(cell.peak_rss_bytes)}")


def _n_words(summary: CategorySummary) -> int:
    return max((variant.heard.n_words for variant in summary.variants if variant.heard), default=0)


def _heard(variant: VariantSummary, heard: HeardSummary, comparison: VariantComparison | None) -> list[str]:
    drafts = variant.alpha is not None
    compared = comparison is not None and comparison.n_compared > 0
    return [
        fixed(heard.seconds, 2),
        fixed(heard.times_real_time, 1),
        with_interval(comparison.speedup) if comparison else NOT_APPLICABLE,
        percent(heard.encoder_share),
        percent(heard.decoder_share),
        fixed(variant.tau, 2) if drafts else NOT_APPLICABLE,
        fixed(variant.alpha, 2) if drafts else NOT_APPLICABLE,
        NOT_APPLICABLE if heard.word_error_rate is None else f"{100 * heard.word_error_rate:.1f} %",
        significant(heard.joules_per_minute),
        identical(comparison) if compared else NOT_APPLICABLE,
    ]


# ---- several ----


def _print_rows(reading: ReportData) -> None:
    table = _table(
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
        table.add_row(*_row(reading, row))
    out.print()
    print_table(table)


def _row(reading: ReportData, row: Row) -> list[str]:
    return [
        str(row.number),
        row.cell.target,
        row.draft,
        row.kernels,
        row.variant_name,
        fixed(row.variant.decode_tokens_per_s, 1),
        *_figures(reading, row.variant, row.comparison),
        megabytes(row.peak_rss_bytes),
    ]


def _print_skipped(reading: ReportData) -> None:
    if not reading.skipped:
        return
    table = _table("skipped: target", "draft", "kernels", "why", texts=4)
    for cell in reading.skipped:
        table.add_row(cell.target, cell.draft or NOT_APPLICABLE, cell.kernels, cell.skipped)
    out.print()
    print_table(table)


def _print_accuracy(reading: ReportData) -> None:
    scores = reading.outcome.accuracy
    if not scores:
        return
    figures = ("tokens", "perplexity", "KL, nats/token", "top-1", "exact match")
    table = _table("target", "kernels", "compared with", *figures, texts=3)
    for score in scores:
        reference = score.kl is None
        table.add_row(
            score.target,
            score.kernels,
            NOT_APPLICABLE if reference else score.reference,
            str(score.n_tokens),
            f"{score.perplexity:.3f}",
            "reference" if reference else with_error(score),
            "reference" if reference else UNAVAILABLE if score.top1 is None else f"{100 * score.top1:.1f} %",
            passed(score) or "not asked for",
        )
    out.print()
    print_table(table)


# ---- many requests at once ----


def _print_throughput(reading: ReportData) -> None:
    """Print a table for each cell whose throughput was measured, and sentences about all."""
    for curve in reading.curves:
        out.print()
        if len(reading.curves) > 1:
            out.print(curve.cell.name)
        print_table(_throughput(curve))
    out.print()
    for line in sentences(reading):
        out.print(line)


def _throughput(curve: ThroughputCurve) -> Table:
    than = fewest_name(curve, curve.points[0])
    table = _table(
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
        texts=2,
    )
    table.columns[0].justify = "right"
    for point in curve.points:
        table.add_row(*figures(point))
    return table
