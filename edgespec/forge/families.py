"""Families of drafts: what each can be made of, and the training that makes it (training/, extra `forge`).

A new family takes a name in `models.draft_records.Family`, a class as training/family.py asks for, and
branches in `check_trainable`, `_family` and `_n_parameters`.
"""

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

MADE_OF_SOURCE: frozenset[Family] = frozenset({"shallow", "whole"})
"""Families made of a small model, with its output matrix; others are made for a target alone."""

_SHALLOW_SHARE = 2 / 3  # of the source's layers stay in a shallow draft
_WHOLE_RANK = 16  # of the change to each matrix: a higher rank takes more memory than laptops have
_FEWEST_LAYERS = 3  # of the source of a shallow draft: two stay at least

_LAYERS = "layers.json"  # in the folder of a training: layers of the source that a shallow draft has
_TEXTS_FOR_LAYERS = 16  # that layers are chosen by

_BYTES_PER_PARAMETER = 16  # the parameter, its gradient, two moments
_BYTES_OF_BATCH = 1 << 30  # activations, logits


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """Length and outcome of a training."""

    n_tokens: int
    """Repetitions counted."""
    hours: float
    acceptance: tuple[float, ...]
    """Share accepted of held-out texts at position 1, at position 2 given that the first was, ..."""
    curve: tuple[tuple[int, float, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training that is asked for."""

    family: Family
    dataset: Dataset
    target: ModelWeights
    source: ModelWeights | None
    token_ids: Ids
    """Tokens that the draft can say, ascending."""
    hours: float | None
    tokens: int | None
    folder: Path
    start: Path | None
    """Weights to start from: the folder of an earlier training of this family, or the file of a head."""
    seed: int = 0


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        problem = "training needs JAX: pip install 'edgespec[forge]', or train nothing (--hours 0)"
        raise EdgespecError(problem)


def check_trainable(family: Family, target: ModelWeights, source: ModelWeights | None) -> None:
    """Raise UsageError for models that this family cannot be trained for, or made of."""
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
    job: TrainingJob, folder: Path, types: Sequence[str], context: StageContext
) -> tuple[TrainingSummary, dict[str, Path]]:
    """Train a draft and write it to `folder` in each quantization of `types`.

    Raises EdgespecError, and KeyboardInterrupt when it is stopped, with a checkpoint.
    """
    from edgespec.forge.training.lessons import TextLessons
    from edgespec.forge.training.loop import TrainingSettings, train

    stage = f"training {job.family}"
    context.on_progress(StageProgress(stage, 0.0, "preparing"))
    _check_memory(job)
    family, start = _family(job)

    def show(now: TrainingProgress) -> None:
        context.on_progress(StageProgress(stage, now.share, now.figures, now.left_s))

    trained = train(
        TextLessons(family, job.dataset),
        TrainingSettings(hours=job.hours, tokens=job.tokens, seed=job.seed),
        job.folder,
        start=start,
        on_progress=show,
        on_message=context.on_message,
    )
    files = {}
    for type_ in types:
        context.on_progress(StageProgress(stage, 1.0, f"writing it as {type_}"))
        files[type_] = folder / f"{job.family}-{type_}.gguf"
        family.export(trained.params, files[type_], type_)
    curve = tuple((n, seconds / 3600, one.by_position) for n, seconds, one in trained.history)
    found = TrainingSummary(trained.n_tokens, trained.elapsed_s / 3600, trained.acceptance.by_position, curve)
    return found, files


def _family(job: TrainingJob) -> tuple[protocol.TrainableFamily, Path | protocol.Params | None]:
    """Return the family to train, and the weights to start from."""
    if job.family == "head":
        from edgespec.forge.training.head import HeadFamily

        texts = job.dataset.texts(held_out=False)
        head = HeadFamily(job.target, job.dataset.target.sha256, job.token_ids, sample=texts)
        return head, head.read(job.start) if job.start and job.start.is_file() else job.start
    from edgespec.forge.training.student import StudentFamily, StudentSettings

    assert job.source is not None  # noqa: S101 - for the type checker: these families have one
    settings = StudentSettings(layers=_layers(job), rank=_WHOLE_RANK if job.family == "whole" else None)
    return StudentFamily(job.family, job.source, job.target, job.token_ids, settings), job.start


def _layers(job: TrainingJob) -> tuple[int, ...] | None:
    """Return the layers of the source that the draft has; None: all.

    Chosen once: the checkpoints, and a training that starts from them, have these layers.
    """
    from edgespec.forge.training.student import choose_layers

    assert job.source is not None  # noqa: S101 - as above
    if job.family == "whole":
        return None
    stored = _stored_layers(job.folder)
    if stored is not None:
        return stored
    layers = _stored_layers(job.start) if job.start else None
    if layers is None:
        texts = list(islice(job.dataset.texts(held_out=False), _TEXTS_FOR_LAYERS))
        layers = choose_layers(job.source, job.target, job.token_ids, texts, _n_layers(job))
    job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(job.folder / _LAYERS, msgspec.json.encode(layers))
    return layers


def _stored_layers(folder: Path) -> tuple[int, ...] | None:
    """Return the layers chosen for the training in `folder`; None: none yet."""
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
    return n_layer if job.family == "whole" else max(2, round(_SHALLOW_SHARE * n_layer))


def _check_memory(job: TrainingJob) -> None:
    """Raise EdgespecError if the parameters and their optimizer state do not fit in memory."""
    available = available_bytes()
    needed = _BYTES_PER_PARAMETER * _n_parameters(job) + _BYTES_OF_BATCH
    if available is not None and needed > available:
        raise EdgespecError(
            f"not enough memory to train the family {job.family}: about {format_size(needed)} needed, "
            f"{format_size(available)} available; choose other families, or close other programs"
        )


def _n_parameters(job: TrainingJob) -> int:
    """Estimate the parameters that are trained."""
    if job.source is None:
        shape = job.target.shape()
        n = shape.n_embd
        return n * (2 * n + 2 * (shape.n_head + shape.n_head_kv) * shape.head_dim + 6 * n)
    own = [
        info.rows * info.columns
        for info in job.source.header.gguf.tensors
        if info.name.startswith("blk.") and int(info.name.split(".")[1]) < _n_layers(job)
    ]
    n_output = len(job.token_ids) * job.source.header.n_embd
    # With a low-rank change the matrices stay frozen, in 16 bits.
    return n_output + (sum(own) // 8 if job.family == "whole" else sum(own))
