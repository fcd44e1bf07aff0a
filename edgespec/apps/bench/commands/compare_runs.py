"""The work of `edgespec compare`: finds the models, runs the plan, and makes the outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from edgespec.apps.bench.accuracy import Problem, TargetAccuracy
from edgespec.apps.bench.compare import WORDS, Combination, ComparisonPlan, ComparisonProgress, ComparisonRun
from edgespec.apps.bench.machine import facts
from edgespec.apps.bench.runs import AccuracyScore, BenchmarkOutcome, Cell, ProblemsSolved
from edgespec.apps.energy import EnergyMeter
from edgespec.apps.energy.commands.energy import know_idle
from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.choices import KernelsChoice
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import FileFacts, ModelFile, model_file, variants
from edgespec.models.sources import format_size
from edgespec.models.suites import Suite
from edgespec.platform.kept import QUANTIZED

IDENTITY = ("processor", "usable processors", "energy", "edgespec", "llama-cpp-python", "llama.cpp")
"""Facts of the machine that must be equal for all runs of one table."""


def machine_facts(assume_watts: float | None) -> dict[str, str | int | float]:
    """Return the machine's facts and what measures its energy; this measures the idle power if unknown."""
    with EnergyMeter.choose(assume_watts=assume_watts, on_message=message) as meter:
        know_idle(meter)
        return {**facts(), "energy": meter.source or "unavailable"}


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """Text and problems that the targets' answers are scored on."""

    wanted: bool
    name: str
    """Name of the text's file, or of the suite whose prompts it consists of."""
    text: str
    n_tokens: int
    """Most tokens of the text."""
    problems: list[Problem]
    """Arithmetic problems; [] if none are asked for."""


class RunningComparison:
    """A running comparison: its cells are stored in the folder, the accuracies in this object."""

    def __init__(
        self,
        plan: ComparisonPlan,
        models: ComparisonModels,
        scoring: ScoringOptions,
        folder: Path,
        *,
        fresh: bool,
    ) -> None:
        """Begin, if `fresh` or the folder is empty; otherwise continue the comparison there.

        Raises UsageError if the folder holds another comparison.
        """
        self._plan, self._models, self._scoring, self._folder = plan, models, scoring, folder
        if fresh:
            ComparisonRun.discard(folder)
        self._again = (
            f"the same command{' without --fresh' if fresh else ''} goes on with what is in {folder}"
        )
        paths = {name: file.path for name, file in models.files.items()}
        self._comparison = ComparisonRun(plan, paths, folder)
        self._accuracies: list[AccuracyScore] = []
        self._solved: list[ProblemsSolved] = []
        self._warnings: list[str] = []

    def run(self, kernels: Sequence[KernelsChoice]) -> int:
        """Measure the cells, then the accuracies with each of `kernels`; return the exit code."""
        try:
            with WorkDisplay() as display:

                def show(progress: ComparisonProgress) -> None:
                    what = f"round {progress.round + 1}: {progress.combination.name}"
                    display.show(what, progress.done, progress.total)

                self._comparison.run(show)
            if self._scoring.wanted:
                for choice in kernels:
                    self._score(choice, solves=choice == kernels[0])
        except KeyboardInterrupt:
            message(f"stopped; {self._again}")
            return INTERRUPTED
        except OSError as error:
            message(f"stopped: {describe_os_error(error)}; {self._again}")
            return EdgespecError.exit_code
        return 0

    def _score(self, kernels: KernelsChoice, *, solves: bool) -> None:
        """Score the targets on the text, and with `solves` on the problems too."""
        scoring, cells, plan = self._scoring, self._comparison.cells(), self._plan
        with WorkDisplay() as display:
            targets = TargetAccuracy(
                self._folder,
                self._models.targets,
                plan.models,
                kernels,
                plan.n_threads,
                display.show,
                self._warnings.append,
                self._models.references,
            )
            found = targets.texts(scoring.text, scoring.n_tokens)
            if scoring.problems and solves:
                found = targets.on_problems(found, scoring.problems)
                self._solved = self._solved_by_variants(targets, cells)
            self._accuracies += found.values()

    def _solved_by_variants(self, targets: TargetAccuracy, cells: Sequence[Cell]) -> list[ProblemsSolved]:
        """Return what variants that are not exact solve, with the kernels of `targets`."""
        variants = [variant for variant in self._plan.settings.variants if not variant.exact]
        pairs = zip(self._plan.combinations, cells, strict=True)
        ran = [cell for combination, cell in pairs if combination.kernels == targets.kernels]
        return targets.variants(self._scoring.problems, ran, variants, list(self._models.files.values()))

    def outcome(self, suite: Suite, machine: dict[str, str | int | float]) -> BenchmarkOutcome:
        """Return all that was measured so far."""
        plan, scoring = self._plan, self._scoring
        return BenchmarkOutcome(
            kind="compare",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=machine,
            settings={
                **plan.settings.facts(),
                "rounds": plan.rounds,
                "threads": plan.n_threads,
                "accuracy text": scoring.name,
                "accuracy text sha256": hashlib.sha256(scoring.text.encode()).hexdigest(),
                "accuracy text tokens, at most": scoring.n_tokens,
            },
            suite={"name": suite.name, "sha256": suite.sha256, "prompts": suite.categories},
            models=plan.models,
            cells=self._comparison.cells(),
            accuracy=tuple(self._accuracies),
            solved=tuple(self._solved),
            warnings=(*self._comparison.warnings, *self._warnings),
        )


@dataclass(frozen=True, slots=True)
class ComparisonModels:
    """The models of a comparison."""

    targets: list[ModelFile]
    drafts: list[str]
    """Names of draft models; also WORDS of `compare`."""
    files: dict[str, ModelFile]
    """All model files by name."""
    references: list[ModelFile]
    """Files that targets were made from, without being targets: what the targets are compared with."""

    def facts(self) -> dict[str, FileFacts]:
        """Return the facts of the files, by name."""
        with err.status("hashing the models"):
            return {name: file.facts() for name, file in self.files.items()}

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
        return tuple(
            Combination(target.name, draft, choice)
            for choice in kernels
            for target in self.targets
            for draft in self.drafts
        )


def find_models(targets: Sequence[str], drafts: Sequence[str], types: Sequence[str]) -> ComparisonModels:
    """Find the models, pull what is missing, and make the quantizations that are."""
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
    """Return the targets, in each of the quantizations `types` if given; missing ones are made."""
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
    """Return the files by name. Raises UsageError if two have the same name."""
    found: dict[str, ModelFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other.path.resolve() != file.path.resolve():
            raise UsageError(f"two models are called {file.name}: {other.path} and {file.path}; rename one")
    return found
