"""Training loop, and the acceptance of drafts on held-out texts, by which it is evaluated.

A training may be stopped at any moment (Ctrl-C, SIGTERM, kill -9, a power cut). It resumes from its last
checkpoint, at most some minutes old.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import numpy.typing as npt
import optax
from jax import Array

from edgespec.apps.forge.dataset import Dataset, TrainingText, read_npz
from edgespec.apps.forge.request import StageContext
from edgespec.apps.forge.training.batches import (
    BEST,
    CHECKPOINT,
    MOST,
    N_DRAFTED,
    BatchSize,
    EpochPosition,
    TextPacking,
    TrainingBatch,
    batches,
)
from edgespec.apps.forge.training.head import FACTOR, HeadFamily, Params, dot
from edgespec.errors import EdgespecError, MessageFn, describe_os_error
from edgespec.platform.files import replacing
from edgespec.platform.kept import DamagedFileError

# ---- the optimizer: Muon for matrices, Adam for vectors and numbers ----
#
# Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982) makes steps equally long
# in all directions of a matrix. A new head learns about twice as much from a step as with AdamW, and bears
# longer steps. Muon multiplies each matrix with itself: too slow for a model of many layers.


_ITERATIONS = 4  # with the author's 5 a head learns no more
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration, its author's
_MOMENTUM = 0.95
_DECAY = 0.01  # of matrices
_LONGEST = 0.5  # global norm of gradients
_WARM_UP = 10  # steps


def optimizer(rate: float, vector_rate: float) -> optax.GradientTransformation:
    """Return the transformation of gradients to full-length steps downhill."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    muon = optax.chain(
        optax.trace(_MOMENTUM, nesterov=True),
        optax.stateless(lambda gradients, _params: jax.tree.map(orthogonal, gradients)),
    )
    decay = optax.add_decayed_weights(_DECAY)
    return optax.chain(
        optax.clip_by_global_norm(_LONGEST),
        optax.multi_transform(
            {
                "matrix": optax.chain(muon, decay, optax.scale(-rate)),
                "vector": optax.chain(adam, optax.scale(-vector_rate)),
            },
            lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params),
        ),
    )


def orthogonal(gradient: Array) -> Array:
    """Approximate U V^T of a matrix U S V^T, (k, n), times sqrt(n / k) if it is wide.

    Singular values become 0.7 to 1.2, except tiny ones. With the factor, the change of an output does not
    depend on the matrix's shape.
    """
    k, n = gradient.shape
    x = gradient.T if k > n else gradient
    x = (x / (jnp.linalg.norm(x) + 1e-9)).astype(FACTOR)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = dot(x, x, 1, 1)
        change = b * square + c * dot(square, square, 1, 0)
        x = (a * x + dot(change, x, 1, 0)).astype(FACTOR)
    x = x.astype(jnp.float32) * max(1.0, n / k) ** 0.5
    return x.T if k > n else x


# ---- acceptance of drafts on held-out texts ----


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of greedy drafts of a fixed length that begin everywhere in the target's answers.

    A token at position n counts only if all before it were right, as at run time.
    """

    n_drafts: int
    accepted: tuple[int, ...]
    """Drafts whose first n tokens were right, for n = 1, 2, ..."""

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share of right tokens at each position, of the drafts right up to there."""
        tested = (self.n_drafts, *self.accepted)
        return tuple(
            right / before if before else 0.0 for right, before in zip(self.accepted, tested, strict=False)
        )

    @property
    def mean_accepted(self) -> float:
        """The mean number of accepted tokens of a draft."""
        return sum(self.accepted) / self.n_drafts if self.n_drafts else 0.0


class AcceptanceEvaluation:
    """Held-out texts, packed once, and the draft's rollout, compiled once."""

    def __init__(self, family: HeadFamily, texts: Sequence[TrainingText], rows: BatchSize) -> None:
        """Evaluate on up to MOST answers of `texts`."""
        packing = TextPacking(texts, rows)
        self._batches: list[TrainingBatch] = []
        n_answers = 0
        for batch, place in batches(packing, family.target.embed, rows.n, 0, EpochPosition()):
            self._batches.append(batch)
            n_answers += int((batch.weights > 0).sum())
            if place.epoch or n_answers >= MOST:
                break
        self._walk = jax.jit(family.rollout, static_argnums=3)
        self._frozen = family.frozen

    def __call__(self, params: Params) -> Acceptance:
        """Return the acceptance of a draft with `params`."""
        n_drafts, accepted = 0, np.zeros(N_DRAFTED, np.int64)
        for batch in self._batches:
            right = np.asarray(self._walk(params, self._frozen, batch, N_DRAFTED))
            began = starts(batch, N_DRAFTED)
            n_drafts += int(began.sum())
            accepted += np.cumprod(right[began], -1).sum(0)
        return Acceptance(n_drafts, tuple(map(int, accepted)))


