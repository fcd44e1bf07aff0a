"""Training one family of drafts (training/, which needs the extra `forge`), and the files that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.dataset import Dataset
from edgespec.forge.progress import StageContext, StageProgress
from edgespec.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, ModelWeights
from edgespec.forge.vocabulary_ranking import Ids
from edgespec.models.draft_records import Family
from edgespec.models.sources import format_size
from edgespec.platform.files import write_atomically
from edgespec.platform.memory import available_bytes

if TYPE_CHECKING:
    from edgespec.forge.training import family as protocol
    from edgespec.forge.training.loop import TrainingProgress

SHALLOW_SHARE = 2 / 3
"""Of the source's layers, those that a shallow draft has."""

WHOLE_RANK = 16
"""Rank of the change to each matrix that a whole draft learns: more takes more memory than laptops have."""

_FEWEST_LAYERS = 3  # of a source that a shallow draft is made of: two stay at least

_LAYERS = "layers.json"  # in the folder of a training: those of the source that a shallow draft has
_TEXTS_FOR_LAYERS = 16  # that they are chosen by

_BYTES_A_PARAMETER = 16  # the parameter, its slope, two moments
_BYTES_BESIDE = 1 << 30  # activations, logits of a batch


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """What came of training a draft."""

    n_tokens: int
    """Trained on, repetitions counted."""
    hours: float
    acceptance: tuple[float, ...]
    """On held-out texts: share right at position 1, at position 2 given that the first was, ..."""
    curve: tuple[tuple[int, float, tuple[float, ...]], ...]
    """Of each evaluation the tokens trained on, the hours, and the acceptance."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training."""

    family: Family
    dataset: Dataset
    target: ModelWeights
    source: ModelWeights | None
    """The small model that shallow and whole are made of."""
    token_ids: Ids
    """Tokens that the draft can say, ascending."""
    hours: float | None
    tokens: int | None
    """The first of both that is used up ends it."""
    folder: Path
    """Its checkpoints; it goes on from those that are there."""
    start: Path | None
    """What has weights to begin with: the folder of an earlier training of this family with these tokens, or
    the file of a head."""
    seed: int = 0
    """Of the order in which texts are read: another one than the training before had."""


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        problem = "training needs JAX: pip install 'edgespec[forge]', or train nothing (--hours 0)"
        raise EdgespecError(problem)


def check_trainable(family: Family, target: ModelWeights, source: ModelWeights | None) -> None:
    """Raise UsageError in one line for models that this family cannot be trained for, or of."""
    if family == "head":
        for name in (EMBEDDINGS, target.output, OUTPUT_NORM):
            target.info(name)
    elif source:
        from edgespec.forge.training.decoder import read_decoder

        read_decoder(source)
        if family == "shallow" and source.header.n_layer < _FEWEST_LAYERS:
            problem = f"{source.header.path.name} has too few layers to leave some out: choose others"
            raise UsageError(problem, field="families", value=family)


def train_family(
    job: TrainingJob, folder: Path, types: Sequence[str], around: StageContext
) -> tuple[TrainingSummary, dict[str, Path]]:
    """Train a draft and write it to `folder` in each quantization of `types`.

    Raises EdgespecError in one line, and KeyboardInterrupt when it is stopped, with a checkpoint.
    """
    from edgespec.forge.training.loop import TrainingSettings, train

    stage = f"training {job.family}"
    around.on_progress(StageProgress(stage, 0.0, "preparing"))
    _check_memory(job)
    family, start = _family(job)

    def show(now: TrainingProgress) -> None:
        around.on_progress(StageProgress(stage, now.share, _figures(now), now.left_s))

    trained = train(
        family,
        job.dataset,
        TrainingSettings(hours=job.hours, tokens=job.tokens, seed=job.seed),
        job.folder,
        start=start,
        on_progress=show,
        on_message=around.on_message,
    )
    files = {}
    for type_ in types:
        around.on_progress(StageProgress(stage, 1.0, f"writing it as {type_}"))
        files[type_] = folder / f"{job.family}-{type_}.gguf"
        family.export(trained.params, files[type_], type_)
    curve = tuple((n, seconds / 3600, one.by_position) for n, seconds, one in trained.history)
    found = TrainingSummary(trained.n_tokens, trained.elapsed_s / 3600, trained.acceptance.by_position, curve)
    return found, files


