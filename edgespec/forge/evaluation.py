"""What drafts are worth: tokens a second through the real loop, each draft and plain decoding in turns.

    timing    each draft        the cost of a drafted token, acceptance by position
    round 0   each draft        question 1: plain, drafting   question 2: drafting, plain   ...
    round 1   the better ones   the other way round, with the next seed
    ...

Each draft has its own process for each round (evaluation_process.py): memory often holds one target only.
Drafts are compared by their speed-ups over the plain runs between theirs, so that a machine that drifts does
so for all alike. Every finished part is a file: an evaluation that was stopped resumes.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edgespec.benchmark.runs import Run, rotated
from edgespec.benchmark.summary import VariantComparison, compare
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.forge.data_stage import questions_for
from edgespec.forge.dataset import Dataset, DatasetTarget
from edgespec.forge.draft_store import draft_file
from edgespec.forge.evaluation_process import (
    DRAFTING,
    DraftTiming,
    EvaluationPrompt,
    EvaluationSettings,
    EvaluationTask,
)
from edgespec.forge.progress import ProgressFn, StageContext, StageProgress, unseen
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.draft_records import DraftRecord, DraftSpeedups, drafts_for, read_record, write_record
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import ModelFile, model_file
from edgespec.models.registry import load_registry
from edgespec.models.resolve import resolve
from edgespec.platform.files import write_atomically
from edgespec.platform.messages import MessageFn, silent

_KEPT_AFTER_ROUND = 2  # candidates that are judged on after the first round, beside what was there


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft that is judged, or none."""

    name: str
    path: Path | None
    """None: no draft model, only text seen before."""
    was_there: bool = False
    """Whether it is what the others have to beat; judged in every round."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What was measured of one contender."""

    contender: Candidate
    timing: DraftTiming | None
    """None: without a draft model."""
    greedy: VariantComparison
    sampled: VariantComparison
    """Drafting beside plain decoding, at temperature 0 and at 0.8."""
    rounds: int
    runs: tuple[Run, ...]
    """All of them."""
    size: int | None
    """Bytes of its file; None: without a draft model."""

    @property
    def gains(self) -> DraftSpeedups:
        """The median speed-ups; 1 where nothing was written, so that nothing could be compared."""
        medians = [one.speedup.median if one.speedup else 1.0 for one in (self.greedy, self.sampled)]
        return DraftSpeedups(*medians)


@dataclass(frozen=True, slots=True)
class _StoredRuns:
    """A file of runs."""

    key: str
    runs: tuple[Run, ...]


class Evaluator:
    """Judges drafts of one target, in a folder of its own."""

    def __init__(
        self,
        target: Path,
        questions: Sequence[EvaluationPrompt],
        settings: EvaluationSettings,
        folder: Path,
        *,
        on_progress: ProgressFn = unseen,
        on_message: MessageFn = silent,
    ) -> None:
        """Judge by `questions`; parts that were measured in `folder` before are used again.

        `on_message` takes lines that the user should know. Raises EdgespecError without questions.
        """
        if not questions:
            problem = "there is no prompt to judge drafts by: let the target write more, or name a suite"
            raise EdgespecError(problem)
        self._target, self._questions, self._settings = target, tuple(questions), settings
        self._folder = folder
        self._on_progress, self._on_message = on_progress, on_message
        self._sha256: dict[Path | None, str] = {None: "", target: sha256_of(target)}
        self._done = self._total = 0

    def judge(self, contenders: Sequence[Candidate]) -> list[CandidateResult]:
        """Return what was measured of each contender that could run, in their order.

        After the first round only the best two, and what was there, are judged on. A contender that cannot
        run is left out, which is told in a line. Raises EdgespecError if none can.
        """
        rounds = self._settings.rounds
        n_later = min(len(contenders), _KEPT_AFTER_ROUND + sum(one.was_there for one in contenders))
        n_timed = sum(one.path is not None for one in contenders)
        self._done, self._total = 0, n_timed + len(contenders) + (rounds - 1) * n_later
        timings: dict[Candidate, DraftTiming | None] = {}
        runs: dict[Candidate, list[Run]] = {}
        for one in contenders:
            try:
                timings[one] = DraftTiming.of(self._part(one, None)) if one.path else None
                runs[one] = []
            except EdgespecError as error:
                self._on_message(f"{one.name} is left out: {error}")
        going = list(runs)
        for round_ in range(rounds):
            for one in rotated(going, round_) if going else ():
                try:
                    runs[one] += self._part(one, round_)
                except EdgespecError as error:
                    self._on_message(f"{one.name} is left out: {error}")
                    del runs[one]
            going = [one for one in going if one in runs]
            if round_ == 0:
                going = _better(going, {one: _judged(one, None, runs[one], rounds) for one in going})
        if not runs:
            raise EdgespecError("no draft could be judged; the lines above say why")
        return [_judged(one, timings[one], found, rounds) for one, found in runs.items()]

    def _part(self, one: Candidate, round_: int | None) -> tuple[Run, ...]:
        """Return the runs of a contender in one round (None: those of the timing), measured or as kept."""
        what = f"timing {one.name}" if round_ is None else f"round {round_ + 1} of {one.name}"
        trial = EvaluationTask(
            target=str(self._target),
            draft=str(one.path) if one.path else None,
            questions=self._questions,
            settings=self._settings,
            round=round_,
        )
        key = self._key(one, trial)
        file = self._folder / f"{key[:16]}.json"
        runs = _read(file, key)
        if runs is None:
            found: list[Run] = []
            self._show(what, 0.0)
            for run in trial.runs():
                found.append(run)
                self._show(what, len(found) / trial.n_runs)
            runs = tuple(found)
            try:
                write_atomically(file, msgspec.json.encode(_StoredRuns(key, runs)))
            except OSError as error:
                problem = f"what was judged cannot be kept: {describe_os_error(error)}"
                raise EdgespecError(problem) from error
        self._done += 1
        return runs

    def _show(self, what: str, share: float) -> None:
        self._on_progress(StageProgress("judging", min(1.0, (self._done + share) / self._total), what))

    def _key(self, one: Candidate, trial: EvaluationTask) -> str:
        """Return a hash of what the runs depend on: the files' contents, not their names."""
        if one.path not in self._sha256 and one.path:
            self._sha256[one.path] = sha256_of(one.path)
        files = self._sha256[self._target], self._sha256[one.path]
        facts = msgspec.json.encode((files, replace(trial, target="", draft=None)))
        return hashlib.sha256(facts).hexdigest()