def starts(batch: TrainingBatch, n: int) -> npt.NDArray[np.bool_]:
    """Return bool (rows, a): whether a draft of `n` tokens fits into its text at each answer."""
    answers, learnt = np.asarray(batch.answers), np.asarray(batch.weights) > 0
    found, m = np.zeros_like(learnt), answers.shape[1] - n + 1
    found[:, :m] = learnt[:, :m] & learnt[:, n - 1 :] & (answers[:, n - 1 :] == answers[:, :m] + n - 1)
    return found


# ---- the loop ----


_WARM_START = 0.5  # share of the rate with another training's weights, which are unlearned first at all of it
_LEARNING = 0.2  # the same for a head that learns: a night must not unlearn what weeks taught


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Length and conditions of a training, which ends when `hours` or `tokens` are used up."""

    hours: float | None = None
    tokens: int | None = None
    """Repetitions counted."""
    seed: int = 0
    rate: float = 7e-3
    """Learning rate of matrices, after the warm-up: Muon's step length in each direction."""
    vector_rate: float = 5e-4
    checkpoint_s: float = 180.0
    evaluate_s: float = 300.0
    patience: int = 8
    """Evaluations without improvement that end the training."""
    learns: bool = False
    """Whether a head learns from its mistakes: every second row has texts in which drafts were rejected."""
    rows: BatchSize = field(default_factory=BatchSize)
    """What texts are packed into."""


@dataclass(slots=True)
class TrainingResult:
    """The progress of a training, as its checkpoints store it; at its end, with its best parameters."""

    place: EpochPosition = field(default_factory=EpochPosition)
    n_texts: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    elapsed_s: float = 0.0
    history: list[tuple[int, float, Acceptance]] = field(default_factory=list)
    """Tokens, seconds and acceptance at each evaluation."""
    params: Params = None
    """Parameters with the best acceptance; None before the end, and once they are in a file."""

    @property
    def best(self) -> int:
        """Index of the best evaluation, the first of equal ones; -1: none yet."""
        values = [one.mean_accepted for _, _, one in self.history]
        return values.index(max(values)) if values else -1

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of the best parameters."""
        return self.history[self.best][2]


class Training:
    """Trains a head on the texts of a dataset, with checkpoints in a folder, from which it also resumes."""

    def __init__(
        self,
        family: HeadFamily,
        dataset: Dataset,
        settings: TrainingSettings,
        folder: Path,
        context: StageContext,
    ) -> None:
        """Prepare; `context` is notified of each step. Raises EdgespecError for too few texts."""
        texts = list(dataset.texts(held_out=False))
        held_out = list(dataset.texts(held_out=True))
        rows = settings.rows
        packing = TextPacking(texts, rows, mixes=settings.learns)
        if not packing.n_answers or not held_out:
            raise EdgespecError(
                f"too few texts to train on ({len(texts)}, and {len(held_out)} to evaluate on); "
                "let the target write more"
            )
        self._family, self._settings, self._folder, self._context = family, settings, folder, context
        self._batches = partial(batches, packing, family.target.embed, rows.n, settings.seed)
        self._evaluate = AcceptanceEvaluation(family, held_out, rows)
        self._optimizer = optimizer(settings.rate, settings.vector_rate)
        self._step = jax.jit(self._traced_step, donate_argnums=(0, 1))
        self._state = TrainingResult(n_texts=len(texts))

    def _traced_step(
        self, params: Params, moments: Tree, frozen: Params, batch: TrainingBatch, key: Array, length: Array
    ) -> tuple[Params, Tree, Array]:
        loss, gradient = jax.value_and_grad(self._family.loss)(params, frozen, batch, key)
        updates, moments = self._optimizer.update(gradient, moments, params)
        return jax.tree.map(lambda x, step: x + length * step, params, updates), moments, loss

    def run(self, start: Path | Params | None = None) -> TrainingResult:
        """Train until hours or tokens are used up, or drafts get no better.

        `start`: parameters, or the folder of an earlier training that has them. Raises EdgespecError.
        """
        params, moments = self._begin(start)
        settings, state = self._settings, self._state
        began, kept = time.monotonic() - state.elapsed_s, time.monotonic()
        key, warm = jax.random.key(settings.seed), _LEARNING if settings.learns else _WARM_START
        longest = 1.0 if start is None else warm
        feed = self._batches(state.place)
        self._report("compiling")
        while (share := self._share()) < 1 and len(state.history) - state.best <= settings.patience:
            batch, place = next(feed)
            length = longest * min(1.0, (state.n_steps + 1) / _WARM_UP)
            length *= 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))
            own = jax.random.fold_in(key, state.n_steps)
            params, moments, loss = self._step(
                params, moments, self._family.frozen, batch, own, jnp.float32(length)
            )
            if not math.isfinite(loss):
                raise EdgespecError(f"the training diverged at step {state.n_steps}; lower its rate")
            state.place, state.n_steps = place, state.n_steps + 1
            state.n_tokens += int((batch.weights > 0).sum())
            state.elapsed_s = time.monotonic() - began
            self._report()
            evaluated_s = state.history[-1][1] if state.history else 0.0
            if state.elapsed_s - evaluated_s >= settings.evaluate_s:
                self._evaluate_now(params)
                state.elapsed_s = time.monotonic() - began
            if time.monotonic() - kept >= settings.checkpoint_s:
                self._save((params, moments))
                kept = time.monotonic()
        if not state.history or state.history[-1][0] != state.n_tokens:
            self._evaluate_now(params)
        state.elapsed_s = time.monotonic() - began
        self._save((params, moments))
        state.params = best_params(self._folder, params)
        return state

    def _begin(self, start: Path | Params | None) -> tuple[Params, Any]:
        """Return parameters and optimizer state: the last checkpoint's, those of `start`, or new ones."""
        params = self._family.init(jax.random.key(self._settings.seed))
        moments = self._optimizer.init(params)
        found = load_checkpoint(self._folder, (params, moments), self._context.on_message)
        if found is not None:
            (params, moments), facts = found
            n_texts = self._state.n_texts
            self._state = msgspec.convert(facts, TrainingResult)
            if self._state.n_texts != n_texts:  # texts came or went: begin a new epoch
                self._state.place = EpochPosition(self._state.place.epoch + 1, 0)
                self._state.n_texts = n_texts
        elif start is not None:
            params = best_params(start, params) if isinstance(start, Path) else start
        return jax.tree.map(_typed, params), jax.tree.map(_typed, moments)

    def _save(self, tree: Tree) -> None:
        write_arrays(self._folder / CHECKPOINT, tree, msgspec.to_builtins(self._state))

    def _share(self) -> float:
        settings, state = self._settings, self._state
        time_share = state.elapsed_s / (3600 * settings.hours) if settings.hours else 0.0
        return max(time_share, state.n_tokens / settings.tokens if settings.tokens else 0.0)

    def _evaluate_now(self, params: Params) -> None:
        state = self._state
        acceptance = self._evaluate(params)
        state.history.append((state.n_tokens, state.elapsed_s, acceptance))
        if state.best == len(state.history) - 1:
            write_arrays(self._folder / BEST, params, asdict(acceptance))
        self._report()

    def _report(self, detail: str = "") -> None:
        state, share = self._state, min(1.0, self._share())
        shares = state.history[-1][2].by_position if state.history else ()
        accepted = f"accepted {' '.join(f'{share:.2f}' for share in shares)}, " if shares else ""
        detail = detail or f"{accepted}{state.n_tokens:,} tokens"
        self._context.on_progress("training head", share, detail)


