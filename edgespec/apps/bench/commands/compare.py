"""`edgespec compare`: a matrix of targets, drafts and kernels on one suite of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from edgespec.apps.bench.commands.bench_options import (
    ACCURACY,
    ReportOutputs,
    SuitePrompts,
    VariantChoice,
)
from edgespec.apps.bench.suites import DEFAULT, load_suite
from edgespec.cli.completion import complete_models
from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import ThreadsOption, WattsOption
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.errors import EdgespecError, UsageError, check_choice, describe_os_error
from edgespec.llama.choices import KernelsChoice
from edgespec.models.hub import format_size
from edgespec.models.store import sha256_of
from edgespec.platform.files import check_folder, read_text_file
from edgespec.platform.kept import QUANTIZED

if TYPE_CHECKING:
    from edgespec.apps.bench.compare import Comparison
    from edgespec.apps.bench.machine import Facts
    from edgespec.apps.bench.measure import BenchSettings
    from edgespec.apps.bench.quantizations import ModelFile


@option_group()
class ModelMatrix:
    """The models, kernels and variants that are combined, and how often they are measured."""

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
    variants: VariantChoice
    rounds: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = 3
    """Default: the fewest rounds whose interval says something."""
    threads: ThreadsOption = None

    def kernels_choices(self) -> list[KernelsChoice]:
        """Return the kernels one by one. Raises UsageError."""
        from edgespec.apps.bench.runs import names_in

        names = names_in(self.kernels, "kernels")
        for name in names:
            check_choice("kernels", name, KernelsChoice)
        return cast("list[KernelsChoice]", names)


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

    def read(self) -> str:
        """Return the text. Raises UsageError."""
        if not self.text:
            return "\n\n".join(prompt.text for prompt in load_suite(DEFAULT).prompts)
        return read_text_file(self.text, "text")


@option_group()
class ComparisonFolder:
    """Where a comparison keeps its raw runs, and whether it resumes from them."""

    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Where raw runs are kept; what was stopped resumes from there."
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
    prompts: SuitePrompts,
    assume_watts: WattsOption = None,
    accuracy: AccuracyOptions,
    folder: ComparisonFolder,
    outputs: ReportOutputs,
) -> int:
    """Measure every pair of targets and drafts, each against its target alone, and their accuracy.

    Each cell has its own process, and its raw runs are written when it ends: after Ctrl-C or a crash run the
    same command again to resume. Cells that cannot run are named with the reason and left out.
    """
    from edgespec.apps.bench.commands.report import write_results
    from edgespec.apps.bench.compare import Comparison
    from edgespec.apps.bench.quantizations import parse_types
    from edgespec.apps.bench.runs import names_in
    from edgespec.platform.machine import default_threads

    outputs.check()
    check_folder(folder.out, "out")
    settings = matrix.variants.settings(prompts)
    targets, drafts = names_in(matrix.targets, "targets"), names_in(matrix.drafts, "drafts")
    _check_drafts(drafts, settings, matrix.variants.variants)
    kernels = matrix.kernels_choices()
    types = parse_types(matrix.quants, "quants") if matrix.quants is not None else []
    suite, text = prompts.suite.load(), accuracy.read()
    models = find_models(targets, drafts, types)
    comparison = Comparison(
        *models,
        kernels,
        suite,
        settings,
        rounds=matrix.rounds,
        n_threads=matrix.threads or default_threads(),
        assume_watts=assume_watts,
        machine=machine_facts(assume_watts),
        folder=folder.out,
    )
    code = _carry_out(comparison, accuracy, text, fresh=folder.fresh)
    outcome = comparison.outcome(
        {
            "accuracy text": str(accuracy.text or DEFAULT),
            "accuracy text sha256": hashlib.sha256(text.encode()).hexdigest(),
            "accuracy text tokens, at most": accuracy.text_tokens,
        }
    )
    write_results(outcome, outputs)
    message(f"raw runs are in {folder.out}")
    _print_made(comparison.targets.values())
    for line in outcome.warnings:
        message(f"warning: {line}")
    return code


def _carry_out(comparison: Comparison, scoring: AccuracyOptions, text: str, *, fresh: bool) -> int:
    """Measure the cells, then the accuracies; return the exit code."""
    again = (
        f"run the same command again{' without --fresh' if fresh else ''} to resume from {comparison.folder}"
    )
    try:
        if fresh:
            comparison.discard()
        if (comparison.folder / "comparison.json").exists():
            message(f"the runs of an earlier version in {comparison.folder} are not read; delete the folder")
        with WorkDisplay() as display:
            comparison.measure(display.show)
            if scoring.accuracy:
                comparison.score(text, scoring.text_tokens, display.show)
            if scoring.problems:
                comparison.solve(scoring.problems, display.show)
    except KeyboardInterrupt:
        message(f"stopped; {again}")
        return INTERRUPTED
    except OSError as error:
        message(f"stopped: {describe_os_error(error)}; {again}")
        return EdgespecError.exit_code
    return 0


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


# ---- the machine and the models ----


def machine_facts(assume_watts: float | None) -> Facts:
    """Return the machine's facts and what measures its energy; this measures the idle power if unknown."""
    from edgespec.apps.bench.machine import facts
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.plugins import part

    with choose_meter(assume_watts=assume_watts, on_message=message) as meter:
        part("energy.know_idle")(meter)
        return {**facts(), "energy": meter.begin().end().source or "unavailable"}


