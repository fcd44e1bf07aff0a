"""Reports of `edgespec draft make` and `draft eval`: tables, and JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table

from edgespec.apps.bench.summary import VariantComparison
from edgespec.apps.forge.evaluation import CandidateResult, DraftEvaluation
from edgespec.apps.forge.make import LEAST_GAIN, MakeResult
from edgespec.cli.console import out, print_table
from edgespec.cli.made_drafts import acceptance_text, described, sources_text
from edgespec.models.draft_records import best_first, draft_records
from edgespec.models.sources import format_size


def print_made(made: MakeResult) -> None:
    """Print what was judged, and what became of the best."""
    out.print(f"for {made.target_name}, from {sources_text(made.texts)}")
    if made.guard:
        out.print(str(made.guard))
        if made.kept is None:
            out.print(
                f"nothing is replaced: {made.beaten} stays, until more is accepted on your texts and hardly "
                "less on the built-in ones, of all of the training or of a part; --force keeps the new one"
            )
            return
    rows = [(one.candidate.name, one) for one in made.candidates]
    if made.before:
        rows.insert(0, (f"{made.before.candidate.name} (there now)", made.before))
    print_table(_table(rows))
    faster = "faster" if made.gain >= 0 else "slower"
    verdict = f"{made.best} is {abs(made.gain):.1%} {faster} than {made.beaten}"
    if made.kept is None:
        out.print(
            f"nothing is kept: {verdict}, and less than {LEAST_GAIN:.0%} is not told from noise; "
            "--force keeps it"
        )
        return
    out.print(verdict)
    out.print(f"kept: {made.path}")
    rivals = best_first(one for one in draft_records() if one.target_sha256 == made.kept.target_sha256)
    used = rivals[0].name if rivals else made.kept.name
    when = "from now on" if used == made.kept.name else f"with --draft {made.kept.name}; else {used} does"
    out.print(f"it drafts for {made.target_name} {when}; `edgespec draft remove {made.kept.name}` removes it")


def made_document(made: MakeResult) -> dict[str, Any]:
    """Return all that came of it, raw runs too, as JSON has it."""
    trained = {
        "n_tokens": made.trained.n_tokens,
        "hours": made.trained.hours,
        "acceptance": made.trained.acceptance.by_position,
        "curve": [(n, seconds / 3600, one.by_position) for n, seconds, one in made.trained.history],
    }
    return {
        "target": made.target_name,
        "texts": made.texts,
        "before": made.before and _document(made.before),
        "candidates": [
            {"label": one.candidate.name, "trained": trained, **_document(one)} for one in made.candidates
        ],
        "best": made.best,
        "beaten": made.beaten,
        "gain": made.gain,
        "share": made.share,
        "guard": made.guard and msgspec.to_builtins(made.guard),
        "kept": made.kept and described(made.kept),
        "path": str(made.path) if made.path else None,
    }


def print_evaluated(found: DraftEvaluation) -> None:
    """Print the figures of a draft and of the target's other one."""
    out.print(f"for {found.target_name}")
    rows = [(one.candidate.name, one) for one in (found.draft, found.other) if one]
    print_table(_table(rows))


def evaluated_document(found: DraftEvaluation) -> dict[str, Any]:
    """Return an evaluation as the object that --json prints: figures and raw runs of both drafts."""
    return {
        "target": found.target_name,
        "draft": _document(found.draft),
        "other": found.other and _document(found.other),
    }


def _table(rows: list[tuple[str, CandidateResult]]) -> Table:
    table = Table("draft", box=None, pad_edge=False)
    for title in ("size", "c", "accepted", "greedy", "95% of it", "at 0.8", "95% of it", "rounds"):
        table.add_column(title, justify="right")
    for name, one in rows:
        timing = one.timing
        table.add_row(
            name,
            format_size(one.size) if one.size else "-",
            *((f"{timing.cost_ratio:.2f}", acceptance_text(timing.acceptance)) if timing else ("-", "-")),
            *(f"{one.gains.greedy:.2f}x", _interval(one.greedy)),
            *(f"{one.gains.sampled:.2f}x", _interval(one.sampled)),
            str(one.rounds),
        )
    return table


def _interval(comparison: VariantComparison) -> str:
    found = comparison.speedup
    return f"{found.low:.2f}-{found.high:.2f}" if found and found.low and found.high else "-"


def _document(judged: CandidateResult) -> dict[str, Any]:
    timing = judged.timing
    return {
        "name": judged.candidate.name,
        "size": judged.size,
        "cost_ratio": timing and timing.cost_ratio,
        "acceptance": list(timing.acceptance) if timing else None,
        "greedy": msgspec.to_builtins(judged.greedy.speedup),
        "sampled": msgspec.to_builtins(judged.sampled.speedup),
        "rounds": judged.rounds,
        "runs": msgspec.to_builtins(judged.runs),
    }
