"""An outcome as numbered rows, one for each cell and variant, its figures as text, and sentences about it.

Shared by the page, the charts and the terminal, so that a number means the same row everywhere. A CSV has a
row for each cell, category and variant, and one for each skipped cell.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO, get_args

import msgspec

from edgespec.apps.bench.runs import (
    PEER,
    PLAIN,
    AccuracyScore,
    BenchmarkOutcome,
    Cell,
    ProblemsSolved,
    peer_of,
)
from edgespec.apps.bench.summary import (
    CategorySummary,
    Interval,
    VariantComparison,
    VariantSummary,
    summarise_cell,
)
from edgespec.platform.files import write_file
from edgespec.platform.metering import Phase

Summaries = tuple[tuple[CategorySummary, ...], ...]
"""The result of `summarise_cell` for each cell of an outcome, in their order."""

ESTIMATED = "(estimated)"
"""The end of `VariantSummary.energy_source` if the joules are estimated."""

_NAMES = {
    "joules_per_token": "gross_joules_per_token", "joules": "gross_joules_ratio",
    "agreement": "agreement_with_target", "VariantSummary.kl": "kl_from_target_nats_per_token",
    "kl": "kl_nats_per_token", "kl_error": "kl_error_nats_per_token", "reference": "accuracy_reference",
    "n_tokens": "accuracy_tokens", "passed": "problems_passed",
}  # fmt: skip
"""Field -> column of the CSV, where that is not the field's name without "n_"."""


def summarise(outcome: BenchmarkOutcome) -> Summaries:
    """Return the summary of each cell. This is slow: call it once and pass the result on."""
    return tuple(summarise_cell(cell) for cell in outcome.cells)


def document(outcome: BenchmarkOutcome, summaries: Summaries | None = None) -> bytes:
    """Return the outcome as a line of JSON, with raw runs and with summaries in the order of the cells.

    `busy`: what the figures are worth if the machine was.
    """
    found = summarise(outcome) if summaries is None else summaries
    whole = {"outcome": outcome, "busy": outcome.busy, "summary": found}
    return msgspec.json.encode(whole) + b"\n"


# ---- CSV ----


def write_csv(outcome: BenchmarkOutcome, where: Path | TextIO, summaries: Summaries | None = None) -> None:
    """Write a row for each cell, category and variant. An unavailable figure is an empty field.

    Raises EdgespecError in one line if the file cannot be written.
    """
    found = summarise(outcome) if summaries is None else summaries
    rows, text = list(_csv_rows(outcome, found)), io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    if isinstance(where, Path):
        write_file(where, text.getvalue().encode(), field="csv")
    else:
        where.write(text.getvalue())


def _csv_rows(outcome: BenchmarkOutcome, summaries: Summaries) -> Iterator[dict[str, Any]]:
    for cell, summary in zip(outcome.cells, summaries, strict=True):
        if cell.skipped:
            yield _csv_row(outcome, cell)
        for category in summary:
            for variant in category.variants:
                yield _csv_row(outcome, cell, category, variant)


def _models(cell: Cell, variant: str) -> dict[str, Any]:
    kernels = peer_of(variant) or cell.kernels
    return {"target": cell.target, "draft": cell.draft or "none", "kernels": kernels}


def _csv_row(
    outcome: BenchmarkOutcome,
    cell: Cell,
    category: CategorySummary | None = None,
    variant: VariantSummary | None = None,
) -> dict[str, Any]:
    name = variant.variant if variant else ""
    accuracy = outcome.accuracy_of(cell) if variant and measures_target(variant) else None
    solved = outcome.solved_by(cell, name)
    known = variant and variant.joules_per_token is not None
    return {
        **_models(cell, name),
        "category": category.category if category else "",
        "variant": name,
        "prompts": category.n_prompts if category else None,
        **_columns(VariantSummary, variant),
        "energy_estimated": ("no", "yes")[is_estimated(variant)] if variant and known else None,
        **_columns(VariantComparison, category and category.comparison(name)),
        "peak_rss_bytes": None if peer_of(name) else cell.peak_rss_bytes,
        **_columns(AccuracyScore, accuracy),
        **({"problems_passed": solved.passed, "problems": solved.n_problems} if solved else {}),
        "skipped": cell.skipped,
    }


