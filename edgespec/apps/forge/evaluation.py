"""Evaluation of drafts: tokens a second through the real loop, each draft and plain decoding in turns.

    timing    each draft        plain, and 4 tokens drafted a step: greedy. The pair's profile learns from it
    round 0   each draft        plain, and "auto" as users get it: greedy, then at temperature 0.8
    round 1   each draft        the other way round, with the next seed
    ...

Each draft has its own process for each round: memory often holds one target only.
Drafts are compared by their speed-ups over the plain runs between theirs, so that a machine that drifts does
so for all alike. Every finished part is a file: an evaluation that was stopped resumes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from edgespec.apps.bench.measure import BenchSettings, CellTask, KeptCells
from edgespec.apps.bench.quantizations import ModelFile, model_file
from edgespec.apps.bench.runs import PLAIN, Run, Variant
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.summary import VariantComparison, compare
from edgespec.apps.forge.data_stage import evaluation_prompts
from edgespec.apps.forge.dataset import Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import draft_file
from edgespec.apps.forge.request import EvaluationSettings, StageContext
from edgespec.decoding.choices import DrafterName
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.draft_records import (
    DraftRecord,
    DraftSpeedups,
    drafts_for,
    paired_draft,
    read_record,
    write_record,
)
from edgespec.models.resolve import resolve
from edgespec.models.store import sha256_of

DRAFTING = "auto"
"""The variant that is compared with plain decoding: the default."""

_TIMED = Variant("model", "model", 4)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft to evaluate, or drafting without a model."""

    name: str
    path: Path | None
    """None: no draft model, only text seen before."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Speed of one candidate compared with plain decoding, and the raw runs."""

    candidate: Candidate
    timing: DraftTiming | None
    """None: without a draft model."""
    greedy: VariantComparison
    sampled: VariantComparison
    """Drafting compared with plain decoding, at temperature 0 and at 0.8."""
    rounds: int
    runs: tuple[Run, ...]
    size: int | None
    """Bytes of the file; None: without a draft model."""

    @property
    def gains(self) -> DraftSpeedups:
        """Median speed-ups; 1 if nothing was written."""
        medians = [one.speedup.median if one.speedup else 1.0 for one in (self.greedy, self.sampled)]
        return DraftSpeedups(*medians)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates drafts of one target on `prompts`; results that `folder` holds already are reused."""

    target: Path
    prompts: tuple[Prompt, ...]
    settings: EvaluationSettings
    folder: Path
    context: StageContext

    def evaluate(self, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """Measure the candidates; return results of those that could run, in their order.

        One that cannot run is left out, with a message. Raises EdgespecError without prompts, and if none
        can run.
        """
        if not self.prompts:
            problem = "there is no prompt to evaluate drafts by: let the target write more, or name a suite"
            raise EdgespecError(problem)
        timings: dict[Candidate, DraftTiming] = {}
        for one, runs in self._measured([one for one in candidates if one.path], is_timing=True).items():
            try:
                timings[one] = DraftTiming.of(runs)
            except EdgespecError as error:
                self.context.on_message(f"{one.name} is left out: {error}")
        can_run = [one for one in candidates if one in timings or not one.path]
        measured = self._measured(can_run, is_timing=False)
        if not measured:
            raise EdgespecError("no draft could be evaluated; the lines above say why")
        return [self._result(one, timings.get(one), runs) for one, runs in measured.items()]

    def _measured(self, those: Sequence[Candidate], *, is_timing: bool) -> dict[Candidate, tuple[Run, ...]]:
        """Return the runs of those that can run, in their timing or in all rounds."""
        rounds = range(1 if is_timing else self.settings.rounds)

        def show(what: str, done: float, total: float) -> None:
            share, detail = done / total / 2, f"timing, {what}"
            if not is_timing:
                share, detail = 0.5 + share, what
            self.context.on_progress("evaluating", share, detail)

        named = {one.name: one for one in those}
        if len(named) < len(those):  # a draft that was there may have the name of a new one
            named = {f"{one.name} ({i})": one for i, one in enumerate(those)}
        tasks = {name: self._task(one.path, is_timing=is_timing) for name, one in named.items()}
        cells = KeptCells(tasks, self.folder / ("timing" if is_timing else "rounds"))
        try:
            cells.measure(rounds, show)
        except OSError as error:
            problem = f"the evaluation cannot be stored: {describe_os_error(error)}"
            raise EdgespecError(problem) from error
        for name, why in cells.skipped.items():
            self.context.on_message(f"{name} is left out: {why}")
        return {
            one: tuple(run for n in rounds if (found := cells.stored(name, n)) for run in found.runs)
            for name, one in named.items()
            if name not in cells.skipped
        }

    def _task(self, draft: Path | None, *, is_timing: bool) -> CellTask:
        """Return what is measured of a draft; runs at 0.8 are numbered after all greedy rounds."""
        settings = self.settings
        drafter: DrafterName = "auto" if draft else "suffix"
        timing = BenchSettings((_TIMED,), settings.n_predict, learns=True)
        greedy = replace(timing, variants=(Variant(DRAFTING, drafter),), learns=False)
        sampled = replace(greedy, temperature=0.8)
        return CellTask(
            target=str(self.target),
            draft=str(draft) if draft else None,
            drafter=drafter,
            kernels=settings.kernels,
            n_threads=settings.n_threads,
            prompts=self.prompts,
            sittings=((timing, 0),) if is_timing else ((greedy, 0), (sampled, settings.rounds)),
        )

    def _result(self, one: Candidate, timing: DraftTiming | None, runs: Sequence[Run]) -> CandidateResult:
        rounds = self.settings.rounds
        greedy = compare((run for run in runs if run.round < rounds), DRAFTING)
        sampled = compare((run for run in runs if run.round >= rounds), DRAFTING)
        size = one.path.stat().st_size if one.path else None
        return CandidateResult(one, timing, greedy, sampled, rounds, tuple(runs), size)


# ---- edgespec draft eval ----


def evaluate_draft(
    name: str,
    target: str | None,
    prompts: Sequence[Prompt] | None,
    settings: EvaluationSettings,
    context: StageContext,
) -> tuple[str, CandidateResult, CandidateResult | None]:
    """Evaluate the draft `name` for `target`, by default its own, and update its record.

    Returns the target's name, and the results of the draft and of the target's other draft, or of drafting
    without one; None: that could not run.
    `prompts`: by default some that it was not trained on. Raises UsageError and EdgespecError.
    """
    path = draft_file(name)
    record = read_record(path)
    assert record is not None  # noqa: S101 - for the type checker: draft_file found one
    try:
        model = model_file(target or record.target_name)
    except UsageError:
        if target:
            raise
        problem = f"{name} was made for a file called {record.target_name}: say where that is"
        raise UsageError(problem, field="target") from None
    sha256 = sha256_of(model.path)
    if sha256 != record.target_sha256:
        raise UsageError(
            f"{name} was made for another file, {record.target_name} with the SHA-256 "
            f"{record.target_sha256[:12]}; a head drafts for that one only",
            field="target",
            value=model.name,
        )
    if prompts is None:
        header = check_model_file(model.path)
        made_for = DatasetTarget(sha256, model.name, header.n_embd)
        dataset = Dataset(made_for, on_message=context.on_message)
        prompts = evaluation_prompts(dataset, settings.n_prompts)
    mine, other = Candidate(name, path), _other(record, model)
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(model.path, tuple(prompts), settings, Path(folder), context)
        found = {one.candidate: one for one in evaluator.evaluate([mine, other])}
    if mine not in found:
        raise EdgespecError(f"{name} could not be evaluated; the line above says why")
    update_record(found[mine])
    return model.name, found[mine], found.get(other)


def update_record(result: CandidateResult) -> None:
    """Write the measurements of a draft into its record, if it has one: if it was made here."""
    path, timing = result.candidate.path, result.timing
    record = read_record(path) if path else None
    if path and record and timing:
        write_record(path, msgspec.structs.replace(record, gains=result.gains, **asdict(timing)))


def _other(record: DraftRecord, target: ModelFile) -> Candidate:
    names = [one.name for one in drafts_for(str(target.path)) if one.name != record.name]
    paired = paired_draft(str(target.path))
    for name in filter(None, [*names, paired]):
        try:
            return Candidate(name, resolve(name, pull_missing=False))
        except EdgespecError:
            continue
    return Candidate("no draft", None)


# ---- what the timing says ----


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Cost and acceptance of a draft that drafts 4 tokens at each step, greedily."""

    cost_ratio: float
    """c: seconds of a drafted token, catching up included, over seconds of a plain token."""
    acceptance: tuple[float, ...]
    """Share accepted at position 1, at position 2 given that the first was, ..."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> DraftTiming:
        """Compute the timing from its runs. Raises EdgespecError if nothing was drafted."""
        plain = [
            run.verify_s / run.n_emitted
            for run in runs
            if run.variant == PLAIN and run.verify_s and run.n_emitted
        ]
        drafted = [run for run in runs if run.variant != PLAIN]
        steps: Counter[tuple[int, int]] = Counter()
        for run in drafted:
            for length, accepted, count in run.histogram or ():
                steps[length, accepted] += count
        n_drafted = sum(length * count for (length, _), count in steps.items())
        if not plain or not n_drafted:
            raise EdgespecError("it drafted nothing, so its pass cannot be timed")
        draft_s = sum(run.draft_s or 0.0 for run in drafted)
        return cls(max(draft_s / n_drafted / statistics.median(plain), 1e-6), _acceptance(steps))


def _acceptance(steps: Counter[tuple[int, int]]) -> tuple[float, ...]:
    found = []
    for i in range(max(length for length, _ in steps)):
        tested = sum(n for (length, accepted), n in steps.items() if length > i and accepted >= i)
        if not tested:
            break
        found.append(sum(n for (length, accepted), n in steps.items() if length > i < accepted) / tested)
    return tuple(found)