def _family(job: TrainingJob) -> tuple[protocol.TrainableFamily, Path | protocol.Params | None]:
    """Return what is trained, and what it begins with."""
    if job.family == "head":
        from edgespec.forge.training.head import HeadFamily

        texts = job.dataset.texts(held_out=False)
        head = HeadFamily(job.target, job.dataset.target.sha256, job.token_ids, sample=texts)
        return head, head.read(job.start) if job.start and job.start.is_file() else job.start
    from edgespec.forge.training.student import StudentFamily, StudentSettings

    assert job.source is not None  # noqa: S101 - for the type checker: these families have one
    settings = StudentSettings(layers=_layers(job), rank=WHOLE_RANK if job.family == "whole" else None)
    return StudentFamily(job.family, job.source, job.target, job.token_ids, settings), job.start


def _layers(job: TrainingJob) -> tuple[int, ...] | None:
    """Return the layers of the source that the draft has; None: all.

    Its checkpoints, and those of the training that it goes on from, are of those chosen then.
    """
    from edgespec.forge.training.student import choose_layers

    assert job.source is not None  # noqa: S101 - as above
    if job.family == "whole":
        return None
    kept = _kept_layers(job.folder)
    if kept is not None:
        return kept
    layers = _kept_layers(job.start) if job.start else None
    if layers is None:
        texts = list(islice(job.dataset.texts(held_out=False), _TEXTS_FOR_LAYERS))
        layers = choose_layers(job.source, job.target, job.token_ids, texts, _n_layers(job))
    job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(job.folder / _LAYERS, msgspec.json.encode(layers))
    return layers


def _kept_layers(folder: Path) -> tuple[int, ...] | None:
    """Return the layers chosen for the training in `folder`; None if none were yet."""
    file = folder / _LAYERS
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[int, ...])
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        raise EdgespecError(f"{file}: damaged; remove {folder} to train anew") from None


def _n_layers(job: TrainingJob) -> int:
    """Return how many layers of the source the draft has."""
    assert job.source is not None  # noqa: S101 - as above
    n_layer = job.source.header.n_layer
    return n_layer if job.family == "whole" else max(2, round(SHALLOW_SHARE * n_layer))


def _check_memory(job: TrainingJob) -> None:
    """Raise EdgespecError if the parameters and what training keeps of each do not fit in memory."""
    available = available_bytes()
    needed = _BYTES_A_PARAMETER * _n_parameters(job) + _BYTES_BESIDE
    if available is not None and needed > available:
        raise EdgespecError(
            f"not enough memory to train the family {job.family}: about {format_size(needed)} needed, "
            f"{format_size(available)} available; choose other families, or close other programs"
        )


def _n_parameters(job: TrainingJob) -> int:
    """Return about how many parameters are kept as floats."""
    if job.source is None or job.family == "head":
        shape = job.target.shape()
        n = shape.n_embd
        return n * (2 * n + 2 * (shape.n_head + shape.n_head_kv) * shape.head_dim + 6 * n)
    # All layers are alike in size.
    own = [
        info.rows * info.columns
        for info in job.source.header.gguf.tensors
        if info.name.startswith("blk.") and int(info.name.split(".")[1]) < _n_layers(job)
    ]
    n_output = len(job.token_ids) * job.source.header.n_embd
    # A matrix that changes by a little stays as it is, in 16 bits.
    return n_output + (sum(own) // 8 if job.family == "whole" else sum(own))


def _figures(now: TrainingProgress) -> str:
    """Return what is to be seen of a training, in words."""
    if now.what == "compiling":
        return "compiling"
    shares = now.acceptance.by_position if now.acceptance else ()
    accepted = f"accepted {' '.join(f'{share:.2f}' for share in shares)}, " if shares else ""
    return f"{accepted}{now.n_tokens:,} tokens"
