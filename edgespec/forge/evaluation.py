"""`edgespec draft eval`: a draft that was made here, judged again beside the target's other draft."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.dataset import Dataset, Target
from edgespec.forge.judging import Contender, Judged, Judging
from edgespec.forge.progress import Surroundings
from edgespec.forge.texts import questions_for
from edgespec.forge.trial import JudgingSettings, Question
from edgespec.forge.workshop import draft_file
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.hashes import sha256_of
from edgespec.models.made_drafts import MadeDraft, drafts_for, read_record, write_record
from edgespec.models.quantizations import ModelFile, model_file
from edgespec.models.registry import load_registry
from edgespec.models.resolve import resolve


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What was measured."""

    target_name: str
    draft: Judged
    other: Judged | None
    """The target's other draft, or none at all; None: it could not be judged."""


def evaluate(
    name: str,
    target: str | None,
    questions: Sequence[Question] | None,
    settings: JudgingSettings,
    around: Surroundings,
) -> Evaluated:
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
        made_for = Target.of(check_model_file(model.path), model.name, sha256)
        dataset = Dataset(made_for, on_message=around.on_message)
        questions = questions_for(dataset, settings.n_questions)
    mine, other = Contender(name, path), _other(record, model)
    with tempfile.TemporaryDirectory() as folder:
        judging = Judging(
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
    return Evaluated(model.name, found[mine], found.get(other))


def keep_judged(judged: Judged) -> None:
    """Write what was measured of a draft that was made here into its record; of others nothing is kept."""
    path, timing = judged.contender.path, judged.timing
    record = read_record(path) if path else None
    if path and record and timing:
        changed = replace(
            record, gains=judged.gains, acceptance=timing.acceptance, cost_ratio=timing.cost_ratio
        )
        write_record(path, changed)


def _target(record: MadeDraft, target: str | None) -> ModelFile:
    try:
        return model_file(target or record.target_name)
    except UsageError:
        if target:
            raise
        problem = f"{record.name} was made for a file called {record.target_name}: say where that is"
        raise UsageError(problem, field="target") from None


def _other(record: MadeDraft, target: ModelFile) -> Contender:
    """Return the best other draft of the target that is here, or none."""
    names = [one.name for one in drafts_for(str(target.path)) if one.name != record.name]
    paired = load_registry().complete(target.name, None)[1]
    for name in (*names, *([paired] if paired else [])):
        try:
            return Contender(name, resolve(name, pull_missing=False), was_there=True)
        except EdgespecError:
            continue
    return Contender("no draft", None, was_there=True)