def best_params(folder: Path, like: Params) -> Params:
    """Return the best parameters of the training in `folder`.

    Raises EdgespecError if there are none, or none of the shapes of `like`.
    """
    try:
        return read_arrays(folder / BEST, like)[0]
    except (OSError, DamagedFileError) as error:
        raise EdgespecError(f"{folder / BEST}: cannot start from it: {error}") from None


def _typed(x: jax.typing.ArrayLike) -> jax.Array:
    """Return an array with a strong type, as after a step: a weak type would mean compiling again."""
    return jnp.asarray(x, jnp.result_type(x))


# ---- files of arrays by name, with "facts" as JSON: complete or missing, with a zip's checksums ----

Tree = Any


def load_checkpoint(folder: Path, like: Tree, on_message: MessageFn) -> tuple[Tree, dict[str, Any]] | None:
    """Return the checkpoint in `folder`, in the structure of `like`; None: none, or a damaged one."""
    path = folder / CHECKPOINT
    try:
        return read_arrays(path, like)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        on_message(f"{path}: damaged ({error}); training begins anew")
        return None
    except OSError as error:
        raise EdgespecError(f"cannot read the training: {describe_os_error(error)}") from error


def write_arrays(path: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write arrays and facts as one file, creating its folder. Raises EdgespecError."""
    named: dict[str, Any] = {f"a{name}": np.asarray(leaf) for name, leaf in _named(tree)}
    named["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **named)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def read_arrays(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Read what `write_arrays` wrote, in the structure of `like`.

    Raises OSError, DamagedFileError, and EdgespecError for arrays of other names or shapes.
    """
    arrays, expected = read_npz(path), _named(like)
    if "facts" not in arrays:
        raise DamagedFileError("incomplete")
    facts = json.loads(arrays.pop("facts").tobytes())
    if {name: array.shape for name, array in arrays.items()} != {f"a{n}": np.shape(x) for n, x in expected}:
        raise EdgespecError(
            f"{path}: of a training with other settings; name another folder, or remove this one"
        )
    leaves = [arrays[f"a{name}"] for name, _ in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), facts


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
