"""Options of `edgespec draft make` and `draft eval`, and what users write as numbers and sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.groups import option_group
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.apps.forge.builder import TrainingRequest
    from edgespec.apps.forge.data_stage import DataRequest
    from edgespec.apps.forge.evaluation_process import EvaluationSettings

_DATA, _TRAINING, _JUDGING = "What it learns from", "Training", "Judging"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgG]?)([iI]?[bB])?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        help="The model it drafts for: a GGUF file, a name of `edgespec models list`, or hf:...",
        show_default="the default pair's",
        autocompletion=complete_model,
    ),
]


@option_group()
class MakeOptions:
    """The draft that is made."""

    target: TargetOption = None
    name: Annotated[
        str | None, typer.Option(help="What it is to be called.", show_default="TARGET-head-TYPE")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Keep it though it is no better, and replace one of that name.")
    ] = False


@option_group(_DATA)
class DataOptions:
    """The texts that the target writes."""

    data_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens that the target is to have written, such as 200k; what it wrote for earlier drafts "
            "counts, but not with --prompts and --from-history.",
            show_default="200k for each hour of training, at least 20k",
        ),
    ] = None
    answer_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of each of its answers.")] = 400
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Most disk space for these texts and the target's hidden states along them."
        ),
    ] = "2GB"
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts or texts like yours, in addition to the built-in prompts; may be repeated.",
            show_default=False,
        ),
    ] = None
    from_history: Annotated[
        bool,
        typer.Option(
            "--from-history",
            help="Also your own earlier prompts (`edgespec cache info`). They stay on this machine.",
        ),
    ] = False

    def request(self, training: TrainingRequest) -> DataRequest:
        """The texts that are asked of the target. Raises UsageError."""
        from edgespec.apps.forge.data_stage import DataRequest, default_tokens

        tokens = self.data_tokens
        return DataRequest(
            tokens=default_tokens(training) if tokens is None else count(tokens, "data_tokens"),
            n_predict=self.answer_tokens,
            budget=size(self.budget, "budget"),
            prompts=tuple(self.prompts or ()),
            from_history=self.from_history,
        )


@option_group(_TRAINING)
class TrainingOptions:
    """The training, and the drafts that are made of it."""

    hours: Annotated[
        float | None,
        typer.Option(
            metavar="H",
            help="Hours of training.",
            show_default="2",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Instead of hours: tokens of training, such as 1M.", show_default=False
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="The head that the training of a head starts from, such as one from another machine.",
            show_default="the last training's, or the best",
            autocompletion=complete_model,
        ),
    ] = None
    keep: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the draft can say.", show_default="16384, or all")
    ] = None
    types: Annotated[str, typer.Option(help="Quantizations to try, with commas.")] = "q4_0,q8_0"

    def request(self) -> TrainingRequest:
        """Return how a head is trained. Raises UsageError."""
        from edgespec.apps.forge.builder import TrainingRequest
        from edgespec.models.quantizations import parse_types

        if self.hours is not None and self.tokens is not None:
            raise UsageError("--hours and --tokens contradict each other: choose one")
        tokens = None if self.tokens is None else count(self.tokens, "tokens")
        return TrainingRequest(
            hours=(2.0 if self.hours is None else self.hours) if tokens is None else None,
            tokens=tokens,
            start=self.start,
            keep=self.keep,
            types=tuple(parse_types(self.types, "types")),
        )


@option_group(_JUDGING)
class EvaluationOptions:
    """Length of an evaluation."""

    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 3
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", min=2, help="Tokens of an answer.")] = 64

    def settings(self, n_prompts: int, threads: int | None, kernels: str) -> EvaluationSettings:
        """Return them as the judge wants them."""
        from edgespec.apps.forge.evaluation_process import EvaluationSettings

        off = kernels == "off"
        return EvaluationSettings(self.n_predict, self.rounds, n_prompts, threads, "off" if off else "auto")


def count(text: str, field: str) -> int:
    """Return a number as users write it, such as 1M, 200k or 5000. Raises UsageError."""
    found = _NUMBER.fullmatch(text.strip())
    if not found or found[3]:
        raise UsageError("must be a number, such as 5000, 200k or 1M", field=field, value=text)
    return int(float(found[1]) * 1000.0 ** _POWERS[found[2].lower()])


def size(text: str, field: str) -> int:
    """Return the bytes of a size as users write it, such as 2GB, 500M or 1.5GiB. Raises UsageError."""
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        raise UsageError("must be a size, such as 500MB or 2GB", field=field, value=text)
    base = 1024.0 if found[3] and found[3][0] in "iI" else 1000.0
    return int(float(found[1]) * base ** _POWERS[found[2].lower()])
