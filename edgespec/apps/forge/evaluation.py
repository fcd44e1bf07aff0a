"""Evaluation of drafts: tokens a second through the real loop, each draft and plain decoding in turns.

    timing    each draft        cost of a drafted token, acceptance by position
    round 0   each draft        prompt 1: plain, drafting   prompt 2: drafting, plain   ...
    round 1   the better ones   the other way round, with the next seed
    ...

Each draft has its own process for each round: memory often holds one target only.
Drafts are compared by their speed-ups over the plain runs between theirs, so that a machine that drifts does
so for all alike. Every finished part is a file: an evaluation that was stopped resumes.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edgespec.apps.bench.measure import BenchSettings, CellTask
from edgespec.apps.bench.runs import PLAIN, Run, keep, read_kept, rotated
from edgespec.apps.bench.suites import Prompt
from edgespec.apps.bench.summary import VariantComparison, compare
from edgespec.apps.bench.variants import Variant
from edgespec.apps.forge.data_stage import evaluation_prompts
from edgespec.apps.forge.dataset import Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import draft_file
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.request import EvaluationSettings
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
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import ModelFile, model_file
from edgespec.models.resolve import resolve

_BEST_OF_FIRST_ROUND = 2  # new candidates that go on after it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft to evaluate, or drafting without a model."""

    name: str
    path: Path | None
    """None: no draft model, only text seen before."""
    was_there: bool = False
    """Whether this is the draft to beat; it takes part in every round."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Speed of one candidate beside plain decoding, with the raw runs."""

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
        """Median speed-ups; 1 where nothing was written."""
        medians = [one.speedup.median if one.speedup else 1.0 for one in (self.greedy, self.sampled)]
        return DraftSpeedups(*medians)


class Evaluator:
    """Evaluates drafts of one target, with finished parts in a folder."""

    def __init__(
        self,
        target: Path,
        prompts: Sequence[Prompt],
        settings: EvaluationSettings,
        folder: Path,
        context: StageContext,
    ) -> None:
        """Measure on `prompts`; parts in `folder` are used again. Raises EdgespecError without prompts."""
        if not prompts:
            problem = "there is no prompt to judge drafts by: let the target write more, or name a suite"
            raise EdgespecError(problem)
        self._target, self._prompts, self._settings = target, tuple(prompts), settings
        self._folder, self._context = folder, context
        self._sha256: dict[Path | None, str] = {None: "", target: sha256_of(target)}
        self._done = self._total = 0

    def evaluate(self, candidates: Sequence[Candidate]) -> list[CandidateResult]:
        """Measure the candidates; return results of those that could run, in their order.

        After the first round only the best two, and the draft to beat, go on. A candidate that cannot run is
        left out, with a message. Raises EdgespecError if none can.
        """
        rounds = self._settings.rounds
        n_later = min(len(candidates), _BEST_OF_FIRST_ROUND + sum(one.was_there for one in candidates))
        n_timed = sum(one.path is not None for one in candidates)
        self._done, self._total = 0, n_timed + len(candidates) + (rounds - 1) * n_later
        timings: dict[Candidate, DraftTiming | None] = {}
        runs: dict[Candidate, list[Run]] = {}
        for one in candidates:
            try:
                timings[one] = DraftTiming.of(self._part(one, None)) if one.path else None
                runs[one] = []
            except EdgespecError as error:
                self._context.on_message(f"{one.name} is left out: {error}")
        going = list(runs)
        for round_ in range(rounds):
            for one in rotated(going, round_) if going else ():
                try:
                    runs[one] += self._part(one, round_)
                except EdgespecError as error:
                    self._context.on_message(f"{one.name} is left out: {error}")
                    del runs[one]
            going = [one for one in going if one in runs]
            if round_ == 0:
                going = _best([_result(one, None, runs[one], rounds) for one in going])
        if not runs:
            raise EdgespecError("no draft could be judged; the lines above say why")
        return [_result(one, timings[one], found, rounds) for one, found in runs.items()]

    def _part(self, one: Candidate, round_: int | None) -> tuple[Run, ...]:
        """Return the runs of a candidate in one round (None: its timing), measured or stored."""
        detail = f"timing {one.name}" if round_ is None else f"round {round_ + 1} of {one.name}"
        task = EvaluationTask(
            target=str(self._target),
            draft=str(one.path) if one.path else None,
            prompts=self._prompts,
            settings=self._settings,
            round=round_,
        )
        key = self._key(one, task)
        file = self._folder / f"{key[:16]}.json"
        runs = read_kept(file, key, tuple[Run, ...])
        if runs is None:
            runs = tuple(task.runs(lambda n: self._show(detail, n / task.n_runs)))
            try:
                keep(file, key, runs)
            except OSError as error:
                problem = f"what was judged cannot be kept: {describe_os_error(error)}"
                raise EdgespecError(problem) from error
        self._done += 1
        return runs

    def _show(self, detail: str, share: float) -> None:
        done = min(1.0, (self._done + share) / self._total)
        self._context.on_progress(StageProgress("judging", done, detail))

    def _key(self, one: Candidate, task: EvaluationTask) -> str:
        """Return a hash of what the runs depend on, with the files' contents whatever their names."""
        if one.path not in self._sha256 and one.path:
            self._sha256[one.path] = sha256_of(one.path)
        files = self._sha256[self._target], self._sha256[one.path]
        facts = msgspec.json.encode((files, replace(task, target="", draft=None)))
        return hashlib.sha256(facts).hexdigest()


