"""Builds the drafts that are evaluated: files, each a family in a quantization.

trained        a family as training left it (families.py), in each quantization
not trained    the source's weights with a cut output vocabulary (vocabulary_cut.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from edgespec.drafting.foreign.vocabulary_match import compare_vocabularies
from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.dataset import Dataset
from edgespec.forge.families import (
    MADE_OF_SOURCE,
    TrainingJob,
    TrainingSummary,
    check_trainable,
    require_jax,
    train_family,
)
from edgespec.forge.progress import StageContext, StageProgress
from edgespec.forge.runs import (
    draft_of,
    earlier_token_ids,
    earlier_training,
    read_token_ids,
    write_token_ids,
)
from edgespec.forge.training.weights import ModelWeights
from edgespec.forge.vocabulary_cut import check_source, cut, read_vocabulary
from edgespec.forge.vocabulary_ranking import Ids, VocabularyRanking, rank
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.head_file import read_head
from edgespec.llama.quantize import quantize
from edgespec.llama.weights import Model
from edgespec.models.draft_records import Family, drafts_for, is_here, paired_draft
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import ModelFile, expected_bytes, model_file, quantization_in
from edgespec.models.registry import load_registry
from edgespec.models.resolve import locate, resolve

FAMILIES: tuple[Family, ...] = get_args(Family)

TYPES = ("q4_0", "q8_0")

KEEP = 16384
"""Tokens that a draft can say by default, where the target has more."""

_HEAD_BYTES = 64 << 20  # of a file without a small model, roughly


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """Which drafts to build, and how long to train them."""

    families: tuple[Family, ...] = FAMILIES
    hours: float | None = None
    tokens: int | None = None
    """Length of all trainings together; 0: only cut the whole model's vocabulary."""
    source: str | None = None
    """The small model for MADE_OF_SOURCE; None: the one of the registry's pair."""
    start: str | None = None
    """The head whose weights the training of a head starts from; None: the last training's, or the best."""
    keep: int | None = None
    """Tokens that a draft can say; None: KEEP, or all."""
    types: tuple[str, ...] = TYPES

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be."""
        for name in ("hours", "tokens"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError("must be 0 or more", field=name, value=value)
        if (self.hours is None) == (self.tokens is None):
            raise UsageError("say how long to train: either hours or tokens", field="hours")
        if not self.families or not self.types:
            raise UsageError("name at least one", field="families" if self.types else "types")
        if not self.trains and self.families != ("whole",):
            other = next(one for one in self.families if one != "whole")
            problem = f"{other} has to be trained: give it hours or tokens, or choose whole alone"
            raise UsageError(problem, field="families")
        if self.start is not None and not (self.trains and "head" in self.families):
            raise UsageError("only the training of a head starts from one", field="start", value=self.start)

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return bool(self.hours or self.tokens)


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A draft that was built."""

    label: str
    """Such as "head-q4_0"; "cut-q4_0" without training."""
    family: Family
    path: Path
    trained: TrainingSummary | None
    parent: str | None
    """The draft or model that its weights started from."""


def possible_families(target: str, source: str | None, *, trains: bool) -> tuple[Family, ...]:
    """Return the families that can be built for `target`: without a small model, those that need none."""
    if not trains:
        return ("whole",)
    has_source = source or _paired(target)
    return FAMILIES if has_source else tuple(one for one in FAMILIES if one not in MADE_OF_SOURCE)


def small_model(target: str, request: TrainingRequest) -> str | None:
    """Return the name of the small model that drafts are made of; None: the families need none.

    Raises UsageError if none is known.
    """
    if not MADE_OF_SOURCE & {*request.families}:
        return None
    name = request.source or _paired(target)
    if name is None:
        raise UsageError(
            f"no small model is known for {_name(target)}, and whole and shallow drafts are made of one: "
            "name it, or choose the family head",
            field="source",
        )
    return name


