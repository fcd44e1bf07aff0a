"""Writes a benchmark's figures as CSV and JSON; a failed write leaves the old file as it was.

A CSV has a row for each cell, category and variant, and one for each skipped cell; for concurrent
requests a row for each cell, number of requests and variant.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from edgespec.apps.bench.runs import AccuracyScore, BenchmarkOutcome, Cell, ProblemsSolved, peer_of
from edgespec.apps.bench.summary import (
    CategorySummary,
    HeardSummary,
    Interval,
    ThroughputPoint,
    VariantComparison,
    VariantSummary,
    curves,
    summarise_cell,
    summarise_throughput,
)
from edgespec.platform.files import write_file

Summaries = tuple[tuple[CategorySummary, ...], ...]
"""The result of `summarise_cell` for each cell of an outcome, in their order."""

ESTIMATED = "(estimated)"
"""The end of `VariantSummary.energy_source` if the joules are estimated."""

_NOTHING = VariantSummary(
    variant="",
    n_runs=0,
    decode_tokens_per_s=None,
    whole_tokens_per_s=None,
    ttft_s=None,
    tau=None,
    alpha=None,
    acceptance_by_position=(),
    time_shares={},
    joules_per_token=None,
    net_joules_per_token=None,
    joule_shares={},
    joule_seconds=None,
    energy_source="",
)  # of a cell that was skipped: its row has the columns of every other


def summarise(outcome: BenchmarkOutcome) -> Summaries:
    """Return the summary of each cell. This is slow: call it once and pass the result on."""
    return tuple(summarise_cell(cell) for cell in outcome.cells)


def document(outcome: BenchmarkOutcome, summaries: Summaries | None = None) -> bytes:
    """Return the outcome as a line of JSON, with raw runs and with summaries in the order of the cells.

    `curves`: those of the cells that have one.
    """
    found = summarise(outcome) if summaries is None else summaries
    drawn = [curve.points for curve in curves(outcome)]
    return msgspec.json.encode({"outcome": outcome, "summary": found, "curves": drawn}) + b"\n"


# ---- CSV ----


def write_csv(outcome: BenchmarkOutcome, where: Path | TextIO, summaries: Summaries | None = None) -> None:
    """Write a row for each cell, category and variant. An unavailable figure is an empty field.

    Raises EdgespecError in one line if the file cannot be written.
    """
    found = summarise(outcome) if summaries is None else summaries
    _write_rows(list(_csv_rows(outcome, found)), where)


def _write_rows(rows: list[dict[str, Any]], where: Path | TextIO) -> None:
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    if isinstance(where, Path):
        write_file(where, text.getvalue().encode(), field="csv")
    else:
        where.write(text.getvalue())


def _facts(cell: Cell, variant: str) -> dict[str, Any]:
    kernels = peer_of(variant) or cell.kernels
    return {"target": cell.target, "draft": cell.draft or "none", "kernels": kernels}


def _csv_rows(outcome: BenchmarkOutcome, summaries: Summaries) -> Iterator[dict[str, Any]]:
    for cell, summary in zip(outcome.cells, summaries, strict=True):
        if cell.skipped:
            yield _csv_row(outcome, cell, None, _NOTHING, None)
        for point in summarise_throughput(cell):
            yield {**_facts(cell, point.variant), **_point_columns(point)}
        for category in summary:
            compared = {comparison.variant: comparison for comparison in category.comparisons}
            for variant in category.variants:
                yield _csv_row(outcome, cell, category, variant, compared.get(variant.variant))


def _point_columns(point: ThroughputPoint) -> dict[str, Any]:
    return {
        "variant": point.variant,
        "texts_at_once": point.at_once,
        "rounds": point.n_rounds,
        "tokens_per_s": point.tokens_per_s,
        "tokens_per_s_slowest_round": point.low,
        "tokens_per_s_fastest_round": point.high,
        "ttft_s": point.ttft_s,
        "longest_ttft_s": point.longest_ttft_s,
        **_interval("gain", point.gain),
        **_interval("speedup", point.speedup),
        "limit_tokens_per_s": point.limit,
        "identical": point.n_identical,
        "compared": point.n_compared,
    }


def _csv_row(
    outcome: BenchmarkOutcome,
    cell: Cell,
    category: CategorySummary | None,
    variant: VariantSummary,
    comparison: VariantComparison | None,
) -> dict[str, Any]:
    return {
        **_facts(cell, variant.variant),
        "category": category.category if category else "",
        "variant": variant.variant,
        "prompts": category.n_prompts if category else None,
        **_variant_columns(variant),
        **_comparison_columns(comparison),
        "peak_rss_bytes": None if peer_of(variant.variant) else cell.peak_rss_bytes,
        **_accuracy_columns(outcome.accuracy_of(cell) if measures_target(variant) else None),
        **_solved_columns(outcome.solved_by(cell, variant.variant)),
        "skipped": cell.skipped,
    }


def _variant_columns(variant: VariantSummary) -> dict[str, Any]:
    acceptance = " ".join(f"{share:.6g}" for share in variant.acceptance_by_position)
    known = variant.joules_per_token is not None
    return {
        "runs": variant.n_runs or None,
        "decode_tokens_per_s": variant.decode_tokens_per_s,
        "whole_tokens_per_s": variant.whole_tokens_per_s,
        "ttft_s": variant.ttft_s,
        "tau": variant.tau,
        "alpha": variant.alpha,
        "acceptance_by_position": acceptance,
        **_shares("time_share", variant.time_shares),
        "gross_joules_per_token": variant.joules_per_token,
        "net_joules_per_token": variant.net_joules_per_token,
        **_shares("joule_share", variant.joule_shares),
        "joule_seconds": variant.joule_seconds,
        "energy_source": variant.energy_source,
        "exact": ("yes" if variant.exact else "no") if variant.n_runs else None,
        "target_share": variant.target_share if variant.n_runs else None,
        "agreement_with_target": variant.agreement,
        "kl_from_target_nats_per_token": variant.kl,
        "energy_estimated": ("yes" if variant.energy_source.endswith(ESTIMATED) else "no") if known else None,
        **(_heard_columns(variant.heard) if variant.heard else {}),
    }


def _heard_columns(heard: HeardSummary) -> dict[str, Any]:
    return {
        "audio_s": heard.audio_s,
        "seconds": heard.seconds,
        "times_real_time": heard.times_real_time,
        "words": heard.n_words,
        "word_error_rate": heard.word_error_rate,
        "encoder_share": heard.encoder_share,
        "decoder_share": heard.decoder_share,
        "gross_joules_per_minute_of_sound": heard.joules_per_minute,
    }


def _shares(name: str, shares: dict[str, float]) -> dict[str, Any]:
    return {f"{name}_{phase}": shares.get(phase) for phase in ("prefill", "draft", "verify", "rest")}


def _comparison_columns(comparison: VariantComparison | None) -> dict[str, Any]:
    return {
        **_interval("speedup", comparison.speedup if comparison else None),
        **_interval("decode_speedup", comparison.decode_speedup if comparison else None),
        **_interval("gross_joules_ratio", comparison.joules if comparison else None),
        "identical": comparison.n_identical if comparison else None,
        "compared": comparison.n_compared if comparison else None,
    }


def _interval(name: str, interval: Interval | None) -> dict[str, Any]:
    return {
        name: interval.median if interval else None,
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def measures_target(variant: VariantSummary) -> bool:
    """Whether the target's accuracy holds for this variant: it is exact, and our process computed it."""
    return variant.exact and not peer_of(variant.variant)


def _solved_columns(solved: ProblemsSolved | None) -> dict[str, Any]:
    return {"problems_passed": solved.passed, "problems": solved.n_problems} if solved else {}


def _accuracy_columns(accuracy: AccuracyScore | None) -> dict[str, Any]:
    return {
        "perplexity": accuracy.perplexity if accuracy else None,
        "kl_nats_per_token": accuracy.kl if accuracy else None,
        "kl_error_nats_per_token": accuracy.kl_error if accuracy else None,
        "top1": accuracy.top1 if accuracy else None,
        "accuracy_reference": accuracy.reference if accuracy else None,
        "accuracy_tokens": accuracy.n_tokens if accuracy else None,
        "problems_passed": accuracy.passed if accuracy else None,
        "problems": accuracy.n_problems if accuracy else None,
    }