def _best(results: Sequence[CandidateResult]) -> list[Candidate]:
    new = [one for one in results if not one.candidate.was_there]
    new.sort(key=lambda one: one.gains.mean, reverse=True)
    best = new[:_BEST_OF_FIRST_ROUND]
    return [one.candidate for one in results if one.candidate.was_there or one in best]


def _result(one: Candidate, timing: DraftTiming | None, runs: Sequence[Run], rounds: int) -> CandidateResult:
    greedy = [run for run in runs if run.round < rounds]
    sampled = [run for run in runs if run.round >= rounds]
    n_rounds = len({run.round for run in greedy})
    size = one.path.stat().st_size if one.path else None
    variants = compare(greedy, DRAFTING), compare(sampled, DRAFTING)
    return CandidateResult(one, timing, *variants, n_rounds, tuple(runs), size)


# ---- edgespec draft eval ----


@dataclass(frozen=True, slots=True)
class DraftEvaluation:
    """Measurements of a draft and of the target's other draft."""

    target_name: str
    draft: CandidateResult
    other: CandidateResult | None
    """The target's other draft, or none at all; None: it could not run."""


def evaluate_draft(
    name: str,
    target: str | None,
    prompts: Sequence[Prompt] | None,
    settings: EvaluationSettings,
    context: StageContext,
) -> DraftEvaluation:
    """Evaluate the draft `name` for `target`, by default its own, and update its record.

    `prompts`: by default some that it was not trained on. Raises UsageError and EdgespecError.
    """
    path = draft_file(name)
    record = read_record(path)
    assert record is not None  # noqa: S101 - for the type checker: draft_file found one
    model = _target_file(record, target)
    sha256 = sha256_of(model.path)
    if sha256 != record.target_sha256:
        raise UsageError(
            f"{name} was made for another file, {record.target_name} with the SHA-256 "
            f"{record.target_sha256[:12]}; a head drafts for that one only",
            field="target",
            value=model.name,
        )
    if prompts is None:
        made_for = DatasetTarget.of(check_model_file(model.path), model.name, sha256)
        dataset = Dataset(made_for, on_message=context.on_message)
        prompts = evaluation_prompts(dataset, settings.n_prompts)
    mine, other = Candidate(name, path), _other(record, model)
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(model.path, prompts, settings, Path(folder), context)
        found = {one.candidate: one for one in evaluator.evaluate([mine, other])}
    if mine not in found:
        raise EdgespecError(f"{name} could not be judged; the line above says why")
    update_record(found[mine])
    return DraftEvaluation(model.name, found[mine], found.get(other))


def update_record(result: CandidateResult) -> None:
    """Write the measurements of a draft into its record, if it has one: if it was made here."""
    path, timing = result.candidate.path, result.timing
    record = read_record(path) if path else None
    if path and record and timing:
        changed = replace(
            record, gains=result.gains, acceptance=timing.acceptance, cost_ratio=timing.cost_ratio
        )
        write_record(path, changed)


def _target_file(record: DraftRecord, target: str | None) -> ModelFile:
    try:
        return model_file(target or record.target_name)
    except UsageError:
        if target:
            raise
        problem = f"{record.name} was made for a file called {record.target_name}: say where that is"
        raise UsageError(problem, field="target") from None


def _other(record: DraftRecord, target: ModelFile) -> Candidate:
    names = [one.name for one in drafts_for(str(target.path)) if one.name != record.name]
    paired = paired_draft(str(target.path))
    for name in (*names, *([paired] if paired else [])):
        try:
            return Candidate(name, resolve(name, pull_missing=False), was_there=True)
        except EdgespecError:
            continue
    return Candidate("no draft", None, was_there=True)


# ---- what is measured of one draft: prompts are answered with the draft and without, in turns ----
#
# timing     plain, and 4 tokens drafted at each step; greedy. The pair's profile learns from it
# round n    plain, and "auto" as users get it; greedy, then at 0.8


GREEDY, SAMPLED = 0.0, 0.8

DRAFTING = "auto"
"""The variant that is compared with plain decoding: the default."""


_TIMED = Variant("model", "model", 4)


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """Part of an evaluation, run in one process."""

    target: str
    draft: str | None
    """None: no draft model, only text seen before."""
    prompts: tuple[Prompt, ...]
    settings: EvaluationSettings
    round: int | None
    """None: the timing. Runs at SAMPLED are numbered after all greedy rounds."""

    @property
    def n_runs(self) -> int:
        """Most runs that this takes."""
        return (2 if self.round is None else 4) * len(self.prompts)

    def runs(self, on_count: Callable[[int], None]) -> tuple[Run, ...]:
        """Measure in a new process, and call `on_count` with 0, 1, ... runs. Raises EdgespecError."""
        settings = self.settings
        drafter: DrafterName = "auto" if self.draft else "suffix"
        greedy = BenchSettings((_TIMED,), settings.n_predict, GREEDY, learns=True)
        sittings = [(greedy, 0)]
        if self.round is not None:
            drafting = replace(greedy, variants=(Variant(DRAFTING, drafter),), learns=False)
            sampled = replace(drafting, temperature=SAMPLED)
            sittings = [(drafting, self.round), (sampled, self.round + settings.rounds)]
        task = CellTask(
            self.target,
            self.draft,
            drafter,
            settings.kernels,
            settings.n_threads,
            self.prompts,
            tuple(sittings),
        )
        return task.measure(on_count).runs


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
