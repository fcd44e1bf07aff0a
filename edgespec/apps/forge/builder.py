"""Builds the drafts that are evaluated: a trained head (training/, extra `forge`) in each quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.apps.forge.dataset import Dataset
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.runs import draft_of, earlier_training, read_token_ids, write_token_ids
from edgespec.apps.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, ModelWeights
from edgespec.apps.forge.vocabulary_ranking import Ids, VocabularyRanking, rank, read_vocabulary, renew
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.head_file import read_head
from edgespec.models.draft_records import drafts_for, is_here, paired_draft
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import ModelFile
from edgespec.models.resolve import resolve
from edgespec.models.sources import format_size
from edgespec.platform.memory import available_bytes

if TYPE_CHECKING:
    from edgespec.apps.forge.training.loop import TrainingProgress

TYPES = ("q4_0", "q8_0")

KEEP = 16384
"""Tokens that a draft can say by default, where the target has more."""

LEARNING_RATE = 0.2
"""Learning rate of a head that learns from its mistakes: a night must not unlearn what weeks taught."""

_HEAD_BYTES = 64 << 20  # of a file, roughly
_BYTES_PER_PARAMETER = 16  # the parameter, its gradient, two moments
_BYTES_OF_BATCH = 1 << 30  # activations, logits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """How long to train a head, and from what."""

    hours: float | None = None
    tokens: int | None = None
    """Length of the training: hours or tokens."""
    start: str | None = None
    """The head whose weights the training starts from; None: the last training's, or the best."""
    keep: int | None = None
    """Tokens that a draft can say; None: KEEP, or all."""
    types: tuple[str, ...] = TYPES

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be."""
        if (self.hours is None) == (self.tokens is None):
            raise UsageError("say how long to train: either hours or tokens", field="hours")
        for name in ("hours", "tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError("must be above 0", field=name, value=value)
        if not self.types:
            raise UsageError("name at least one", field="types")


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """Length and outcome of a training."""

    n_tokens: int
    """Repetitions counted."""
    hours: float
    acceptance: tuple[float, ...]
    """Share accepted of held-out texts at position 1, at position 2 given that the first was, ..."""
    curve: tuple[tuple[int, float, tuple[float, ...]], ...]
    """Looks at it meanwhile: tokens, hours, acceptance."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training that is asked for."""

    dataset: Dataset
    target: ModelWeights
    token_ids: Ids
    """Tokens that the draft can say, ascending."""
    hours: float | None
    tokens: int | None
    folder: Path
    start: Path | None
    """Weights to start from: the folder of an earlier training, or the file of a head."""
    seed: int = 0
    start_rate: float | None = None
    """Learning rate from these weights, as a share of the usual one; None: as from another training's."""


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A draft that was built: its file, and the training it came from."""

    type_: str
    """Such as "q4_0"."""
    path: Path
    trained: TrainingSummary
    parent: str | None
    """The draft that its weights started from."""
    share: float = 1.0
    """Part of its training, where the rest of its weights are the parent's (guard.py)."""

    @property
    def label(self) -> str:
        """Such as "head-q4_0"."""
        return f"head-{self.type_}"


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        raise EdgespecError("training needs JAX: pip install 'edgespec[forge]'")


