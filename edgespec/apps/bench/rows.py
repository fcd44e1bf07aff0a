"""An outcome as rows of columns, computed once: CSV, page and terminal show these same figures.

A row is a variant in a cell, over all prompts or over those of a category. Sentences about the whole follow.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from edgespec.apps.bench.runs import (
    PEER,
    PLAIN,
    AccuracyScore,
    BenchmarkOutcome,
    Cell,
    ProblemsSolved,
    Run,
    peer_of,
)
from edgespec.apps.bench.suites import OVERALL
from edgespec.apps.bench.summary import (
    ESTIMATED,
    CategorySummary,
    Interval,
    VariantComparison,
    VariantSummary,
    summarise_cell,
)
from edgespec.platform.files import write_file
from edgespec.platform.metering import Phase

_T = TypeVar("_T")

UNAVAILABLE = "unavailable"
"""Written for a figure that could not be measured, never 0 or an empty text."""

NONE = "-"
"""Written where no figure makes sense, such as plain decoding's speed-up over itself."""

NOT_EXACT = "(not exact)"
"""Marks a variant whose texts are not distributed as the target's own."""

GROSS, NET = "gross_joules_per_token", "net_joules_per_token"
NAMES = ("row", "target", "draft", "kernels", "variant")
SPEED = ("decode_tokens_per_s", "speedup", "ttft_s", "tau", "alpha")
ACCURACY = ("perplexity", "kl_nats_per_token", "top1", "problems_passed")
LOSS = ("target_share", "agreement_with_target", "kl_from_target_nats_per_token")


class Column(NamedTuple):
    """A figure of a row."""

    value: Any
    """As a CSV has it; None: unavailable, an empty field."""
    heading: str = ""
    """Of tables, with > before that of a figure, which is aligned right; "": only CSVs have the column."""
    text: str = NONE
    """As tables have it."""


Table = list[list[str]]
"""The headings of columns, then rows of their texts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A variant in a cell, over all prompts or over those of a category."""

    cell: Cell
    variant: VariantSummary
    comparison: VariantComparison | None
    """With plain decoding; None for plain decoding."""
    again: bool
    """Whether it is plain decoding that a cell of the target alone has too: only the CSV has it then."""
    columns: dict[str, Column]
    """By the names of the CSV, in its order; and "row", the number in tables of all cells."""

    def __getitem__(self, name: str) -> Column:
        """Return a column."""
        return self.columns[name]


class Report:
    """An outcome, and all that is computed from it, once because it is slow."""

    def __init__(self, outcome: BenchmarkOutcome) -> None:
        """Summarise every cell."""
        self.outcome = outcome
        self.summaries = [summarise_cell(cell) for cell in outcome.cells]
        self.cells = [cell for cell in outcome.cells if cell.runs]
        self.every: list[Row] = []
        self.lines: list[dict[str, Column]] = []
        """The CSV's, a skipped cell's too."""
        # A cell with a draft measures plain decoding too, as its baseline.
        alone = {(cell.target, cell.kernels) for cell in self.cells if not cell.draft}
        for cell, summary in zip(outcome.cells, self.summaries, strict=True):
            again = bool(cell.draft) and (cell.target, cell.kernels) in alone
            rows = [
                Row(cell, one, part.comparison(one.variant), again and one.variant == PLAIN, columns)
                for part in summary
                for one in part.variants
                for columns in [_columns(outcome, cell, part, one)]
            ]
            self.every += rows
            self.lines += [row.columns for row in rows]
            if cell.skipped:
                self.lines.append({**_models(cell), "skipped": _figure(cell.skipped, "why")})
        self.rows = [row for row in self.every if row["category"].text == OVERALL and not row.again]
        """The rows over all prompts, which tables number from 1."""
        for number, row in enumerate(self.rows, 1):
            row.columns["row"] = Column(number, ">row", f"{number}")
        known = [row for row in self.rows if row[GROSS].value is not None]
        net = all(row[NET].value is not None for row in known)
        self.energy = (NET if net else GROSS) if known else None
        """The column of joules if there is room for one, net if all have it. None: no row has joules."""

    def skipped(self) -> Table:
        """Return the combinations that could not run, and why."""
        lines = [line for line in self.lines if line["skipped"].value]
        return table(lines, ("target", "draft", "kernels", "skipped"))

    def document(self) -> bytes:
        """Return the outcome as a line of JSON, with raw runs and with summaries in the order of the cells.

        `busy`: the sentence about the figures if the machine was busy.
        """
        whole = {"outcome": self.outcome, "busy": self.outcome.busy, "summary": self.summaries}
        return msgspec.json.encode(whole) + b"\n"

    def write_csv(self, path: Path) -> None:
        """Write a row for each cell, category and variant, and one for each skipped cell.

        An unavailable figure is an empty field. Raises EdgespecError in one line if it cannot be written.
        """
        nothing = Cell("", None, "", (Run("", "", "", 0, 0, 0, 0.0, None, None),))
        category = summarise_cell(nothing)[0]
        text, names = io.StringIO(), _columns(self.outcome, nothing, category, category.variants[0])
        writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: column.value for name, column in line.items()} for line in self.lines)
        write_file(path, text.getvalue().encode(), field="csv")


