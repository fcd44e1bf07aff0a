"""The matrix: targets x drafts x kernels on one suite of prompts, each a cell of `measure.KeptCells`.

    FOLDER/comparison.json      the conditions that all cells share, and the models' hashes
    FOLDER/runs/CELL.0.json     the raw runs of a cell in round 0

Rounds are the outer loop: every cell is measured once, then every cell again. So a machine that becomes
slower affects all cells alike, and a comparison stopped after a round has a whole table. It resumes from its
folder, with new cells or rounds too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from edgespec.apps.bench.measure import BenchSettings, CellTask, KeptCells
from edgespec.apps.bench.runs import Cell, WorkProgressFn, is_kept
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.variants import Variant
from edgespec.decoding.choices import DrafterName
from edgespec.errors import UsageError, describe_os_error
from edgespec.llama.choices import KernelsChoice
from edgespec.models.quantizations import ModelFile
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

    files: dict[str, ModelFile]
    """The models, by name."""
    combinations: tuple[Combination, ...]
    prompts: tuple[Prompt, ...]
    settings: BenchSettings
    rounds: int
    n_threads: int
    assume_watts: float | None
    machine: dict[str, str | int | float]
    """The processor, the versions, and what counts energy."""

    def task(self, combination: Combination) -> CellTask:
        """Return what the process of a cell measures."""
        settings, draft = combination.restrict(self.settings), combination.draft_model
        return CellTask(
            target=str(self.files[combination.target].path),
            draft=str(self.files[draft].path) if draft else None,
            drafter=combination.drafter(settings),
            kernels=combination.kernels,
            n_threads=self.n_threads,
            prompts=self.prompts,
            sittings=((settings, 0),),
            assume_watts=self.assume_watts,
        )

    def conditions(self) -> dict[str, Any]:
        """Return what must be equal for all cells of one table, as JSON has it."""
        alike = {
            "prompts": self.prompts,
            "settings": self.settings,
            "threads": self.n_threads,
            "assume_watts": self.assume_watts,
            "machine": self.machine,
        }
        return msgspec.json.decode(msgspec.json.encode(alike), type=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _StoredPlan:
    conditions: dict[str, Any]
    models: dict[str, str]
    """Name -> SHA-256, also of models that a later plan left out: their cells are still there."""


class Comparison:
    """A plan carried out in a folder."""

    def __init__(self, plan: ComparisonPlan, folder: Path) -> None:
        """Store `plan` in `folder`, which is created if missing.

        Cells already measured there are used again if the plan only adds rounds or cells to the stored one.
        Raises UsageError for any other plan, and if the folder cannot be written to.
        """
        self.plan = plan
        self.models = {name: file.facts() for name, file in plan.files.items()}
        """The facts of the models, by name."""
        tasks = {combination.name: plan.task(combination) for combination in plan.combinations}
        self._cells = KeptCells(tasks, folder / "runs", plan.machine)
        hashes = {name: facts.sha256 for name, facts in self.models.items()}
        conditions = plan.conditions()
        try:
            stored = _stored_plan(folder) or _StoredPlan(conditions, {})
            different = [name for name, value in conditions.items() if stored.conditions.get(name) != value]
            shared = hashes.keys() & stored.models.keys()
            different += sorted(name for name in shared if hashes[name] != stored.models[name])
            if different:
                problem = (
                    f"another comparison is there (other {', '.join(different)}); choose another folder, "
                    "or replace it (--fresh on the command line)"
                )
                raise UsageError(problem, field="out", value=folder)
            known = _StoredPlan(conditions, stored.models | hashes)
            write_atomically(folder / _PLAN, msgspec.json.encode(known) + b"\n")
        except OSError as error:
            raise UsageError(describe_os_error(error), field="out", value=folder) from None

    @staticmethod
    def discard(folder: Path) -> None:
        """Delete only what a comparison measured in `folder`. Raises UsageError if that fails."""
        try:
            if _stored_plan(folder):  # without a plan, the folder's contents are not ours
                patterns = ("runs/*.[0-9]*.json", "accuracy-*.json", "problems-*.json")  # and of accuracy.py
                for file in [found for pattern in patterns for found in folder.glob(pattern)]:
                    if is_kept(file):
                        file.unlink()
                (folder / _PLAN).unlink()
        except OSError as error:
            raise UsageError(describe_os_error(error), field="out", value=folder) from None

    def measure(self, on_progress: WorkProgressFn) -> None:
        """Measure the cells that are missing. Raises OSError if one cannot be written; earlier ones stay."""
        self._cells.measure(range(self.plan.rounds), on_progress)

    def results(self) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
        """Return the cells, measured so far or not, in the plan's order, and the warnings about them."""
        cells: list[Cell] = []
        warnings: list[str] = []
        for combination in self.plan.combinations:
            name = combination.name
            stored = {round_: self._cells.stored(name, round_) for round_ in range(self.plan.rounds)}
            found = {round_: one for round_, one in stored.items() if one}
            why = self._cells.skipped.get(name, "")
            for file in self.plan.files.values():  # the process knows its models by their files
                why = why.replace(str(file.path), file.name)
            cell = Cell(
                combination.target,
                None if combination.draft == NO_DRAFT else combination.draft,
                kernels=", ".join(sorted({one.kernels for one in found.values()})) or combination.kernels,
                runs=tuple(run for one in found.values() for run in one.runs),
                peak_rss_bytes=max((one.peak_rss_bytes for one in found.values()), default=None),
                skipped="" if found else why or "not measured yet",
            )
            cells.append(cell)
            if found and why:
                warnings.append(f"{name} was not measured in every round: {why}")
            for round_, one in found.items():
                warnings += [f"{name}, round {round_ + 1}: {line}" for line in one.warnings]
        return tuple(cells), tuple(warnings)


def _stored_plan(folder: Path) -> _StoredPlan | None:
    """Return the plan stored in `folder`, None if there is none. Raises UsageError if its file is no plan."""
    file = folder / _PLAN
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=_StoredPlan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = f"{file}: holds no comparison plan of this version of edgespec: {error}"
        raise UsageError(f"{problem}; delete it, or choose another folder") from None