def _columns(kind: type[Any], record: object) -> dict[str, Any]:
    """Return the columns of a record's figures, empty ones for None: the same for all records of `kind`."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        value = getattr(record, field.name, None)
        key = f"{kind.__name__}.{field.name}"
        name = _NAMES.get(key) or _NAMES.get(field.name) or field.name.removeprefix("n_")
        if field.name.endswith("_shares"):
            found |= {f"{name[:-1]}_{phase}": (value or {}).get(phase) for phase in get_args(Phase)}
        elif field.type == "Interval | None":
            parts = {name: "median", f"{name}_low": "low", f"{name}_high": "high"}
            found |= {column: getattr(value, part, None) for column, part in parts.items()}
        elif field.name == "acceptance_by_position":
            found[name] = " ".join(f"{share:.6g}" for share in value or ())
        elif field.name not in ("target", "kernels", "variant"):
            found[name] = ("no", "yes")[value] if isinstance(value, bool) else value
    return found


def measures_target(variant: VariantSummary) -> bool:
    """Whether the target's accuracy holds for this variant: it is exact, and our process computed it."""
    return variant.exact and not peer_of(variant.variant)


# ---- rows ----

UNAVAILABLE = "unavailable"
"""Written for a figure that could not be measured, never 0 or an empty text."""

NOT_EXACT = "(not exact)"
"""Marks a variant whose texts are not distributed as the target's own."""

NOT_APPLICABLE = "-"
"""Written where no figure makes sense, such as plain decoding's speed-up over itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """A variant in a cell, over all prompts."""

    number: int
    """From 1, in the order of the cells."""
    cell: Cell
    variant: VariantSummary
    comparison: VariantComparison | None
    """None for plain decoding."""
    categories: tuple[CategorySummary, ...]
    """The cell's categories, without OVERALL."""
    accuracy: AccuracyScore | None
    """The target's accuracy; None too if the texts are not the target's own."""
    solved: ProblemsSolved | None = None
    """Problems solved by a variant that is not exact, if asked for."""

    @property
    def name(self) -> str:
        """Target, draft, kernels and variant in a line."""
        drafted = f", drafted by {self.draft}" if self.draft != NOT_APPLICABLE else ""
        return f"{self.cell.target}{drafted}, {self.kernels}, {self.variant_name}"

    @property
    def variant_name(self) -> str:
        """The variant, marked if it is not exact."""
        return self.variant.variant if self.variant.exact else f"{self.variant.variant} {NOT_EXACT}"

    @property
    def draft(self) -> str:
        """The draft model, or NOT_APPLICABLE."""
        plain = self.variant.variant in (PLAIN, PEER + PLAIN)
        return NOT_APPLICABLE if plain or not self.cell.draft else self.cell.draft

    @property
    def kernels(self) -> str:
        """The kernels used; a peer has its own."""
        return peer_of(self.variant.variant) or self.cell.kernels

    @property
    def peak_rss_bytes(self) -> int | None:
        """Peak memory of the cell's process; a peer's is unknown."""
        return None if peer_of(self.variant.variant) else self.cell.peak_rss_bytes

    def of_category(self, category: str) -> tuple[VariantSummary, VariantComparison | None] | None:
        """Return this variant's figures in a category; None if the cell has no such runs."""
        name = self.variant.variant
        own = [summary for summary in self.categories if summary.category == category]
        found = ((one, summary.comparison(name)) for summary in own for one in summary.variants)
        return next(((one, compared) for one, compared in found if one.variant == name), None)


@dataclass(frozen=True, slots=True)
class EnergyColumn:
    """The joules per token shown if there is room for one figure: net if all rows have it."""

    net: bool
    estimated: bool
    """Whether any row's figure is an estimate."""

    @property
    def label(self) -> str:
        """The heading of the column, such as "J/token, net (estimated)"."""
        return f"J/token, {'net' if self.net else 'gross'}" + (f" {ESTIMATED}" if self.estimated else "")

    def of(self, variant: VariantSummary) -> float | None:
        """Return a variant's joules per token; None: unavailable."""
        return variant.net_joules_per_token if self.net else variant.joules_per_token