def table(lines: Sequence[Mapping[str, Column]], names: Iterable[str]) -> Table:
    """Return the columns called `names` of some rows, without those that apply to none of them."""
    shown = [name for name in names if any(line[name].text != NONE for line in lines)]
    headings = [lines[0][name].heading for name in shown]
    return [headings, *([line[name].text for name in shown] for line in lines)]


# ---- columns ----


def _models(cell: Cell, variant: str = "") -> dict[str, Column]:
    kernels = peer_of(variant) or cell.kernels
    is_drafted = cell.draft and variant not in (PLAIN, PEER + PLAIN)
    return {
        "target": _figure(cell.target, "target"),
        "draft": _figure(cell.draft or "none", "draft", applies=bool(is_drafted)),
        "kernels": _figure(kernels, "kernels"),
    }


def _columns(
    outcome: BenchmarkOutcome, cell: Cell, category: CategorySummary, found: VariantSummary
) -> dict[str, Column]:
    """Return the columns of a variant in a category."""
    name, lossy, ours = found.variant, not found.exact, peer_of(found.variant) is None
    compared = category.comparison(name)
    n_compared = compared.n_compared if compared else None
    of_pairs = (compared.speedup, compared.decode_speedup, compared.joules) if compared else (None,) * 3
    drafts, mark = name != PLAIN, f" {ESTIMATED}" if found.is_estimated else ""
    has_alpha = drafts and not (found.alpha is None and found.tau is not None)
    models = cell.target, cell.draft, cell.kernels
    scores = [one for one in outcome.accuracy if (one.target, one.kernels) == models[::2]]
    score = scores[0] if scores and ours and not lossy else None
    solved = [o for o in outcome.solved if (o.target, o.draft, o.kernels, o.variant) == (*models, name)]
    return {
        **_models(cell, name),
        "category": _figure(category.category, "category"),
        "variant": _figure(name, "variant", lambda name: f"{name} {NOT_EXACT}" if lossy else name),
        "prompts": _figure(category.n_prompts, ">n"),
        "runs": Column(found.n_runs),
        "decode_tokens_per_s": _figure(found.decode_tokens_per_s, ">tokens/s", "{:.1f}".format),
        "whole_tokens_per_s": Column(found.whole_tokens_per_s),
        "ttft_s": _figure(found.ttft_s, ">TTFT, ms", lambda seconds: f"{1e3 * seconds:.0f}"),
        "tau": _figure(found.tau, ">tau", "{:.2f}".format, drafts),
        "alpha": _figure(found.alpha, ">alpha", "{:.2f}".format, has_alpha),
        "acceptance_by_position": Column(" ".join(f"{share:.6g}" for share in found.acceptance_by_position)),
        **{f"time_share_{phase}": Column(found.time_shares.get(phase)) for phase in get_args(Phase)},
        GROSS: _figure(found.joules_per_token, ">J/token, gross", lambda j: significant(j) + mark),
        NET: _figure(found.net_joules_per_token, ">J/token, net", lambda j: significant(j) + mark),
        **{f"joule_share_{phase}": Column(found.joule_shares.get(phase)) for phase in get_args(Phase)},
        "joule_seconds": _figure(found.joule_seconds, ">J s", lambda js: significant(js) + mark),
        "energy_source": Column(found.energy_source),
        "exact": Column("no" if lossy else "yes"),
        "target_share": _figure(found.target_share, ">target saw", percent, lossy),
        "agreement_with_target": _figure(found.agreement, ">target's best", percent_1, lossy),
        "kl_from_target_nats_per_token": _figure(found.kl, ">KL from target", "{:.4f}".format, lossy),
        "energy_estimated": Column(None if found.joules_per_token is None else ("yes" if mark else "no")),
        **_ratio("speedup", of_pairs[0], compared is not None),
        **_ratio("decode_speedup", of_pairs[1]),
        **_ratio("gross_joules_ratio", of_pairs[2]),
        "identical": _figure(
            compared.n_identical if compared else None,
            ">identical",
            lambda n: f"{n}/{n_compared}" if n_compared else UNAVAILABLE,
            compared is not None,
        ),
        "compared": Column(n_compared),
        "peak_rss_bytes": _figure(
            cell.peak_rss_bytes if ours else None, ">memory", lambda n: f"{n / 1e6:.0f} MB"
        ),
        **accuracy_columns(score, solved[0] if solved else score, bool(outcome.accuracy)),
        "skipped": Column(cell.skipped),
    }


