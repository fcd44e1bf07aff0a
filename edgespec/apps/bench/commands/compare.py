"""`edgespec compare`: a matrix of targets, drafts and kernels on one suite of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.bench.commands.bench_options import (
    ACCURACY,
    ReportOutputs,
    SuitePrompts,
    VariantChoice,
)
from edgespec.apps.bench.suites import DEFAULT, Suite, load_suite
from edgespec.cli.completion import complete_models
from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import ThreadsOption, WattsOption
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.errors import EdgespecError, UsageError, check_choice, describe_os_error
from edgespec.llama.choices import KernelsChoice
from edgespec.models.hashes import sha256_of
from edgespec.models.sources import format_size
from edgespec.platform.files import check_folder, read_text_file
from edgespec.platform.kept import QUANTIZED

if TYPE_CHECKING:
    from edgespec.apps.bench.compare import Combination, Comparison
    from edgespec.apps.bench.measure import BenchSettings
    from edgespec.apps.bench.runs import AccuracyScore, BenchmarkOutcome, ProblemsSolved
    from edgespec.models.quantizations import ModelFile


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
        from edgespec.apps.bench.variants import names_in

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

    def read(self) -> str:
        """Return the text. Raises UsageError."""
        if not self.text:
            return "\n\n".join(prompt.text for prompt in load_suite(DEFAULT).prompts)
        return read_text_file(self.text, "text")


@option_group()
class ComparisonFolder:
    """Where a comparison keeps its raw runs, and whether it goes on with them."""

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
    from edgespec.apps.bench.commands.tables import write_results
    from edgespec.apps.bench.compare import Comparison, ComparisonPlan
    from edgespec.apps.bench.variants import names_in
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
    text = accuracy.read()
    models = find_models(targets, drafts, types)
    machine = machine_facts(assume_watts)
    plan = ComparisonPlan(
        files=models.files,
        combinations=models.combinations(kernels),
        prompts=suite.interleaved(),
        settings=settings,
        rounds=measuring.rounds,
        n_threads=measuring.threads or default_threads(),
        assume_watts=assume_watts,
        machine={name: machine[name] for name in IDENTITY if name in machine},
    )
    if folder.fresh:
        Comparison.discard(folder.out)
    with err.status("hashing the models"):
        comparison = Comparison(plan, folder.out)
    compare = RunningComparison(comparison, models, accuracy, text, folder)
    code = compare.run(kernels)
    outcome = compare.outcome(suite, machine)
    write_results(outcome, outputs)
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


# ---- the work ----

IDENTITY = ("processor", "usable processors", "energy", "edgespec", "llama-cpp-python", "llama.cpp")
"""Facts of the machine that must be equal for all runs of one table."""


def machine_facts(assume_watts: float | None) -> dict[str, str | int | float]:
    """Return the machine's facts and what measures its energy; this measures the idle power if unknown."""
    from edgespec.apps.bench.machine import facts
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.plugins import part

    with choose_meter(assume_watts=assume_watts, on_message=message) as meter:
        part("energy.know_idle")(meter)
        return {**facts(), "energy": meter.begin().end().source or "unavailable"}


class RunningComparison:
    """A running comparison: its cells are stored in the folder, the accuracies in this object."""

    def __init__(
        self,
        comparison: Comparison,
        models: ComparisonModels,
        scoring: AccuracyOptions,
        text: str,
        folder: ComparisonFolder,
    ) -> None:
        """Continue what is in the folder; `text`: what `scoring` read."""
        self._comparison, self._models, self._folder = comparison, models, folder
        self._scoring, self._text = scoring, text
        self._accuracies: list[AccuracyScore] = []
        self._solved: list[ProblemsSolved] = []
        self._warnings: list[str] = []

    def run(self, kernels: Sequence[KernelsChoice]) -> int:
        """Measure the cells, then the accuracies with each of `kernels`; return the exit code."""
        fresh = " without --fresh" if self._folder.fresh else ""
        again = f"the same command{fresh} goes on with what is in {self._folder.out}"
        try:
            with WorkDisplay() as display:
                self._comparison.measure(display.show)
            if self._scoring.accuracy:
                for choice in kernels:
                    self._score(choice, solves=choice == kernels[0])
        except KeyboardInterrupt:
            message(f"stopped; {again}")
            return INTERRUPTED
        except OSError as error:
            message(f"stopped: {describe_os_error(error)}; {again}")
            return EdgespecError.exit_code
        return 0

    def _score(self, kernels: KernelsChoice, *, solves: bool) -> None:
        """Score the targets on the text, and with `solves` on the problems too."""
        from edgespec.apps.bench.accuracy import TargetAccuracy, arithmetic

        scoring, plan = self._scoring, self._comparison.plan
        cells, _ = self._comparison.results()
        with WorkDisplay() as display:
            targets = TargetAccuracy(
                self._folder.out,
                self._models.targets,
                self._comparison.models,
                kernels,
                plan.n_threads,
                display.show,
                self._warnings.append,
                self._models.references,
            )
            found = targets.texts(self._text, scoring.text_tokens)
            if scoring.problems and solves:
                problems = arithmetic(scoring.problems)
                found = targets.on_problems(found, problems)
                variants = [variant for variant in plan.settings.variants if not variant.exact]
                pairs = zip(plan.combinations, cells, strict=True)
                ran = [cell for combination, cell in pairs if combination.kernels == kernels]
                self._solved = targets.variants(problems, ran, variants, list(self._models.files.values()))
            self._accuracies += found.values()

    def outcome(self, suite: Suite, machine: dict[str, str | int | float]) -> BenchmarkOutcome:
        """Return all that was measured so far."""
        from edgespec.apps.bench.runs import BenchmarkOutcome

        plan, scoring = self._comparison.plan, self._scoring
        cells, warnings = self._comparison.results()
        return BenchmarkOutcome(
            kind="compare",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=machine,
            settings={
                **plan.settings.facts(),
                "rounds": plan.rounds,
                "threads": plan.n_threads,
                "accuracy text": str(scoring.text or DEFAULT),
                "accuracy text sha256": hashlib.sha256(self._text.encode()).hexdigest(),
                "accuracy text tokens, at most": scoring.text_tokens,
            },
            suite=suite.facts(),
            models=self._comparison.models,
            cells=cells,
            accuracy=tuple(self._accuracies),
            solved=tuple(self._solved),
            warnings=(*warnings, *self._warnings),
        )