@dataclass(frozen=True, slots=True)
class ReportData:
    """An outcome in the rows and cells that every form of output shows."""

    outcome: BenchmarkOutcome
    rows: tuple[Row, ...]
    cells: tuple[tuple[Cell, tuple[CategorySummary, ...]], ...]
    """The cells that ran."""
    skipped: tuple[Cell, ...]
    energy: EnergyColumn | None
    """None: no row has joules."""

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of all cells, without OVERALL."""
        names = (summary.category for row in self.rows for summary in row.categories)
        return tuple(dict.fromkeys(names))


def read_outcome(outcome: BenchmarkOutcome, summaries: Summaries | None = None) -> ReportData:
    """Prepare an outcome for output; `summaries`: the result of `summarise`, if it exists already."""
    found = summarise(outcome) if summaries is None else summaries
    ran = tuple((cell, summary) for cell, summary in zip(outcome.cells, found, strict=True) if summary)
    rows: list[Row] = []
    # Cells with a draft measure plain decoding too, as their baseline: a cell of the target alone is its row.
    alone = {_plain_of(cell) for cell, _ in ran if not cell.draft}
    for cell, summary in ran:
        overall, *categories = summary
        for variant in overall.variants:
            if variant.variant == PLAIN and cell.draft and _plain_of(cell) in alone:
                continue
            accuracy = outcome.accuracy_of(cell) if measures_target(variant) else None
            solved = outcome.solved_by(cell, variant.variant)
            compared_with = overall.comparison(variant.variant)
            rows.append(Row(len(rows) + 1, cell, variant, compared_with, tuple(categories), accuracy, solved))
    skipped = tuple(cell for cell in outcome.cells if cell.skipped)
    return ReportData(outcome, tuple(rows), ran, skipped, _energy_column(rows))


def _plain_of(cell: Cell) -> tuple[str, str]:
    return cell.target, cell.kernels


def _energy_column(rows: list[Row]) -> EnergyColumn | None:
    known = [row.variant for row in rows if row.variant.joules_per_token is not None]
    if not known:
        return None
    return EnergyColumn(
        net=all(variant.net_joules_per_token is not None for variant in known),
        estimated=any(is_estimated(variant) for variant in known),
    )


def is_estimated(variant: VariantSummary) -> bool:
    """Whether the variant's joules are estimated from assumed watts."""
    return variant.energy_source.endswith(ESTIMATED)


# ---- figures as text ----


def fixed(value: float | None, digits: int) -> str:
    """Return a figure with `digits` digits after the point, or UNAVAILABLE."""
    return UNAVAILABLE if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Return a figure with three significant digits, never as a power of ten."""
    if value is None:
        return UNAVAILABLE
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def rate(variant: VariantSummary, value: float | None) -> str:
    """Return tau or alpha as text: "-" for plain decoding and if nothing was drafted."""
    drafts = variant.variant != PLAIN and not (value is None and variant.tau is not None)
    return fixed(value, 2) if drafts else NOT_APPLICABLE


def milliseconds(seconds: float | None) -> str:
    """Return a time in whole milliseconds, without its unit."""
    return UNAVAILABLE if seconds is None else f"{1e3 * seconds:.0f}"


def with_interval(interval: Interval | None) -> str:
    """Return a ratio as "1.62 [1.55 - 1.70]"; "1.62 [too few]" if there is no interval."""
    if interval is None:
        return UNAVAILABLE
    if interval.low is None or interval.high is None:
        return f"{interval.median:.2f} [too few]"
    return f"{interval.median:.2f} [{interval.low:.2f} - {interval.high:.2f}]"


def identical(comparison: VariantComparison | None) -> str:
    """Return how many of the compared texts equal plain decoding's, as "12/12"."""
    if comparison is None:
        return NOT_APPLICABLE
    if not comparison.n_compared:
        return UNAVAILABLE
    return f"{comparison.n_identical}/{comparison.n_compared}"


def joules(value: float | None, variant: VariantSummary) -> str:
    """Return joules as text, marked if estimated."""
    text = significant(value)
    return f"{text} {ESTIMATED}" if value is not None and is_estimated(variant) else text