class DraftBuilder:
    """Builds the drafts for one target."""

    def __init__(
        self, target: ModelFile, header: GGUFHeader, request: TrainingRequest, installed: Path | None = None
    ) -> None:
        """Check that the drafts can be built. Raises UsageError and EdgespecError, such as without JAX.

        `installed`: the file of the head that learns from where it was wrong; None: a head is made.
        """
        self._target, self._header, self._request = target, header, request
        self._installed = installed
        require_jax()
        weights = ModelWeights(header)
        for name in (EMBEDDINGS, weights.output, OUTPUT_NORM):
            weights.info(name)
        self._vocabulary = read_vocabulary(header)
        self._cut_of(rank(self._vocabulary, ()))  # refuses a wrong number before anything is written
        self._start = None if request.start is None else self._named_head(request.start)

    def expected_bytes(self) -> int:
        """Estimate the bytes of all drafts, and of the files that they are written from."""
        return 2 * _HEAD_BYTES * len(self._request.types)

    def build(self, dataset: Dataset, folder: Path, run: Path, context: StageContext) -> list[DraftFile]:
        """Build the drafts in `folder`, with checkpoints in the run directory `run` (runs.py).

        Training starts from weights of earlier runs. Raises EdgespecError, and KeyboardInterrupt when it is
        stopped: the checkpoints stay.
        """
        job = TrainingJob(
            dataset=dataset,
            target=ModelWeights(self._header),
            token_ids=self._token_ids(dataset, run, context),
            hours=self._request.hours,
            tokens=self._request.tokens,
            folder=run / "head",
            start=self._start or self._usual_start(run),
            seed=int(run.name),
            start_rate=LEARNING_RATE if self._installed else None,
        )
        trained, files = train_head(job, folder, self._request.types, context)
        parent = job.start.stem if job.start and job.start.is_file() else draft_of(job.start)
        return [DraftFile(type_, path, trained, parent) for type_, path in files.items()]

    def _usual_start(self, run: Path) -> Path | None:
        if installed := self._installed:  # rather its weights before they were rounded
            return earlier_training(run, installed.stem) or installed
        return earlier_training(run) or self._best_head()

    def _named_head(self, name: str) -> Path:
        path = resolve(name)
        if not self._is_head(path):
            problem = f"no head for {self._target.name}: name one that `edgespec draft make` made for it"
            raise UsageError(problem, field="start", value=name)
        return path

    def _best_head(self) -> Path | None:
        """Return the file of the target's best head: made here, or its pair's."""
        made = [one.name for one in drafts_for(str(self._target.path))]
        if made:
            return resolve(made[0])
        paired = paired_draft(str(self._target.path))
        path = resolve(paired) if paired and is_here(paired) else None
        return path if path and self._is_head(path) else None

    def _is_head(self, path: Path) -> bool:
        head = read_head(check_model_file(path, or_head=True))
        return head is not None and head.target_sha256 == sha256_of(self._target.path)

    def _token_ids(self, dataset: Dataset, run: Path, context: StageContext) -> Ids:
        """Return the tokens that the drafts of a run can say, ascending; chosen once a run."""
        stored = read_token_ids(run)
        if stored is not None:
            return stored
        context.on_progress(StageProgress("choosing tokens", 0.0))
        head = read_head(check_model_file(self._installed)) if self._installed else None
        if head and self._request.keep is None:
            ids = renew(head.token_ids, self._vocabulary, list(dataset.texts(held_out=False)))
            write_token_ids(run, ids)
            return ids
        ranking = rank(
            self._vocabulary,
            list(dataset.texts(held_out=False)),
            ModelWeights(self._header),
            on_progress=lambda share: context.on_progress(StageProgress("choosing tokens", share)),
        )
        ids = self._cut_of(ranking)
        write_token_ids(run, ids)
        return ids

    def _cut_of(self, ranking: VocabularyRanking) -> Ids:
        """Return the tokens to keep, ascending. Raises UsageError where nothing would be cut, or too much."""
        keep = self._request.keep
        if keep is not None or len(ranking.order) > KEEP:
            return ranking.cut(keep or KEEP)
        return np.sort(ranking.order)


def train_head(
    job: TrainingJob, folder: Path, types: Sequence[str], context: StageContext
) -> tuple[TrainingSummary, dict[str, Path]]:
    """Train a head and write it to `folder` in each quantization of `types`.

    Raises EdgespecError, and KeyboardInterrupt when it is stopped, with a checkpoint.
    """
    from edgespec.apps.forge.training.head import HeadFamily
    from edgespec.apps.forge.training.loop import WARM_START_RATE, TextLessons, TrainingSettings, train

    stage = "training head"
    context.on_progress(StageProgress(stage, 0.0, "preparing"))
    _check_memory(job.target)
    head = HeadFamily(
        job.target, job.dataset.target.sha256, job.token_ids, sample=job.dataset.texts(held_out=False)
    )

    def show(now: TrainingProgress) -> None:
        context.on_progress(StageProgress(stage, now.share, now.figures, now.left_s))

    trained = train(
        TextLessons(head, job.dataset, mixes=job.start_rate is not None),
        TrainingSettings(
            hours=job.hours, tokens=job.tokens, seed=job.seed, start_rate=job.start_rate or WARM_START_RATE
        ),
        job.folder,
        start=head.read(job.start) if job.start and job.start.is_file() else job.start,
        on_progress=show,
        on_message=context.on_message,
    )
    files = {}
    for type_ in types:
        context.on_progress(StageProgress(stage, 1.0, f"writing it as {type_}"))
        files[type_] = folder / f"head-{type_}.gguf"
        head.export(trained.params, files[type_], type_)
    curve = tuple((n, seconds / 3600, one.by_position) for n, seconds, one in trained.history)
    found = TrainingSummary(trained.n_tokens, trained.elapsed_s / 3600, trained.acceptance.by_position, curve)
    return found, files


def _check_memory(target: ModelWeights) -> None:
    """Raise EdgespecError if the parameters and their optimizer state do not fit in memory."""
    shape = target.shape()
    n = shape.n_embd
    n_parameters = n * (2 * n + 2 * (shape.n_head + shape.n_head_kv) * shape.head_dim + 6 * n)
    available = available_bytes()
    needed = _BYTES_PER_PARAMETER * n_parameters + _BYTES_OF_BATCH
    if available is not None and needed > available:
        raise EdgespecError(
            f"not enough memory to train: about {format_size(needed)} needed, "
            f"{format_size(available)} available; close other programs"
        )