def _read(file: Path, key: str) -> tuple[Run, ...] | None:
    """Return the runs in a file; None if it is missing, damaged or of something else."""
    try:
        part = msgspec.json.decode(file.read_bytes(), type=_StoredRuns)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return part.runs if part.key == key else None


def _better(going: Sequence[Candidate], judged: dict[Candidate, CandidateResult]) -> list[Candidate]:
    """Return those that are judged on after the first round: what was there, and the best of the others."""
    new = [one for one in going if not one.was_there]
    new.sort(key=lambda one: judged[one].gains.mean, reverse=True)
    return [one for one in going if one.was_there or one in new[:_KEPT_AFTER_ROUND]]


def _judged(one: Candidate, timing: DraftTiming | None, runs: Sequence[Run], rounds: int) -> CandidateResult:
    greedy = [run for run in runs if run.round < rounds]
    sampled = [run for run in runs if run.round >= rounds]
    n_rounds = len({run.round for run in greedy})
    size = one.path.stat().st_size if one.path else None
    variants = compare(greedy, DRAFTING), compare(sampled, DRAFTING)
    return CandidateResult(one, timing, *variants, n_rounds, tuple(runs), size)


@dataclass(frozen=True, slots=True)
class DraftEvaluation:
    """What was measured."""

    target_name: str
    draft: CandidateResult
    other: CandidateResult | None
    """The target's other draft, or none at all; None: it could not be judged."""


def evaluate(
    name: str,
    target: str | None,
    questions: Sequence[EvaluationPrompt] | None,
    settings: EvaluationSettings,
    around: StageContext,
) -> DraftEvaluation:
    """Judge the draft `name` for `target`, by default the one it was made for, and keep that in its record.

    `questions`: by default prompts that it was not trained on. Raises UsageError and EdgespecError in one
    line.
    """
    path = draft_file(name)
    record = read_record(path)
    assert record is not None  # noqa: S101 - for the type checker: draft_file found one
    model = _target(record, target)
    sha256 = sha256_of(model.path)
    fits = sha256 == record.target_sha256
    if not fits and record.family == "head":
        raise UsageError(
            f"{name} was made for another file, {record.target_name} with the SHA-256 "
            f"{record.target_sha256[:12]}; a head drafts for that one only",
            field="target",
            value=model.name,
        )
    if questions is None:
        made_for = DatasetTarget.of(check_model_file(model.path), model.name, sha256)
        dataset = Dataset(made_for, on_message=around.on_message)
        questions = questions_for(dataset, settings.n_questions)
    mine, other = Candidate(name, path), _other(record, model)
    with tempfile.TemporaryDirectory() as folder:
        judging = Evaluator(
            model.path,
            questions,
            settings,
            Path(folder),
            on_progress=around.on_progress,
            on_message=around.on_message,
        )
        found = {one.contender: one for one in judging.judge([mine, other])}
    if mine not in found:
        raise EdgespecError(f"{name} could not be judged; the line above says why")
    if fits:
        keep_judged(found[mine])
    return DraftEvaluation(model.name, found[mine], found.get(other))


def keep_judged(judged: CandidateResult) -> None:
    """Write what was measured of a draft that was made here into its record; of others nothing is kept."""
    path, timing = judged.contender.path, judged.timing
    record = read_record(path) if path else None
    if path and record and timing:
        changed = replace(
            record, gains=judged.gains, acceptance=timing.acceptance, cost_ratio=timing.cost_ratio
        )
        write_record(path, changed)


def _target(record: DraftRecord, target: str | None) -> ModelFile:
    try:
        return model_file(target or record.target_name)
    except UsageError:
        if target:
            raise
        problem = f"{record.name} was made for a file called {record.target_name}: say where that is"
        raise UsageError(problem, field="target") from None


def _other(record: DraftRecord, target: ModelFile) -> Candidate:
    """Return the best other draft of the target that is here, or none."""
    names = [one.name for one in drafts_for(str(target.path)) if one.name != record.name]
    paired = load_registry().complete(target.name, None)[1]
    for name in (*names, *([paired] if paired else [])):
        try:
            return Candidate(name, resolve(name, pull_missing=False), was_there=True)
        except EdgespecError:
            continue
    return Candidate("no draft", None, was_there=True)
