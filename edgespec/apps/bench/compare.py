"""The matrix: targets x drafts x kernels on one suite of prompts, each a cell of `measure.KeptCells`.

    FOLDER/runs/CELL.0.KEY.json             the raw runs of a cell in round 0
    FOLDER/runs/problems-CELL.0.KEY.json    its answers to problems
    FOLDER/accuracy.KEY.json                scores of a target's quantizations on a text (accuracy.py)

Rounds are the outer loop: every cell is measured once, then every cell again. So a machine that becomes
slower affects all cells alike, and a comparison stopped after a round has a whole table. It resumes from its
folder: what another comparison measured there has other keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from edgespec.apps.bench.accuracy import LONGEST_ANSWER, TextTask, arithmetic, groups
from edgespec.apps.bench.machine import Facts
from edgespec.apps.bench.measure import BenchSettings, CellTask, KeptCells, MeasuredCell
from edgespec.apps.bench.runs import (
    PLAIN,
    AccuracyScore,
    BenchmarkOutcome,
    Cell,
    ProblemsSolved,
    WorkProgressFn,
    is_kept,
)
from edgespec.apps.bench.suites import Prompt, Suite
from edgespec.apps.bench.variants import Variant
from edgespec.decoding.choices import DrafterName
from edgespec.llama.choices import KernelsChoice
from edgespec.models.quantizations import ModelFile

NO_DRAFT, SUFFIX, MTP = "none", "suffix", "mtp"
"""Used instead of a draft model's name: no drafts, those from text seen before, or those of the head in the
target's own file."""

WORDS = (NO_DRAFT, SUFFIX, MTP)
"""Words that name no draft model."""

IDENTITY = ("processor", "usable processors", "energy", "edgespec", "llama-cpp-python", "llama.cpp")
"""Facts of the machine that must be equal for all runs of one table."""


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


