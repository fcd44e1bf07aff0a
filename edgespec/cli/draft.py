"""`edgespec draft`: making a draft for this machine out of a small model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import message, out, print_table
from edgespec.cli.groups import grouped
from edgespec.cli.options import Compute
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.models.sources import format_size

if TYPE_CHECKING:
    from edgespec.forge.drafts import Made
    from edgespec.forge.speedup import MeasuredDraft, SpeedUp

draft_app = typer.Typer(
    no_args_is_help=True,
    help="Make drafts: smaller, faster models that propose for a larger one.",
    epilog="Example: edgespec draft make qwen2.5-coder-0.5b-q4_0",
)


@draft_app.callback()
def _drafts() -> None:
    """Keep `make` a command of its own while it is the only one."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """What the draft is made for and of, and how it is chosen."""

    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="The model it drafts for.",
            show_default="its pair's",
            autocompletion=complete_model,
        ),
    ] = None
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text like those the target writes, or prompts (.jsonl).",
            show_default="the history, and edgespec's own prompts",
        ),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that the output vocabulary keeps.",
            show_default="as few as cover 99.5% of unseen text",
        ),
    ] = None
    types: Annotated[
        str, typer.Option(help="Quantizations to try beside SOURCE's own, with commas; none for no other.")
    ] = "q4_0,q8_0"
    name: Annotated[
        str | None, typer.Option(help="What it is to be called.", show_default="SOURCE-TYPE-cutN")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Keep it though it is no better, and replace one of that name.")
    ] = False
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", min=1, max=64, help="Tokens of the target's answers.")
    ] = 48
    budget: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds of timing for SOURCE and for each candidate.")
    ] = 20.0


@draft_app.command("make", epilog="Example: edgespec draft make qwen2.5-coder-0.5b-q4_0 --corpus notes.txt")
@grouped
def make_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A small model: a GGUF file, a registry name, or hf:...", autocompletion=complete_model
        ),
    ],
    *,
    making: Making,
    compute: Compute,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Make the fastest useful draft of SOURCE for this machine, and keep it if it is better than SOURCE.

    Its output vocabulary is cut to tokens that texts use, and its quantization chosen by what its passes
    take and how often the target agrees. The text stays the target's, exactly. Takes some minutes.
    """
    from edgespec.forge.corpus import check_corpus
    from edgespec.forge.drafts import Request, make, target_for
    from edgespec.models.quantizations import parse_types
    from edgespec.platform.signals import SignalPipe

    request = Request(
        source=source,
        target=making.target or target_for(source),
        corpus=making.corpus,
        keep=making.keep,
        types=() if making.types.strip() == "none" else tuple(parse_types(making.types, "types")),
        name=making.name,
        force=making.force,
        n_threads=compute.threads,
        kernels=compute.kernels,
        n_predict=making.n_predict,
        budget_s=making.budget,
    )
    if making.corpus is not None:
        check_corpus(making.corpus)  # before a model is pulled
    pull_named(request.target, source)
    with SignalPipe() as signals, WorkDisplay() as display:
        made = make(request, on_progress=display.show, on_message=message, signals=signals)
    worst = max((made.source, *made.candidates), key=lambda one: one.passes.spread)
    for line in worst.passes.warnings:
        message(line.replace("edgespec profile", "this"))
    if json:
        out.print_json(data=_document(made))
    else:
        _print(made)


def _print(made: Made) -> None:

    from edgespec.forge.drafts import LEAST_GAIN

    selection = made.selection
    n_kept = len(selection.token_ids)
    covered = (
        "" if selection.coverage is None else f", {selection.coverage:.2%} of text it was not chosen from"
    )
    out.print(f"for {made.target_name}; vocabulary cut to {n_kept:,} tokens{covered}", markup=False)
    out.print(f"corpus: {made.corpus.what}, {made.corpus.n_tokens:,} tokens", markup=False)
    table = Table("draft", box=None, pad_edge=False)
    for title in ("size", "a pass reads", "T(1) ms", "T(2)", "T(4)", "agreement", "overlap"):
        table.add_column(title, justify="right")
    for title in ("speed-up at temp 0", "at temp 1"):
        table.add_column(title, justify="right")
    for one in (made.source, *made.candidates):
        table.add_row(
            one.name,
            format_size(one.size),
            format_size(one.pass_bytes),
            *(f"{1e3 * seconds:.1f}" for seconds in one.seconds().values()),
            f"{one.acceptance.agreement:.1%}",
            f"{one.acceptance.overlap:.1%}",
            _speed_up(one.greedy),
            _speed_up(one.sampled),
        )
    print_table(table)
    verdict = f"{made.best.name} is expected {abs(made.gain):.1%} {'faster' if made.gain >= 0 else 'slower'}"
    if made.kept is None:
        out.print(
            f"nothing is kept: {verdict} than {made.source.name}, and less than {LEAST_GAIN:.0%} is not told "
            "from noise; --force keeps it",
            markup=False,
        )
        return
    out.print(f"{verdict} than {made.source.name}", markup=False)
    out.print(f"kept: {made.kept}", markup=False)
    out.print(f"use it with --draft {made.kept.stem}", markup=False)


def _speed_up(found: SpeedUp) -> str:
    return f"{found.factor:.2f}x (gamma {found.gamma})"


def _document(made: Made) -> dict[str, Any]:
    return {
        "target": made.target_name,
        "corpus": {"from": made.corpus.what, "tokens": made.corpus.n_tokens},
        "vocabulary": {
            "kept": len(made.selection.token_ids),
            "seen": made.selection.n_seen,
            "coverage": made.selection.coverage,
        },
        "source": _model(made.source),
        "candidates": [_model(one) for one in made.candidates],
        "best": made.best.name,
        "gain": made.gain,
        "name": made.kept.stem if made.kept else None,
        "path": str(made.kept) if made.kept else None,
    }


def _model(one: MeasuredDraft) -> dict[str, Any]:
    return {
        "name": one.name,
        "tokens": one.n_kept,
        "size": one.size,
        "pass_bytes": one.pass_bytes,
        "seconds": {str(n): seconds for n, seconds in one.seconds().items()},
        "spread": one.passes.spread,
        "agreement": one.acceptance.agreement,
        "overlap": one.acceptance.overlap,
        "greedy": one.greedy._asdict(),
        "sampled": one.sampled._asdict(),
    }