def accuracy_columns(
    score: AccuracyScore | None, solved: AccuracyScore | ProblemsSolved | None, applies: bool = True
) -> dict[str, Column]:
    """Return the columns of a target's accuracy and of the problems solved; `applies`: it was asked for."""
    is_best = score is not None and score.kl is None
    error = score.kl_error if score else None
    passed, n_problems = (solved.passed, solved.n_problems) if solved else (None, None)

    def of_score(name: str, heading: str = "", form: Callable[[Any], str] = str) -> Column:
        column = _figure(getattr(score, name, None), heading, form, applies)
        return column._replace(text="reference") if is_best and column.value is None else column

    return {
        "accuracy_reference": of_score("reference", "compared with"),
        "accuracy_tokens": of_score("n_tokens", ">tokens"),
        "perplexity": of_score("perplexity", ">perplexity", "{:.3f}".format),
        "kl_nats_per_token": of_score("kl", ">KL, nats/token", lambda kl: _with_error(kl, error)),
        "kl_error_nats_per_token": of_score("kl_error"),
        "top1": of_score("top1", ">top-1", percent_1),
        "problems_passed": _figure(
            passed,
            ">exact match",
            lambda n: f"{n}/{n_problems} ({percent(n / (n_problems or 1))})",
            bool(n_problems),
        ),
        "problems": Column(n_problems),
    }


def _ratio(name: str, found: Interval | None, applies: bool = True) -> dict[str, Column]:
    text = _figure(found, ">speed-up [95 %]", with_interval, applies)
    return {
        name: text._replace(value=found and found.median),
        f"{name}_low": Column(found and found.low),
        f"{name}_high": Column(found and found.high),
    }


def _figure(value: _T | None, heading: str, form: Callable[[_T], str] = str, applies: bool = True) -> Column:
    return Column(value, heading, shown(value, form) if applies else NONE)


def shown(value: _T | None, form: Callable[[_T], str]) -> str:
    """Return a figure as `form` writes it; UNAVAILABLE for None."""
    return UNAVAILABLE if value is None else form(value)


def significant(value: float) -> str:
    """Return a figure with three significant digits, never as a power of ten."""
    digits = 2 - math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0
    return f"{value:.{max(0, digits)}f}"