def _paired(target: str) -> str | None:
    """Return the small model of the registry's pair with this target."""
    by_name = load_registry().complete(_name(target), None, writes=True)[1]
    return by_name or paired_draft(target, writes=True)


def _name(target: str) -> str:
    found = locate(target)
    return found.stem if isinstance(found, Path) else found.name


class DraftBuilder:
    """Builds the drafts for one target."""

    def __init__(self, target: ModelFile, header: GGUFHeader, request: TrainingRequest) -> None:
        """Check that the drafts can be built.

        Raises UsageError and EdgespecError: no source, one of another vocabulary or architecture, no JAX.
        """
        self._target, self._header, self._request = target, header, request
        if request.trains:
            require_jax()
        self.source: ModelFile | None = None
        headers = [header]
        if name := small_model(str(target.path), request):
            self.source = model_file(name)
            self._source_header = check_model_file(self.source.path)
            check_source(self._source_header)
            self._check_vocabularies(self.source)
            headers.append(self._source_header)
        for family in request.families if request.trains else ():
            check_trainable(family, ModelWeights(header), self._weights(family))
        # Models of one vocabulary may differ in their padding.
        self._vocabulary = read_vocabulary(min(headers, key=lambda one: one.n_vocab))
        by_id = rank(self._vocabulary, ())
        self._n_words = len(by_id.order)
        self._cut_of(by_id)  # refuses a wrong number of tokens before anything is written
        self._start = None if request.start is None else self._named_head(request.start)

    def _check_vocabularies(self, source: ModelFile) -> None:
        with (
            Model(self._target.path, vocab_only=True) as target,
            Model(source.path, vocab_only=True) as small,
        ):
            match = compare_vocabularies(target, small)
        if not match.equal:
            problem = f"{match.reason}; choose a small model of the target's family"
            raise UsageError(problem, field="source", value=source.name)

    def expected_bytes(self) -> int:
        """Estimate the bytes of all drafts, and of the models they are cut from."""
        n_bytes = 0
        for family in self._request.families:
            for type_ in self._request.types:
                has_source = family in MADE_OF_SOURCE
                n_bytes += expected_bytes(self._origin(), type_) if has_source else _HEAD_BYTES
        return 2 * n_bytes

    def build(self, dataset: Dataset, folder: Path, run: Path, context: StageContext) -> list[DraftFile]:
        """Build the drafts in `folder`, with checkpoints in the run directory `run` (runs.py).

        Training starts from weights of earlier runs. Raises EdgespecError, and KeyboardInterrupt when it is
        stopped: the checkpoints stay.
        """
        request = self._request
        token_ids = self._token_ids(dataset, run, context)
        found: list[DraftFile] = []
        for family in request.families if request.trains else ():
            job = self._job(family, dataset, token_ids, run)
            trained, files = train_family(job, folder, request.types, context)
            parent = self._parent(job)
            for type_, path in files.items():
                found.append(DraftFile(f"{family}-{type_}", family, path, trained, parent))
        if "whole" in request.families and len(token_ids) < self._n_words:
            found += self._cuts(token_ids, folder, context)
        return found

    def _job(self, family: Family, dataset: Dataset, token_ids: Ids, run: Path) -> TrainingJob:
        request, n = self._request, len(self._request.families)
        named = self._start if family == "head" else None
        start = named or earlier_training(run, family, token_ids)
        if start is None and family == "head":
            start = self._best_head()
        return TrainingJob(
            family=family,
            dataset=dataset,
            target=ModelWeights(self._header),
            source=self._weights(family),
            token_ids=token_ids,
            hours=None if request.hours is None else request.hours / n,
            tokens=None if request.tokens is None else max(1, request.tokens // n),
            folder=run / family,
            start=start,
            seed=int(run.name),
        )

    def _named_head(self, name: str) -> Path:
        path = resolve(name)
        if not self._is_head(path):
            problem = f"no head for {self._target.name}: name one that `edgespec draft make` made for it"
            raise UsageError(problem, field="start", value=name)
        return path

    def _best_head(self) -> Path | None:
        """Return the file of the target's best head: made here, or its pair's."""
        made = [one.name for one in drafts_for(str(self._target.path)) if one.family == "head"]
        if made:
            return resolve(made[0])
        paired = paired_draft(str(self._target.path))
        path = resolve(paired) if paired and is_here(paired) else None
        return path if path and self._is_head(path) else None

    def _is_head(self, path: Path) -> bool:
        """Return whether a model file is a head for the target."""
        head = read_head(check_model_file(path))
        return head is not None and head.target_sha256 == sha256_of(self._target.path)

    def _parent(self, job: TrainingJob) -> str | None:
        """Return the draft or model whose weights a training starts from."""
        if job.start and job.start.is_file():
            return job.start.stem
        return draft_of(job.start) or (self.source.name if self.source and job.source else None)

    def _weights(self, family: Family) -> ModelWeights | None:
        """Return the small model that a family is made of, in the best quantization here."""
        return ModelWeights(check_model_file(self._origin())) if family in MADE_OF_SOURCE else None

    # ---- which tokens ----

    def _token_ids(self, dataset: Dataset, run: Path, context: StageContext) -> Ids:
        """Return the tokens that the drafts of a run can say, ascending; chosen once a run."""
        stored = read_token_ids(run)
        if stored is not None:
            return stored
        context.on_progress(StageProgress("choosing tokens", 0.0))
        ranking = rank(
            self._vocabulary,
            list(dataset.texts(held_out=False)),
            ModelWeights(self._header),
            on_progress=lambda share: context.on_progress(StageProgress("choosing tokens", share)),
        )
        ids = self._cut_of(ranking)
        earlier = earlier_token_ids(run, len(ids), self._request.families) if self._request.trains else None
        if earlier is not None:
            ids = earlier
        write_token_ids(run, ids)
        return ids

    def _cut_of(self, ranking: VocabularyRanking) -> Ids:
        """Return the tokens to keep, ascending. Raises UsageError where nothing would be cut, or too much."""
        keep = self._request.keep
        if keep is not None or len(ranking.order) > KEEP:
            return ranking.cut(keep or KEEP)
        if not self._request.trains:
            problem = f"the model has only {len(ranking.order):,} tokens: say how many to keep"
            raise UsageError(problem, field="keep")
        return np.sort(ranking.order)

    # ---- without training ----

    def _cuts(self, token_ids: Ids, folder: Path, context: StageContext) -> list[DraftFile]:
        assert self.source is not None  # noqa: S101 - for the type checker: whole has one
        found = []
        for i, type_ in enumerate(self._request.types):
            context.on_progress(StageProgress("cutting", i / len(self._request.types), type_))
            path = folder / f"cut-{type_}.gguf"
            self._cut(type_, path, token_ids)
            found.append(DraftFile(f"cut-{type_}", "whole", path, None, self.source.name))
        return found

    def _cut(self, type_: str, path: Path, token_ids: Ids) -> None:
        """Write a cut draft as `path`; the whole model in its quantization is temporary."""
        assert self.source is not None  # noqa: S101
        whole = self.source.path
        own = quantization_in(self.source.name) or quantization_in(whole.stem)
        if type_ != own:
            whole = path.with_name(f"uncut-{type_}.gguf")
            quantize(self._origin(), whole, type_, pure=True)
        try:
            sha256 = sha256_of(self.source.path)
            cut(check_model_file(whole), path, token_ids, source_sha256=sha256)
        finally:
            if whole != self.source.path:
                whole.unlink(missing_ok=True)

    def _origin(self) -> Path:
        """Return the file to quantize: the one that the source was made from, if it is here."""
        assert self.source is not None  # noqa: S101
        try:
            made_from = self.source.made_from
            return resolve(made_from, pull_missing=False) if made_from else self.source.path
        except EdgespecError:
            return self.source.path
