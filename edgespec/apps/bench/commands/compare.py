"""`edgespec compare`: a matrix of targets, drafts and kernels on one suite of prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.bench.commands.bench_options import (
    ACCURACY,
    ReportOutputs,
    SuitePrompts,
    VariantChoice,
)
from edgespec.cli.completion import complete_models
from edgespec.cli.console import message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import ThreadsOption, WattsOption, read_text
from edgespec.errors import UsageError, check_choice
from edgespec.llama.choices import KernelsChoice
from edgespec.models.suites import DEFAULT, load_suite
from edgespec.platform.files import check_folder

if TYPE_CHECKING:
    from edgespec.apps.bench.bench import BenchSettings
    from edgespec.apps.bench.commands.compare_runs import ScoringOptions


@option_group()
class ModelMatrix:
    """The models and kernels that are combined."""

    targets: Annotated[
        str,
        typer.Option(
            metavar="A,B,...", help="Models that decide, with commas.", autocompletion=complete_models
        ),
    ]
    drafts: Annotated[
        str,
        typer.Option(
            metavar="C,D,...",
            help="Models that draft, with commas; none: the target alone, suffix: drafts without a model, "
            "mtp: the head in the target's own file.",
            autocompletion=complete_models,
        ),
    ]
    quants: Annotated[
        str | None,
        typer.Option(
            metavar="q4_0,...",
            help="Each target in these quantizations; missing ones are made.",
            show_default="the targets as they are",
        ),
    ] = None
    kernels: Annotated[str, typer.Option(metavar="auto,off", help="Kernels, with commas, as in `run`.")] = (
        "auto"
    )

    def kernels_choices(self) -> list[KernelsChoice]:
        """Return the kernels one by one. Raises UsageError."""
        chosen: list[KernelsChoice] = []
        for name in names_in(self.kernels, "kernels"):
            check_choice("kernels", name, KernelsChoice)
            chosen.append(name)  # type: ignore[arg-type] # one of them, as just checked
        return chosen


@option_group()
class CompareMeasuring:
    """The measurement of each combination, and how often it is repeated."""

    variants: VariantChoice
    rounds: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = 3
    """Default: the fewest rounds whose interval says something."""
    threads: ThreadsOption = None


@option_group(ACCURACY)
class AccuracyOptions:
    """The accuracy of the targets' answers, as far as it is measured."""

    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy/--no-accuracy",
            help="Compare each quantization's answers with the best one's, on a text.",
        ),
    ] = True
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text.", show_default="the default suite's prompts"),
    ] = None
    text_tokens: Annotated[int, typer.Option(min=512, help="Tokens of it, at most.")] = 1024
    """At least one window of `benchmark.accuracy`; by default two."""
    problems: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Arithmetic problems that each target answers too: the share that is exactly right.",
            show_default="none",
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""
        for options, both in {
            "--problems with --no-accuracy": bool(self.problems) and not self.accuracy,
            "--text with --no-accuracy": self.text is not None and not self.accuracy,
        }.items():
            if both:
                raise UsageError(f"{options}: contradictory; add or leave out one of them")

    def scoring(self) -> ScoringOptions:
        """Return what this means, with its text read. Raises UsageError."""
        from edgespec.apps.bench.accuracy import arithmetic
        from edgespec.apps.bench.commands.compare_runs import ScoringOptions

        problems = arithmetic(self.problems or 0)
        name = str(self.text) if self.text else DEFAULT
        return ScoringOptions(self.accuracy, name, self._read(), self.text_tokens, problems)

    def _read(self) -> str:
        if not self.text:
            return "\n\n".join(prompt.text for prompt in load_suite(DEFAULT).prompts)
        return read_text(self.text)


@option_group()
class ComparisonFolder:
    """Folder of a comparison."""

    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Where raw runs are kept; there it goes on if stopped."
        ),
    ] = Path("edgespec-compare")
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is in DIR.")] = False


@shown(
    "Measure",
    "edgespec compare --targets qwen2.5-coder-1.5b-q4_k_m --quants q4_0,q4_k_m "
    "--drafts qwen2.5-coder-0.5b-q4_0,none",
)
@grouped
def compare_command(
    *,
    matrix: ModelMatrix,
    measuring: CompareMeasuring,
    prompts: SuitePrompts,
    assume_watts: WattsOption = None,
    accuracy: AccuracyOptions,
    folder: ComparisonFolder,
    outputs: ReportOutputs,
) -> int:
    """Measure every pair of targets and drafts, each against its target alone, and their accuracy.

    Each cell has its own process, and its raw runs are written when it ends: after Ctrl-C or a crash the
    same command goes on. Cells that cannot run are named with the reason and left out.
    """
    from edgespec.apps.bench.clients import prompts_for
    from edgespec.apps.bench.commands import compare_runs as runs
    from edgespec.apps.bench.compare import ComparisonPlan
    from edgespec.models.quantizations import parse_types
    from edgespec.platform.cpu import default_threads

    outputs.check()
    check_folder(folder.out, "out")
    accuracy.check()
    settings = measuring.variants.settings(prompts)
    targets, drafts = names_in(matrix.targets, "targets"), names_in(matrix.drafts, "drafts")
    _check_drafts(drafts, settings, measuring.variants.variants)
    kernels = matrix.kernels_choices()
    types = parse_types(matrix.quants, "quants") if matrix.quants is not None else []
    suite = prompts.suite.load()
    scoring = accuracy.scoring()
    asked = suite.interleaved()
    if settings.clients:
        asked = tuple(prompts_for(asked, settings.clients))
    models = runs.find_models(targets, drafts, types)
    machine = runs.machine_facts(assume_watts)
    plan = ComparisonPlan(
        models=models.facts(),
        combinations=models.combinations(kernels),
        prompts=asked,
        settings=settings,
        rounds=measuring.rounds,
        n_threads=measuring.threads or default_threads(),
        assume_watts=assume_watts,
        machine={name: machine[name] for name in runs.IDENTITY if name in machine},
    )
    compare = runs.RunningComparison(plan, models, scoring, folder.out, fresh=folder.fresh)
    code = compare.run(kernels)
    outcome = compare.outcome(suite, machine)
    outputs.write(outcome)
    message(f"raw runs are in {folder.out}")
    models.tell_of_made()
    for line in outcome.warnings:
        message(f"warning: {line}")
    return code


def _check_drafts(drafts: list[str], settings: BenchSettings, variants: str) -> None:
    """Raise UsageError if a draft would be measured in no variant, or a variant with no draft."""
    from edgespec.apps.bench.compare import MTP, NO_DRAFT, Combination

    if MTP not in drafts and any(variant.drafter == MTP for variant in settings.variants):
        raise UsageError(
            f"--variants {variants}: for the head in the target's own file, add {MTP} to --drafts"
        )
    for draft in drafts:
        if draft != NO_DRAFT and not Combination("", draft, "auto").restrict(settings).variants:
            raise UsageError(f"--drafts {draft} and --variants {variants}: none of them can use it; add auto")


def names_in(text: str, field: str) -> list[str]:
    """Return the names in `text`, with commas, the value of `field`. Raises UsageError."""
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    if not names:
        raise UsageError("name at least one", field=field)
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"{twice[0]} is named twice", field=field)
    return names
