"""The matrix: targets x drafts x kernels on one suite of prompts, a process for each cell and round.

    FOLDER/comparison.json      the plan; a stopped comparison continues from it, with new cells or rounds too
    FOLDER/runs/CELL.0.json     the raw runs of a cell in round 0

Rounds are the outer loop: every cell is measured once, then every cell again. So a machine that becomes
slower affects all cells alike, and a comparison stopped after a round has a whole table. Each cell runs in
its own process (measure.py).
"""

from __future__ import annotations

import glob
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edgespec.apps.bench.measure import BenchSettings, CellTask, MeasuredCell
from edgespec.apps.bench.runs import Cell, is_kept, keep, read_kept, rotated
from edgespec.apps.bench.variants import Variant
from edgespec.decoding.choices import DrafterName
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.choices import KernelsChoice
from edgespec.models.quantizations import FileFacts
from edgespec.models.suites import Prompt
from edgespec.platform.files import write_atomically

NO_DRAFT, SUFFIX, MTP = "none", "suffix", "mtp"
"""Used instead of a draft model's name: no drafts, those from text seen before, or those of the head in the
target's own file."""

WORDS = (NO_DRAFT, SUFFIX, MTP)
"""Words that name no draft model."""

_PLAN = "comparison.json"


@dataclass(frozen=True, slots=True)
class Combination:
    """The models and kernels of a cell, by name; a draft may also be one of WORDS."""

    target: str
    draft: str
    kernels: KernelsChoice

    @property
    def name(self) -> str:
        """The name in messages, and of the file of raw runs: TARGET+DRAFT+kernels-KERNELS."""
        return f"{self.target}+{self.draft}+kernels-{self.kernels}"

    @property
    def draft_model(self) -> str | None:
        """The draft model, if there is one."""
        return None if self.draft in WORDS else self.draft

    def restrict(self, settings: BenchSettings) -> BenchSettings:
        """Return `settings` with only those variants that this cell's draft allows."""
        variants = [variant for variant in settings.variants if self._allows(variant)]
        return replace(settings, variants=() if self.draft == NO_DRAFT else tuple(variants))

    def _allows(self, variant: Variant) -> bool:
        if variant.drafter == MTP:
            return self.draft == MTP
        if variant.cascade:  # a head cannot write by itself
            return self.draft_model is not None
        return self.draft != SUFFIX or not variant.needs_model

    def drafter(self, settings: BenchSettings) -> DrafterName:
        """Return the drafter that the engine loads models for, to run what `restrict` returned."""
        if not settings.variants:
            return "none"
        return "auto" if self.draft_model else "mtp" if self.draft == MTP else "suffix"


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Everything that the runs of a comparison depend on, except the profiles of the pairs."""

    models: dict[str, FileFacts]
    combinations: tuple[Combination, ...]
    prompts: tuple[Prompt, ...]
    settings: BenchSettings
    rounds: int
    n_threads: int
    assume_watts: float | None
    machine: dict[str, str | int | float]
    """The processor, the versions, and what counts energy."""

    def n_runs(self, combination: Combination) -> int:
        """Return the number of runs of a cell in one round."""
        return len(self.prompts) * (1 + len(combination.restrict(self.settings).variants))

    def key(self, combination: Combination, round_: int) -> str:
        """Return a hash of what a cell's runs in a round depend on."""
        files = [self.models[n].sha256 for n in (combination.target, combination.draft_model) if n]
        alike = (self.prompts, self.settings, self.n_threads, self.assume_watts, self.machine)
        return hashlib.sha256(msgspec.json.encode((combination, round_, files, alike))).hexdigest()

    def conflicts(self, other: ComparisonPlan) -> list[str]:
        """Return in words why cells of `other` must not stand in one table with this plan's."""
        alike = ("prompts", "settings", "n_threads", "assume_watts", "machine")
        found = [name.replace("n_", "") for name in alike if getattr(self, name) != getattr(other, name)]
        shared = self.models.keys() & other.models.keys()
        return found + sorted(n for n in shared if self.models[n].sha256 != other.models[n].sha256)


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """How far a comparison is: the run that begins, and how many of all are done."""

    combination: Combination
    round: int
    prompt: str
    """Id of the prompt."""
    done: int
    """Runs that are done, or skipped with their cell."""
    total: int