def _print_made(targets: Iterable[ModelFile]) -> None:
    """Print which quantizations were made and are kept, and how they are deleted."""
    if made := [file.path for file in targets if file.path.is_relative_to(QUANTIZED.path())]:
        size = format_size(sum(path.stat().st_size for path in made))
        message(
            f"{len(made)} quantizations ({size}) are kept in {QUANTIZED.path()} for the next comparison; "
            "`edgespec cache clear quantized` deletes them"
        )


def find_models(
    targets: Sequence[str], drafts: Sequence[str], types: Sequence[str]
) -> tuple[dict[str, ModelFile], dict[str, ModelFile | None], dict[str, ModelFile]]:
    """Return targets, drafts (None: a word, not a model) and the sources of quantized targets, by name.

    Pulls missing models, and makes missing quantizations. Raises UsageError and EdgespecError.
    """
    from edgespec.apps.bench.compare import WORDS
    from edgespec.apps.bench.quantizations import ModelFile, model_file

    drafting = [name for name in drafts if name not in WORDS]
    pull_named(*targets, *drafting)
    found = _distinct(_targets(targets, types))
    named = {name: model_file(name) for name in drafting}
    for name, file in named.items():
        if file.name in WORDS:
            problem = f"a draft model cannot be called {file.name}; rename the file"
            raise UsageError(problem, field="drafts", value=name)
    kept = _distinct(named.values())
    names = [named[name].name if name in named else name for name in drafts]
    made_from = [ModelFile(file.made_from, file.source) for file in found.values() if file.source]
    references = {file.name: file for file in made_from if file.name not in found}
    _by_name([*found.values(), *kept.values(), *references.values()])  # refuses two of one name
    return found, {name: kept.get(name) for name in names if name in kept or name in WORDS}, references


def _targets(names: Sequence[str], types: Sequence[str]) -> list[ModelFile]:
    from edgespec.apps.bench.quantizations import model_file, variants

    if not types:
        return [model_file(name) for name in names]
    found: list[ModelFile] = []
    with err.status("quantizing") as status:
        for name in names:
            found += variants(
                name,
                types,
                QUANTIZED.path(),
                on_making=lambda made: status.update(f"quantizing: {made}"),
                on_message=message,
            )
    if not found:
        raise UsageError("none of them is left", field="quants", value=",".join(types))
    return found


def _distinct(files: Iterable[ModelFile]) -> dict[str, ModelFile]:
    """Return the files by name, one of each content; a message names the others. Raises UsageError."""
    found: dict[str, ModelFile] = {}
    with err.status("hashing the models"):
        for file in _by_name(files).values():
            same = found.setdefault(sha256_of(file.path), file)
            if same is not file:
                message(f"{file.name} is the same file as {same.name}: it is measured once")
    return _by_name(found.values())


def _by_name(files: Iterable[ModelFile]) -> dict[str, ModelFile]:
    found: dict[str, ModelFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other.path.resolve() != file.path.resolve():
            raise UsageError(f"two models are called {file.name}: {other.path} and {file.path}; rename one")
    return found