def with_interval(interval: Interval) -> str:
    """Return a ratio as "1.62 [1.55 - 1.70]"; "1.62 [too few]" if there is no interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.median:.2f} [too few]"
    return f"{interval.median:.2f} [{interval.low:.2f} - {interval.high:.2f}]"


def _with_error(value: float, error: float | None) -> str:
    """Return a figure with its standard error, of two significant digits, as "0.0123 ± 0.0010"."""
    if not error:
        return f"{value:.4f}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def percent(share: float) -> str:
    """Return a share in whole percent."""
    return f"{100 * share:.0f} %"


def percent_1(share: float) -> str:
    """Return a share in percent, with a digit after the point."""
    return f"{100 * share:.1f} %"


# ---- sentences ----


def title(outcome: BenchmarkOutcome) -> str:
    """Return a title: the pair measured, or the number of combinations."""
    if len(outcome.cells) == 1:
        (cell,) = outcome.cells
        return f"{cell.target}, drafted by {cell.draft}" if cell.draft else cell.target
    n_targets = len({cell.target for cell in outcome.cells})
    n_skipped = sum(bool(cell.skipped) for cell in outcome.cells)
    skipped = f", {n_skipped} skipped" if n_skipped else ""
    return f"{len(outcome.cells)} combinations of {n_targets} target{'s' * (n_targets != 1)}{skipped}"


def sentences(report: Report) -> list[str]:
    """Return sentences: how reliable the figures are, the headline, and remarks on texts and energy."""
    busy = [report.outcome.busy] if report.outcome.busy else []
    return [*busy, headline(report), *_lossy_lines(report), _identical_line(report), _energy_line(report)]


def _best_row(report: Report) -> Row | None:
    """Return the row for the headline: of a single cell "auto" or the first compared, else the fastest.

    A row that is not exact is chosen only if there is no other: its texts are not the target's.
    """
    rows, is_single = report.rows, len(report.cells) == 1
    if is_single:
        rows = [row for row in rows if row["speedup"].value is not None]
    rows = [row for row in rows if row.variant.exact] or rows
    if is_single:
        return next((row for row in rows if row.variant.variant == "auto"), next(iter(rows), None))
    return max(rows, key=lambda row: row.variant.decode_tokens_per_s or 0.0, default=None)


def headline(report: Report) -> str:
    """Return the overall speed-up and its interval in a sentence."""
    row, is_single = _best_row(report), len(report.cells) == 1
    if row is None:
        return "Nothing ran that could be compared with plain decoding." if report.rows else "Nothing ran."
    found = row.comparison and row.comparison.speedup
    if found:
        known = found.low is not None and found.high is not None
        interval = (
            f"95 % interval {found.low:.2f} to {found.high:.2f}" if known else "too few for an interval"
        )
        whose = "plain decoding" if is_single else "plain decoding of the same models"
        prompts = f"{found.n_prompts} prompt{'s' * (found.n_prompts != 1)}"
        text = f"{found.median:.2f} times as fast as {whose} ({interval}; {prompts})"
    else:
        is_plain = row.variant.variant == PLAIN
        text = "not faster with any draft" if is_plain else "not compared with plain decoding"
    variant, draft = row["variant"].text, row["draft"].text
    if is_single:
        return f"{variant} is {text}."
    drafted = f", drafted by {draft}" if draft != NONE else ""
    whole = shown(row.variant.whole_tokens_per_s, "{:.1f}".format)
    return (
        f"Fastest is row {row['row'].text} with {row['decode_tokens_per_s'].text} tokens/s, {whole} with the "
        f"reading of its prompts ({row.cell.target}{drafted}, {row['kernels'].text}, {variant}): "
        f"whole generations are {text}."
    )


def _identical_line(report: Report) -> str:
    compared = [row.comparison for row in report.rows if row.comparison and row.variant.exact]
    n, same = sum(one.n_compared for one in compared), sum(one.n_identical for one in compared)
    if not n:
        return "Outputs: not compared with plain decoding's."
    count = f"all {n}" if same == n else f"{same} of {n}"
    return f"Outputs: {count} identical to plain decoding's, token by token."


def _lossy_lines(report: Report) -> list[str]:
    """Return a sentence for each row that is not exact: the target's share of the tokens, and the loss."""
    lines = []
    for row in report.rows:
        if row.variant.exact:
            continue
        words = {
            "target_share": "the target saw {} of the tokens",
            "agreement_with_target": "{} are those that it likes best",
            "kl_from_target_nats_per_token": "KL {} nats a token",
            "problems_passed": "exact match {}",
        }
        found = [form.format(row[name].text) for name, form in words.items() if row[name].value is not None]
        name = row.variant.variant
        which = f"Row {row['row'].text}, {name}," if len(report.cells) > 1 else name
        lines.append(f"{which} is not exact: {'; '.join(found)}.")
    return lines


def _energy_line(report: Report) -> str:
    """Return in a sentence the energy spent, or why it is unavailable."""
    runs = [run for cell in report.cells for run in cell.runs if not peer_of(run.variant)]
    lack = [run.energy.reason for run in runs if run.energy and run.energy.joules is None]
    if report.energy is None:
        reason = next(filter(None, lack), "it was not measured").rstrip(".")
        return f"Energy: {UNAVAILABLE}: {reason}"
    row = _best_row(report)
    text = ""
    if row and row["gross_joules_ratio"].value is not None:
        text = f"gross, it takes {row['gross_joules_ratio'].text} times plain decoding's; "
    sources = dict.fromkeys(row.variant.energy_source for row in report.rows if row.variant.energy_source)
    without = f" {len(lack)} of {len(runs)} runs have none: {lack[0]}." if lack else ""
    return f"Energy: {text}from {', '.join(sources)}.{without}"