def megabytes(n_bytes: int | None) -> str:
    """Return bytes as MB (10^6)."""
    return UNAVAILABLE if n_bytes is None else f"{n_bytes / 1e6:.0f} MB"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share in percent, with `digits` digits after the point."""
    return UNAVAILABLE if share is None else f"{100 * share:.{digits}f} %"


def passed(accuracy: AccuracyScore | ProblemsSolved | None) -> str | None:
    """Return the share of problems answered exactly as "41/164 (25 %)"; None: not asked for."""
    if accuracy is None or accuracy.passed is None or not accuracy.n_problems:
        return None
    share = accuracy.passed / accuracy.n_problems
    return f"{accuracy.passed}/{accuracy.n_problems} ({100 * share:.0f} %)"


def with_error(accuracy: AccuracyScore) -> str:
    """Return the KL divergence with its standard error, as "0.0123 ± 0.0010"."""
    if accuracy.kl is None:
        return UNAVAILABLE
    if not accuracy.kl_error:
        return f"{accuracy.kl:.4f}"
    digits = max(0, 1 - math.floor(math.log10(accuracy.kl_error)))  # two significant digits of the error
    return f"{accuracy.kl:.{digits}f} ± {accuracy.kl_error:.{digits}f}"


def speedup(comparison: VariantComparison | None) -> str:
    """Return the speed-up with its interval; NOT_APPLICABLE for plain decoding."""
    return with_interval(comparison.speedup) if comparison else NOT_APPLICABLE


def accuracy_figures(score: AccuracyScore) -> list[str]:
    """Return perplexity, KL divergence, top-1 agreement, the reference, and the problems answered exactly."""
    perplexity, answered = f"{score.perplexity:.3f}", passed(score) or UNAVAILABLE
    if score.kl is None:
        return [perplexity, "reference", "reference", NOT_APPLICABLE, answered]
    return [perplexity, with_error(score), percent(score.top1, 1), score.reference, answered]


# ---- sentences ----


def title(outcome: BenchmarkOutcome) -> str:
    """Return a title: the pair measured, or the number of combinations."""
    if len(outcome.cells) == 1:
        (cell,) = outcome.cells
        return f"{cell.target}, drafted by {cell.draft}" if cell.draft else cell.target
    targets = len({cell.target for cell in outcome.cells})
    noun = "target" if targets == 1 else "targets"
    skipped = sum(1 for cell in outcome.cells if cell.skipped)
    left = f", {skipped} skipped" if skipped else ""
    return f"{len(outcome.cells)} combinations of {targets} {noun}{left}"


def sentences(reading: ReportData) -> list[str]:
    """Return what the figures are worth, the headline, and what there is to say of texts and energy."""
    busy = [reading.outcome.busy] if reading.outcome.busy else []
    return [*busy, headline(reading), *lossy_lines(reading), identical_line(reading), energy_line(reading)]


def best_row(reading: ReportData) -> Row | None:
    """Return the row for the headline: of a single cell the first variant that drafts, else the fastest row.

    The fastest by the column tokens/s. A row that is not exact is chosen only if there is no other, because
    its texts are not the target's.
    """
    exact = [row for row in reading.rows if row.variant.exact]
    if len(reading.cells) == 1:
        found = [row for row in reading.rows if row.comparison and row.comparison.speedup]
        compared = [row for row in found if row.variant.exact] or found
        return next((row for row in compared if row.variant.variant == "auto"), next(iter(compared), None))
    return max(exact or reading.rows, key=lambda row: row.variant.decode_tokens_per_s or 0.0, default=None)


def headline(reading: ReportData) -> str:
    """Return the overall speed-up and its interval in a sentence."""
    row = best_row(reading)
    if row is None:
        return "Nothing ran that could be compared with plain decoding." if reading.rows else "Nothing ran."
    text = _speedup(reading, row)
    if len(reading.cells) == 1:
        return f"{row.variant_name} is {text}."
    speed, whole = (fixed(x, 1) for x in (row.variant.decode_tokens_per_s, row.variant.whole_tokens_per_s))
    return (
        f"Fastest is row {row.number} with {speed} tokens/s, {whole} with the reading of its prompts "
        f"({row.name}): whole generations are {text}."
    )


def _speedup(reading: ReportData, row: Row) -> str:
    if row.comparison is None or row.comparison.speedup is None:
        return (
            "not faster with any draft"
            if row.variant.variant == PLAIN
            else "not compared with plain decoding"
        )
    speedup = row.comparison.speedup
    if speedup.low is None or speedup.high is None:
        interval = "too few for an interval"
    else:
        interval = f"95 % interval {speedup.low:.2f} to {speedup.high:.2f}"
    whose = "plain decoding" if len(reading.cells) == 1 else "plain decoding of the same models"
    prompts = f"{speedup.n_prompts} prompt{'s' if speedup.n_prompts != 1 else ''}"
    return f"{speedup.median:.2f} times as fast as {whose} ({interval}; {prompts})"


def identical_line(reading: ReportData) -> str:
    """Return in a sentence how many texts of exact variants equal plain decoding's."""
    compared = [row.comparison for row in reading.rows if row.comparison and row.variant.exact]
    n = sum(comparison.n_compared for comparison in compared)
    same = sum(comparison.n_identical for comparison in compared)
    if not n:
        return "Outputs: not compared with plain decoding's."
    if same == n:
        return f"Outputs: all {n} identical to plain decoding's, token by token."
    return f"Outputs: {same} of {n} identical to plain decoding's, token by token."