@dataclass
class Comparison:
    """A comparison carried out in a folder, where its cells are kept, and the accuracies of its targets."""

    targets: Mapping[str, ModelFile]
    """The models that decide, by name."""
    drafts: Mapping[str, ModelFile | None]
    """The models that draft, and WORDS."""
    references: Mapping[str, ModelFile]
    """Models that targets were made from, without being targets: what the targets are compared with."""
    kernels: Sequence[KernelsChoice]
    suite: Suite
    settings: BenchSettings
    rounds: int
    n_threads: int
    assume_watts: float | None
    machine: Facts
    folder: Path
    accuracy: list[AccuracyScore] = field(default_factory=list)
    solved: list[ProblemsSolved] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find what is kept of the cells."""
        every = product(self.kernels, self.targets, self.drafts)
        self._combinations = [Combination(target, draft, choice) for choice, target, draft in every]
        drafting = {name: file for name, file in self.drafts.items() if file}
        self._files = {**self.targets, **drafting, **self.references}
        prompts = self.suite.interleaved()
        tasks = {one.name: self._task(one, self.settings, prompts) for one in self._combinations}
        self._cells = self._kept(tasks)

    def _kept(self, tasks: dict[str, CellTask]) -> KeptCells:
        machine = {name: self.machine[name] for name in IDENTITY if name in self.machine}
        return KeptCells(tasks, self.folder / "runs", machine)

    def _task(self, cell: Combination, settings: BenchSettings, prompts: tuple[Prompt, ...]) -> CellTask:
        allowed = cell.restrict(settings)
        return CellTask(
            target=str(self._files[cell.target].path),
            draft=str(self._files[cell.draft_model].path) if cell.draft_model else None,
            drafter=cell.drafter(allowed),
            kernels=cell.kernels,
            n_threads=self.n_threads,
            prompts=prompts,
            sittings=((allowed, 0),),
            assume_watts=self.assume_watts,
        )

    def discard(self) -> None:
        """Delete what comparisons have measured in the folder, and nothing else. Raises OSError."""
        for file in (*self.folder.glob("runs/*.json"), *self.folder.glob("accuracy.*.json")):
            if is_kept(file):
                file.unlink()

    def measure(self, on_progress: WorkProgressFn) -> None:
        """Measure the cells that are missing. Raises OSError if one cannot be kept; earlier ones stay."""
        self._cells.measure(range(self.rounds), on_progress)

    def score(self, text: str, n_tokens: int, on_progress: WorkProgressFn) -> None:
        """Score targets and references on a text, each beside the best quantization of its model among them.

        Raises OSError if the scores cannot be kept.
        """
        found = groups([*self.targets.values(), *self.references.values()], self.warnings.append)
        for kernels in self.kernels:
            for group in found:
                paths = {file.name: str(file.path) for file in group}
                task = TextTask(paths, text, n_tokens, kernels, self.n_threads, str(self.folder))
                self.accuracy += task.scores(on_progress, self.warnings.append)

    def solve(self, n: int, on_progress: WorkProgressFn) -> None:
        """Let the scored targets, and their drafts in variants that are not exact, answer `n` problems.

        With the first kernels only. Raises OSError as `measure`.
        """
        inexact = tuple(variant for variant in self.settings.variants if not variant.exact)
        settings, prompts = BenchSettings(inexact, LONGEST_ANSWER), arithmetic(n)
        scored = {one.target for one in self.accuracy}
        why = "left out, as its score on the text is missing"
        self.warnings += [f"problems by {one}: {why}" for one in self.targets if one not in scored]
        asked = [Combination(one, NO_DRAFT, self.kernels[0]) for one in self.targets if one in scored]
        for one in self._combinations:
            ran = one.kernels == self.kernels[0] and one.name not in self._cells.skipped
            asked += [one] if ran and one.draft_model and one.restrict(settings).variants else []
        cells = self._kept({f"problems-{one.name}": self._task(one, settings, prompts) for one in asked})
        cells.measure([0], on_progress)
        self.warnings += [f"{name}: {self._named(why)}" for name, why in cells.skipped.items()]
        for one in asked:
            if found := cells.stored(f"problems-{one.name}", 0):
                self._count(one, found)

    def _count(self, cell: Combination, found: MeasuredCell) -> None:
        """Add the number of problems that a target, or a variant that is not exact, answered exactly."""
        for variant in dict.fromkeys(run.variant for run in found.runs):
            runs = [run for run in found.runs if run.variant == variant]
            passed = sum(run.right is True for run in runs)
            if cell.draft == NO_DRAFT:
                for i, one in enumerate(self.accuracy):
                    if (one.target, one.kernels) == (cell.target, found.kernels):
                        self.accuracy[i] = replace(one, passed=passed, n_problems=len(runs))
            elif variant != PLAIN:
                n_tokens = sum(run.tokens for run in runs) or 1
                share = sum(run.target_share * run.tokens for run in runs) / n_tokens
                self.solved.append(
                    ProblemsSolved(cell.target, cell.draft, found.kernels, variant, passed, len(runs), share)
                )

    def _named(self, why: str) -> str:
        """Return a reason with the models' names: a process knows them by their files."""
        for file in self._files.values():
            why = why.replace(str(file.path), file.name)
        return why

    def _result(self, combination: Combination) -> tuple[Cell, list[str]]:
        """Return a cell as measured so far, and the warnings about it."""
        name, why = combination.name, self._named(self._cells.skipped.get(combination.name, ""))
        rounds = {n: found for n in range(self.rounds) if (found := self._cells.stored(name, n))}
        cell = Cell(
            combination.target,
            None if combination.draft == NO_DRAFT else combination.draft,
            kernels=", ".join(sorted({one.kernels for one in rounds.values()})) or combination.kernels,
            runs=tuple(run for one in rounds.values() for run in one.runs),
            peak_rss_bytes=max((one.peak_rss_bytes for one in rounds.values()), default=None),
            skipped="" if rounds else why or "not measured yet",
        )
        warnings = [f"{name} was not measured in every round: {why}"] if rounds and why else []
        for n, one in rounds.items():
            warnings += [f"{name}, round {n + 1}: {line}" for line in one.warnings]
        return cell, warnings

    def outcome(self, about: Mapping[str, Any]) -> BenchmarkOutcome:
        """Return all that was measured so far, in the plan's order; `about`: further settings."""
        found = [self._result(combination) for combination in self._combinations]
        return BenchmarkOutcome(
            kind="compare",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=self.machine,
            settings={**self.settings.facts(), "rounds": self.rounds, "threads": self.n_threads, **about},
            suite=self.suite.facts(),
            models={name: file.facts() for name, file in self._files.items()},
            cells=tuple(cell for cell, _ in found),
            accuracy=tuple(self.accuracy),
            solved=tuple(self.solved),
            warnings=(*(line for _, lines in found for line in lines), *self.warnings),
        )