class ComparisonRun:
    """Carries out a plan in a folder."""

    def __init__(self, plan: ComparisonPlan, paths: Mapping[str, Path], folder: Path) -> None:
        """Store `plan` in `folder`, which is created if missing; `paths` are the files of its models.

        Cells already measured there are used again if the plan only adds rounds or cells to the stored one.
        Raises UsageError for any other plan, and if the folder cannot be written to.
        """
        self.plan = plan
        self._paths = paths
        self._runs = folder / "runs"
        self._skipped: dict[Combination, str] = {}
        try:
            stored = _stored_plan(folder)
            if stored and (different := plan.conflicts(stored)):
                problem = (
                    f"another comparison is there (other {', '.join(different)}); choose another folder, "
                    "or replace it (--fresh on the command line)"
                )
                raise UsageError(problem, field="out", value=folder)
            self._runs.mkdir(parents=True, exist_ok=True)
            # Models that this plan leaves out stay in the file, since their cells stay in the folder.
            models = {**stored.models, **plan.models} if stored else plan.models
            write_atomically(folder / _PLAN, msgspec.json.encode(replace(plan, models=models)) + b"\n")
        except OSError as error:
            raise UsageError(describe_os_error(error), field="out", value=folder) from None

    @staticmethod
    def discard(folder: Path) -> None:
        """Delete only what a comparison measured in `folder`. Raises UsageError if that fails."""
        try:
            if stored := _stored_plan(folder):  # without a plan, the folder's contents are not ours
                for name in map(glob.escape, stored.models):
                    kept = (  # here and in accuracy.py
                        f"runs/{name}+*+kernels-*.[0-9]*.json",
                        f"accuracy-{name}+kernels-*.json",
                        f"problems-{name}+kernels-*.json",
                        f"problems-{name}+*+kernels-*.json",
                    )
                    for file in [found for pattern in kept for found in folder.glob(pattern)]:
                        if is_kept(file):
                            file.unlink()
                (folder / _PLAN).unlink()
        except OSError as error:
            raise UsageError(describe_os_error(error), field="out", value=folder) from None

    def _file(self, combination: Combination, round_: int) -> Path:
        return self._runs / f"{combination.name}.{round_}.json"

    def _stored(self, combination: Combination, round_: int) -> MeasuredCell | None:
        """Return a cell's runs in a round; None if their file is missing, outdated or damaged."""
        return read_kept(self._file(combination, round_), self.plan.key(combination, round_), MeasuredCell)

    def run(self, on_progress: Callable[[ComparisonProgress], None] = lambda _progress: None) -> None:
        """Measure what is missing. Raises OSError if a cell cannot be written; earlier cells stay."""
        plan = self.plan
        total = plan.rounds * sum(map(plan.n_runs, plan.combinations))
        done = 0
        for round_ in range(plan.rounds):
            for combination in rotated(plan.combinations, round_):
                begun = ComparisonProgress(combination, round_, "", done, total)
                if combination not in self._skipped and self._stored(combination, round_) is None:
                    on_progress(begun)
                    self._measure(begun, on_progress)
                done += plan.n_runs(combination)
                on_progress(replace(begun, done=done))

    def _measure(self, begun: ComparisonProgress, on_progress: Callable[[ComparisonProgress], None]) -> None:
        """Measure a cell in one round, and write the runs once all are complete; else keep why not."""
        combination, round_ = begun.combination, begun.round
        plan, draft, counted = self.plan, combination.draft_model, itertools.count(begun.done + 1)
        settings = combination.restrict(plan.settings)
        task = CellTask(
            target=str(self._paths[combination.target]),
            draft=str(self._paths[draft]) if draft else None,
            drafter=combination.drafter(settings),
            kernels=combination.kernels,
            n_threads=plan.n_threads,
            prompts=plan.prompts,
            sittings=((settings, round_),),
            assume_watts=plan.assume_watts,
        )
        try:
            found = task.measure(
                lambda run: on_progress(replace(begun, prompt=run.prompt, done=next(counted)))
            )
        except EdgespecError as error:
            why = str(error)
            for name, path in self._paths.items():  # the process knows its models by their files
                why = why.replace(str(path), name)
            self._skipped[combination] = why
            return
        keep(self._file(combination, round_), plan.key(combination, round_), found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a line for each cell that failed in some round, and one for each disturbance."""
        places = [(one, round_) for round_ in range(self.plan.rounds) for one in self.plan.combinations]
        stored = {place: found for place in places if (found := self._stored(*place))}
        partial = (
            f"{combination.name} was not measured in every round: {why}"
            for combination, why in self._skipped.items()
            if any(one == combination for one, _ in stored)
        )
        disturbed = (
            f"{combination.name}, round {round_ + 1}: {line}"
            for (combination, round_), found in stored.items()
            for line in found.warnings
        )
        kernels: dict[Combination, set[str]] = {}
        for (combination, _), found in stored.items():
            kernels.setdefault(combination, set()).add(found.kernels)
        mixed = (
            f"{combination.name}: its rounds had other kernels ({', '.join(sorted(names))}), and only those "
            "like the first count; --fresh measures all again"
            for combination, names in kernels.items()
            if len(names) > 1
        )
        return (*partial, *mixed, *disturbed)

    def cells(self) -> tuple[Cell, ...]:
        """Return the cells measured so far, and those that could not run, in the plan's order."""
        found = []
        for combination in self.plan.combinations:
            rounds = [self._stored(combination, round_) for round_ in range(self.plan.rounds)]
            measured = [one for one in rounds if one]
            alike = [one for one in measured if one.kernels == measured[0].kernels]
            cell = Cell(
                combination.target,
                None if combination.draft == NO_DRAFT else combination.draft,
                kernels=alike[0].kernels if alike else combination.kernels,
                runs=tuple(run for one in alike for run in one.runs),
                peak_rss_bytes=max((one.peak_rss_bytes for one in alike), default=None),
                skipped="" if alike else self._skipped.get(combination, "not measured yet"),
            )
            found.append(cell)
        return tuple(found)


def _stored_plan(folder: Path) -> ComparisonPlan | None:
    """Return the plan stored in `folder`, None if there is none. Raises UsageError if its file is no plan."""
    file = folder / _PLAN
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=ComparisonPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, EdgespecError) as error:
        problem = f"{file}: holds no comparison plan that edgespec wrote: {error}"
        raise UsageError(f"{problem}; delete it, or choose another folder") from None