@dataclass(frozen=True, slots=True)
class ComparisonModels:
    """The files that a comparison combines, hashed once."""

    targets: list[ModelFile]
    drafts: list[str]
    """Names of draft models; also WORDS of `compare`."""
    files: dict[str, ModelFile]
    """All model files by name."""
    references: list[ModelFile]
    """Files that targets were made from, without being targets: what the targets are compared with."""

    def tell_of_made(self) -> None:
        """Say which quantizations were made and are kept, and how they are deleted."""
        if made := [file.path for file in self.targets if file.path.is_relative_to(QUANTIZED.path())]:
            size = format_size(sum(path.stat().st_size for path in made))
            message(
                f"{len(made)} quantizations ({size}) are kept in {QUANTIZED.path()} for the next comparison; "
                "`edgespec cache clear quantized` deletes them"
            )

    def combinations(self, kernels: Sequence[KernelsChoice]) -> tuple[Combination, ...]:
        """Return every target with every draft on all `kernels`."""
        from edgespec.apps.bench.compare import Combination

        return tuple(
            Combination(target.name, draft, choice)
            for choice in kernels
            for target in self.targets
            for draft in self.drafts
        )


def find_models(targets: Sequence[str], drafts: Sequence[str], types: Sequence[str]) -> ComparisonModels:
    """Find the models, pull what is missing, and make the quantizations that are."""
    from edgespec.apps.bench.compare import WORDS
    from edgespec.models.quantizations import ModelFile, model_file

    drafting = [name for name in drafts if name not in WORDS]
    pull_named(*targets, *drafting)
    # Names may be two spellings of one file.
    found = _without_copies(_by_name(_targets(targets, types)).values())
    by_name = {name: model_file(name) for name in drafting}
    for name, file in by_name.items():
        if file.name in WORDS:
            problem = f"a draft model cannot be called {file.name}; rename the file"
            raise UsageError(problem, field="drafts", value=name)
    kept = {file.name for file in _without_copies(by_name.values())}
    names = dict.fromkeys(by_name[name].name if name in by_name else name for name in drafts)
    names = {name: None for name in names if name in kept or name in WORDS}
    references = {
        file.made_from: ModelFile(file.made_from, file.source)
        for file in found
        if file.source and file.made_from not in {other.name for other in found}
    }
    files = _by_name([*found, *by_name.values(), *references.values()])
    return ComparisonModels(found, list(names), files, list(references.values()))


def _targets(names: Sequence[str], types: Sequence[str]) -> list[ModelFile]:
    from edgespec.models.quantizations import model_file, variants

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


def _without_copies(files: Iterable[ModelFile]) -> list[ModelFile]:
    """Return the files without those that have the content of an earlier one; a line tells of each."""
    kept: list[ModelFile] = []
    for file in files:
        size = file.path.stat().st_size
        alike = (other for other in kept if other.path.stat().st_size == size)
        same = next((other for other in alike if sha256_of(other.path) == sha256_of(file.path)), None)
        if same is None:
            kept.append(file)
        elif same.name != file.name:
            message(f"{file.name} is the same file as {same.name}: it is measured once")
    return kept


def _by_name(files: Sequence[ModelFile]) -> dict[str, ModelFile]:
    found: dict[str, ModelFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other.path.resolve() != file.path.resolve():
            raise UsageError(f"two models are called {file.name}: {other.path} and {file.path}; rename one")
    return found