def lossy_lines(reading: ReportData) -> list[str]:
    """Return a sentence for each row that is not exact: the target's share of the tokens, and the loss."""
    lines = []
    several = len(reading.cells) > 1
    for row in reading.rows:
        if row.variant.exact:
            continue
        found = [f"the target saw {100 * row.variant.target_share:.0f} % of the tokens"]
        if row.variant.agreement is not None:
            found.append(f"{100 * row.variant.agreement:.1f} % are those that it likes best")
        if row.variant.kl is not None:
            found.append(f"KL {row.variant.kl:.4f} nats a token")
        if row.solved:
            found.append(f"exact match {passed(row.solved)}")
        which = f"Row {row.number}, {row.variant.variant}," if several else row.variant.variant
        lines.append(f"{which} is not exact: {'; '.join(found)}.")
    return lines


def energy_line(reading: ReportData) -> str:
    """Return in a sentence the energy spent, or why it is unavailable."""
    column = reading.energy
    if column is None:
        return f"Energy: {UNAVAILABLE}: {energy_reason(reading)}"
    sources = ", ".join(
        dict.fromkeys(row.variant.energy_source for row in reading.rows if row.variant.energy_source)
    )
    row = best_row(reading)
    if row is None or column.of(row.variant) is None:
        return f"Energy: from {sources}.{_without_joules(reading)}"
    kind = "net of the idle machine" if column.net else "gross"
    text = f"Energy: {joules(column.of(row.variant), row.variant)} J a token, {kind}"
    plain = next(
        (r for r in reading.rows if _plain_of(r.cell) == _plain_of(row.cell) and r.variant.variant == PLAIN),
        None,
    )
    if plain and plain is not row and column.of(plain.variant) is not None:
        text += f", beside {joules(column.of(plain.variant), plain.variant)} of plain decoding"
    if row.comparison and row.comparison.joules:
        text += f"; gross, it takes {with_interval(row.comparison.joules)} times plain decoding's"
    return f"{text}; from {sources}.{_without_joules(reading)}"


def _without_joules(reading: ReportData) -> str:
    """Return how many runs lack joules that others have, and why the first does; "" if none does."""
    runs = [run for cell, _ in reading.cells for run in cell.runs if not peer_of(run.variant)]
    without = [run.energy for run in runs if run.energy and run.energy.joules is None]
    return f" {len(without)} of {len(runs)} runs have none: {without[0].reason}." if without else ""


def energy_reason(reading: ReportData) -> str:
    """Return why there are no joules, without a full stop."""
    for cell, _ in reading.cells:
        for run in cell.runs:
            if run.energy and run.energy.reason:
                return run.energy.reason.rstrip(".")
    return "it was not measured"
