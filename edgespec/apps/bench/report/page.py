"""Builds the report's page: one HTML file without scripts that loads nothing from elsewhere.

Names in it come from users, model files and suites, so `elements.escaped` escapes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from edgespec.apps.bench.report import rows as words
from edgespec.apps.bench.report import throughput
from edgespec.apps.bench.report.charts import charts
from edgespec.apps.bench.report.drawing import Chart, svg
from edgespec.apps.bench.report.elements import card, details, escaped, section, table
from edgespec.apps.bench.report.rows import NOT_APPLICABLE, NOT_EXACT, UNAVAILABLE, ReportData, Row
from edgespec.apps.bench.runs import AccuracyScore, Cell, Run
from edgespec.apps.bench.summary import CategorySummary

_MOST_RUNS = 400
"""Most raw runs on the page, to keep it small; the JSON has them all."""

_HOW = (
    "Every prompt is answered by each variant in turn, in rounds, so that what slows the machine for a "
    "while slows all variants alike. A speed-up is the median of the ratios of such pairs, whole generations "
    "a token, prefill included; its 95 % interval is bootstrapped over prompts and rounds, over rounds alone "
    "where there is one prompt, and too narrow with fewer than eight prompts. Formulas and sources are in "
    "docs/measuring.md."
)


def page(reading: ReportData) -> str:
    """Return the page of an outcome."""
    outcome = reading.outcome
    title = escaped(words.title(outcome))
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        f"<header><p class=kind>edgespec {escaped(outcome.kind)}</p><h1>{title}</h1>",
        f"<p class=date><time>{escaped(outcome.date)}</time></p></header>",
        _headline(reading),
        _warnings(outcome.warnings),
        section("Results", _results(reading) + _skipped(reading.skipped)),
        section("Charts", _charts(charts(reading))),
        section("By category", _categories(reading)),
        section("What was measured, and on what", _facts(reading)),
        section("How it was measured", f"<p>{escaped(throughput.HOW if reading.curves else _HOW)}</p>"),
        section("Raw runs", _runs(reading)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>edgespec: {title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# ---- the top of the page ----


def _headline(reading: ReportData) -> str:
    if reading.curves:
        lead, *others = throughput.sentences(reading)
    else:
        lead = words.headline(reading)
        others = [*words.lossy_lines(reading), words.identical_line(reading), words.energy_line(reading)]
    below = "\n".join(f"<p>{escaped(line)}</p>" for line in others)
    return f"<section class=headline><p class=lead>{escaped(lead)}</p>\n{below}</section>"


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    lines = "".join(f"<li>{escaped(line)}</li>" for line in warnings)
    return f"<section class=warnings role=note><h2>Warnings</h2><ul>{lines}</ul></section>"


def _results(reading: ReportData) -> str:
    if reading.curves:
        return "".join(
            f"<h3>{escaped(curve.cell.name)}</h3>\n"
            + table(throughput.COLUMNS, map(throughput.figures, curve.points), curve.cell.name)
            for curve in reading.curves
        )
    if not reading.rows:
        return "<p>Nothing ran.</p>\n"
    columns = [
        ("row", True),
        ("target", False),
        ("draft", False),
        ("kernels", False),
        ("variant", False),
        *_variant_columns(reading),
        ("peak memory", True),
        *((name, True) for name in _lossy_columns(reading)),
        *_accuracy_columns(reading),
    ]
    rows = (
        [
            str(row.number),
            row.cell.target,
            row.draft,
            row.kernels,
            row.variant_name,
            *_variant_figures(reading, row),
            words.megabytes(row.peak_rss_bytes),
            *_lossy_figures(reading, row),
            *_accuracy_figures(reading, row.accuracy),
        ]
        for row in reading.rows
    )
    note = (
        "tokens/s: of decoding. Speed-up: of whole generations over plain decoding, the median of the ratios "
        "of pairs (not the ratio of medians), with its 95 % interval. TTFT: time to the first token. tau: "
        "tokens a step. alpha: accepted / tested. Beside: the quantization that KL and top-1 are against."
    )
    return table(columns, rows, "Results") + f"<p class=note>{escaped(note)}</p>\n"


def _variant_columns(reading: ReportData) -> list[tuple[str, bool]]:
    names = ["tokens/s", "speed-up [95 %]", "TTFT, ms", "tau", "alpha"]
    names += ["J/token, gross", "J/token, net", "J s"] if reading.energy else ["J/token"]
    return [(name, True) for name in (*names, "identical")]


def _variant_figures(reading: ReportData, row: Row) -> list[str]:
    """Return the cells below `_variant_columns`."""
    variant, comparison = row.variant, row.comparison
    texts = [
        words.fixed(variant.decode_tokens_per_s, 1),
        words.with_interval(comparison.speedup) if comparison else NOT_APPLICABLE,
        words.milliseconds(variant.ttft_s),
        words.rate(variant, variant.tau),
        words.rate(variant, variant.alpha),
        words.joules(variant.joules_per_token, variant),
    ]
    if reading.energy:
        texts += [
            words.joules(variant.net_joules_per_token, variant),
            words.joules(variant.joule_seconds, variant),
        ]
    return [*texts, words.identical(comparison)]


def _lossy_columns(reading: ReportData) -> list[str]:
    names = ["target saw", "target's best", "KL from target"]
    if any(row.solved for row in reading.rows):
        names.append("exact match, not exact")
    return names if any(not row.variant.exact for row in reading.rows) else []


def _lossy_figures(reading: ReportData, row: Row) -> list[str]:
    """Return the cells below `_lossy_columns`."""
    variant, n = row.variant, len(_lossy_columns(reading))
    if variant.exact:
        return [NOT_APPLICABLE] * n
    texts = [
        f"{100 * variant.target_share:.0f} %",
        UNAVAILABLE if variant.agreement is None else f"{100 * variant.agreement:.1f} %",
        words.fixed(variant.kl, 4),
        (words.passed(row.solved) if row.solved else None) or UNAVAILABLE,
    ]
    return texts[:n]


def _accuracy_columns(reading: ReportData) -> list[tuple[str, bool]]:
    if not reading.outcome.accuracy:
        return []
    names = ["perplexity", "KL, nats/token", "top-1", "beside"]
    if any(words.passed(accuracy) for accuracy in reading.outcome.accuracy):
        names.append("exact match")
    return [(name, True) for name in names]


def _accuracy_figures(reading: ReportData, accuracy: AccuracyScore | None) -> list[str]:
    """Return the cells below `_accuracy_columns`."""
    n = len(_accuracy_columns(reading))
    if accuracy is None:
        return [UNAVAILABLE] * n  # of another program, or of a variant that is not exact
    reference = accuracy.kl is None
    texts = [
        f"{accuracy.perplexity:.3f}",
        "reference" if reference else words.with_error(accuracy),
        "reference"
        if reference
        else UNAVAILABLE
        if accuracy.top1 is None
        else f"{100 * accuracy.top1:.1f} %",
        NOT_APPLICABLE if reference else accuracy.reference,
        words.passed(accuracy) or UNAVAILABLE,
    ]
    return texts[:n]


def _skipped(skipped: Sequence[Cell]) -> str:
    if not skipped:
        return ""
    columns = [("target", False), ("draft", False), ("kernels", False), ("why", False)]
    rows = ([cell.target, cell.draft or NOT_APPLICABLE, cell.kernels, cell.skipped] for cell in skipped)
    return "<h3>Skipped</h3>\n" + table(columns, rows, "Skipped combinations")


# ---- charts ----


def _charts(found: Sequence[Chart]) -> str:
    """Return the charts as cards, and below them why other charts are left out."""
    drawn = "\n".join(_figure(chart, svg(chart.key, chart.draw)) for chart in found if chart.draw)
    left_out = "".join(
        f"<p class=note><strong>{escaped(chart.title)}.</strong> {escaped(chart.caption)}</p>\n"
        for chart in found
        if not chart.draw
    )
    return (f"<div class=cards>\n{drawn}\n</div>\n" if drawn else "") + left_out


def _figure(chart: Chart, picture: str) -> str:
    return (
        f'<figure class=card>\n<h3 id="{chart.key}-title">{escaped(chart.title)}</h3>\n{picture}'
        f'<figcaption id="{chart.key}-caption">{escaped(chart.caption)}</figcaption>\n</figure>'
    )


# ---- details ----


def _categories(reading: ReportData) -> str:
    opened = len(reading.cells) == 1
    parts = []
    for cell, _ in reading.cells:
        own = [row for row in reading.rows if row.cell is cell]
        first, last = own[0].number, own[-1].number
        names = f"Row{'s' if last > first else ''} {first}{f' to {last}' if last > first else ''}"
        parts.append(details(f"{names}: {cell.name}", _category_table(reading, own), opened=opened))
    return "".join(parts)


def _category_table(reading: ReportData, own: Sequence[Row]) -> str:
    columns = [("category", False), ("variant", False), ("prompts", True), *_variant_columns(reading)]
    lines = []
    for summary in own[0].categories:
        for row in own:
            lines.append(_category_line(reading, summary, row))
    return table(columns, [line for line in lines if line], f"{own[0].cell.target} by category")


def _category_line(reading: ReportData, summary: CategorySummary, row: Row) -> list[str]:
    found = row.of_category(summary.category)
    if found is None:
        return []
    there = Row(row.number, row.cell, found[0], found[1], (), row.accuracy)
    return [summary.category, row.variant_name, str(summary.n_prompts), *_variant_figures(reading, there)]


def _facts(reading: ReportData) -> str:
    outcome = reading.outcome
    parts = [
        card("Machine and versions", outcome.machine),
        card("Settings", outcome.settings),
        card("Suite", outcome.suite),
    ]
    columns = [("model", False), ("file", False), ("size", True), ("quantization", False), ("SHA-256", False)]
    rows = [
        [
            model.name,
            model.file + (f", made from {model.made_from}" if model.made_from else ""),
            f"{model.size / 1e6:.0f} MB",
            model.quantization or "not said",
            model.sha256,
        ]
        for model in outcome.models.values()
    ]
    return f"<div class=cards>\n{''.join(parts)}</div>\n" + (table(columns, rows, "Models") if rows else "")


def _runs(reading: ReportData) -> str:
    runs = [(cell, run) for cell, _ in reading.cells for run in cell.runs]
    if not runs:
        return ""
    if len(runs) > _MOST_RUNS:
        return f"<p>{len(runs)} runs: too many for a page. The JSON output has them all.</p>\n"
    columns = [
        *((name, False) for name in ("prompt", "category", "target", "draft", "kernels", "variant")),
        *(
            (name, True)
            for name in ("round", "prompt tokens", "tokens", "total, s", "TTFT, s", "tokens/s", "J")
        ),
        ("stopped by", False),
    ]
    return details(
        f"{len(runs)} runs", table(columns, (_run(*one) for one in runs), "Raw runs"), opened=False
    )


def _run(cell: Cell, run: Run) -> list[str]:
    joules = run.energy.joules if run.energy else None
    estimated = " (estimated)" if run.energy and joules is not None and run.energy.estimated else ""
    return [
        run.prompt,
        run.category,
        cell.target,
        cell.draft or NOT_APPLICABLE,
        cell.kernels,
        run.variant if run.exact else f"{run.variant} {NOT_EXACT}",
        str(run.round),
        str(run.prompt_tokens),
        str(run.tokens),
        words.fixed(run.total_s, 3),
        words.fixed(run.ttft_s, 3),
        words.fixed(run.decode_tokens_per_s, 1),
        words.significant(joules) + estimated,
        run.stop_reason or UNAVAILABLE,
    ]
