"""Training loop.

A training may be stopped at any moment (Ctrl-C, SIGTERM, kill -9, a power cut). It resumes from its last
checkpoint with the next batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from os import SEEK_END
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax import Array

from edgespec.apps.forge.dataset import BUILT_IN, Dataset
from edgespec.apps.forge.training.acceptance import Acceptance, AcceptanceEvaluation
from edgespec.apps.forge.training.arithmetic import FACTOR, Params, dot
from edgespec.apps.forge.training.batches import BatchSize, EpochPosition, TextPacking, TrainingBatch, batches
from edgespec.apps.forge.training.head import HeadFamily, TrainingRecipe
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.platform.files import replacing
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError

_MOST_HELD_OUT = 8192  # tokens that drafts are judged on


class TextLessons:
    """Texts of a dataset that a head is trained on, and judged by."""

    def __init__(
        self,
        family: HeadFamily,
        dataset: Dataset,
        *,
        recipe: TrainingRecipe | None = None,
        rows: BatchSize | None = None,
        n_positions: int = 5,
        mixes: bool = False,
    ) -> None:
        """Pack the texts into `rows`, and judge drafts of `n_positions` tokens on some held-out texts.

        `mixes`: every second row has texts in which drafts were rejected. `recipe`, `rows`: None: the
        head's own. Raises EdgespecError if there are too few texts.
        """
        texts = list(dataset.texts(held_out=False))
        judged = dataset.texts(held_out=True)
        held_out = [text for text in judged if text.temperature == 0.0 or text.source != BUILT_IN]
        self.recipe = recipe or family.recipe
        self.n = len(texts)  # where it changed, a resumed training begins an epoch
        self.frozen, self.init, self.loss = family.frozen, family.init, family.loss
        rows = rows or BatchSize(self.recipe.n_rows)
        packing = TextPacking(texts, rows, mixes=mixes)
        if not packing.n_answers or not held_out:
            raise EdgespecError(
                f"too few texts to train on ({len(texts)}, and {len(held_out)} to judge by); "
                "let the target write more"
            )
        self.batches = partial(batches, packing, family.embed, rows.n)
        self.evaluate = AcceptanceEvaluation(
            family, held_out, rows, n_positions=n_positions, n_most=_MOST_HELD_OUT
        )


# ---- the optimizer: Muon for matrices, Adam for vectors and numbers ----
#
# Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982) makes steps equally long
# in all directions of a matrix. A new head learns about twice as much from a step as with AdamW, and bears
# longer steps. Muon multiplies each matrix with itself: too slow for a model of many layers.


_ITERATIONS = 4  # with the author's 5 a head learns no more
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration, its author's
_MOMENTUM = 0.95


def optimizer(recipe: TrainingRecipe) -> optax.GradientTransformation:
    """Return the transformation of gradients to full-length steps downhill."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    muon = optax.chain(
        optax.trace(_MOMENTUM, nesterov=True),
        optax.stateless(lambda gradients, _params: jax.tree.map(orthogonal, gradients)),
    )
    decay = optax.add_decayed_weights(recipe.decay)
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.multi_transform(
            {
                "matrix": optax.chain(muon, decay, optax.scale(-recipe.rate)),
                "vector": optax.chain(adam, optax.scale(-recipe.vector_rate)),
            },
            lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params),
        ),
    )


def orthogonal(gradient: Array) -> Array:
    """Approximate U V^T of a matrix U S V^T, (k, n), times sqrt(n / k) if it is wide.

    Singular values become 0.7 to 1.2, but for tiny ones. With the factor, the change of an output does not
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


# ---- the loop ----


BEST = "best.npz"
"""File of the parameters with the best acceptance, in the folder of a training."""

WARM_START_RATE = 0.5
"""Learning rate with another training's weights, which at the full rate are unlearned first."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Length and conditions of a training, which ends when `hours` or `tokens` are used up."""

    hours: float | None = None
    tokens: int | None = None
    """Repetitions counted."""
    seed: int = 0
    checkpoint_s: float = 180.0
    evaluate_s: float = 300.0
    start_rate: float = WARM_START_RATE
    """Learning rate of a training that starts from other weights, as a share of the recipe's."""
    patience: int = 8
    """Evaluations without improvement that end the training."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a training is: steps, tokens, the share done (0 to 1), seconds left."""

    what: Literal["compiling", "training", "evaluating"]
    n_steps: int
    n_tokens: int
    share: float
    left_s: float
    loss: float | None
    acceptance: Acceptance | None

    @property
    def figures(self) -> str:
        """The progress in words, for the line that is shown."""
        if self.what == "compiling":
            return "compiling"
        shares = self.acceptance.by_position if self.acceptance else ()
        accepted = f"accepted {' '.join(f'{share:.2f}' for share in shares)}, " if shares else ""
        return f"{accepted}{self.n_tokens:,} tokens"


@dataclass(slots=True)
class TrainingResult:
    """How far a training is, as its checkpoints have it; at its end, with its best parameters."""

    place: EpochPosition = field(default_factory=EpochPosition)
    n_texts: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    elapsed_s: float = 0.0
    evaluated_s: float = 0.0
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

    @property
    def hours(self) -> float:
        """Its length."""
        return self.elapsed_s / 3600


def train(
    lessons: TextLessons,
    settings: TrainingSettings,
    folder: Path,
    *,
    start: Path | Params | None = None,
    on_progress: Callable[[TrainingProgress], None] = lambda _now: None,
    on_message: MessageFn = silent,
) -> TrainingResult:
    """Train a draft on `lessons`, with checkpoints in `folder`, from which it also resumes.

    `start`: parameters, or the folder of an earlier training that has them. `on_progress` is called after
    each step. SIGINT and SIGTERM end the training after a step, with a checkpoint and a KeyboardInterrupt.
    Raises UsageError and EdgespecError.
    """
    if settings.hours is None and settings.tokens is None:
        raise UsageError("say how long to train: hours or tokens")
    return _Training(lessons, settings, folder, on_progress, on_message).run(start)


@dataclass(eq=False)
class _Training:
    lessons: TextLessons
    settings: TrainingSettings
    folder: Path
    on_progress: Callable[[TrainingProgress], None]
    on_message: MessageFn

    def __post_init__(self) -> None:
        self._optimizer = optimizer(self.lessons.recipe)
        self._step = jax.jit(self._traced_step, donate_argnums=(0, 1))
        self._state = TrainingResult(n_texts=self.lessons.n)
        self._loss: float | None = None

    def _traced_step(
        self, params: Params, moments: Tree, frozen: Params, batch: TrainingBatch, key: Array, length: Array
    ) -> tuple[Params, Tree, Array]:
        loss, gradient = jax.value_and_grad(self.lessons.loss)(params, frozen, batch, key)
        updates, moments = self._optimizer.update(gradient, moments, params)
        return jax.tree.map(lambda x, step: x + length * step, params, updates), moments, loss

    def run(self, start: Path | Params | None) -> TrainingResult:
        params, moments = self._begin(start)
        settings, state = self.settings, self._state
        began, kept = time.monotonic() - state.elapsed_s, time.monotonic()
        key, longest = jax.random.key(settings.seed), 1.0 if start is None else settings.start_rate
        warm_up = self.lessons.recipe.warm_up
        feed = self.lessons.batches(settings.seed, state.place)
        with stop_signals() as asked:
            self._tell("compiling")
            while (share := self._share()) < 1 and len(state.history) - state.best <= settings.patience:
                batch, place = next(feed)
                length = longest * min(1.0, (state.n_steps + 1) / warm_up) * _cosine(share)
                own = jax.random.fold_in(key, state.n_steps)
                params, moments, loss = self._step(
                    params, moments, self.lessons.frozen, batch, own, jnp.float32(length)
                )
                self._loss = float(loss)
                if not math.isfinite(self._loss):
                    raise EdgespecError(f"the training diverged at step {state.n_steps}; lower its rate")
                state.place, state.n_steps = place, state.n_steps + 1
                state.n_tokens += int((batch.weights > 0).sum())
                state.elapsed_s = time.monotonic() - began
                self._tell("training")
                if state.elapsed_s - state.evaluated_s >= settings.evaluate_s and not asked.is_set():
                    self._evaluate_now(params)
                    state.elapsed_s = time.monotonic() - began
                if asked.is_set() or time.monotonic() - kept >= settings.checkpoint_s:
                    save_checkpoint(self.folder, (params, moments), msgspec.to_builtins(state))
                    kept = time.monotonic()
                if asked.is_set():
                    raise KeyboardInterrupt
            if not state.history or state.history[-1][0] != state.n_tokens:
                self._evaluate_now(params)
            state.elapsed_s = time.monotonic() - began
            save_checkpoint(self.folder, (params, moments), msgspec.to_builtins(state))
        state.params = best_params(self.folder, params)
        return state

    def _begin(self, start: Path | Params | None) -> tuple[Params, Any]:
        """Return parameters and optimizer state: the last checkpoint's, those of `start`, or new ones."""
        params = self.lessons.init(jax.random.key(self.settings.seed))
        moments = self._optimizer.init(params)
        found = load_checkpoint(self.folder, (params, moments), on_message=self.on_message)
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

    def _share(self) -> float:
        settings, state = self.settings, self._state
        time_share = state.elapsed_s / (3600 * settings.hours) if settings.hours else 0.0
        return max(time_share, state.n_tokens / settings.tokens if settings.tokens else 0.0)

    def _evaluate_now(self, params: Params) -> None:
        state = self._state
        self._tell("evaluating")
        acceptance = self.lessons.evaluate(params)
        state.history.append((state.n_tokens, state.elapsed_s, acceptance))
        state.evaluated_s = state.elapsed_s
        if state.best == len(state.history) - 1:
            write_arrays(self.folder / BEST, params, asdict(acceptance))
        self._tell("training")

    def _tell(self, what: Literal["compiling", "training", "evaluating"]) -> None:
        state, share = self._state, min(1.0, self._share())
        left_s = state.elapsed_s * (1 / share - 1) if share else math.inf
        acceptance = state.history[-1][2] if state.history else None
        self.on_progress(
            TrainingProgress(
                what, state.n_steps, state.n_tokens, share, left_s, loss=self._loss, acceptance=acceptance
            )
        )


def best_params(folder: Path, like: Params) -> Params:
    """Return the best parameters of the training in `folder`.

    Raises EdgespecError if there are none, or none of the shapes of `like`.
    """
    try:
        return read_arrays(folder / BEST, like)[0]
    except (OSError, DamagedFileError) as error:
        raise EdgespecError(f"{folder / BEST}: cannot start from it: {error}") from None


def _typed(x: jax.typing.ArrayLike) -> jax.Array:
    """Return an array whose type stays: after a step none is weak, and other types are compiled anew."""
    return jnp.asarray(x, jnp.result_type(x))


def _cosine(share: float) -> float:
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Give an event that the first SIGINT or SIGTERM sets; the second has its usual effect.

    Outside the main thread, which alone gets signals, it is never set.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        asked.set()

    for one in (signal.SIGINT, signal.SIGTERM):
        previous[one] = signal.signal(one, note)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# ---- checkpoints, from which a training resumes ----
#
#     latest.npz     the arrays by name, and "facts" as JSON
#     before.npz     the checkpoint before, in case the latest is damaged
#
# A file is complete or missing. It ends with the SHA-256 of the rest, after the zip.

LATEST, BEFORE = "latest.npz", "before.npz"

_DIGEST = hashlib.sha256().digest_size

Tree = Any


def save_checkpoint(folder: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write `tree` and `facts`, which JSON can hold, as the latest checkpoint of `folder`.

    Raises EdgespecError when they cannot be written; earlier checkpoints stay.
    """
    latest, new = folder / LATEST, folder / "new.npz"
    write_arrays(new, tree, facts)
    try:
        if latest.exists():
            latest.replace(folder / BEFORE)
        new.replace(latest)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def load_checkpoint(
    folder: Path, like: Tree, *, on_message: MessageFn = silent
) -> tuple[Tree, dict[str, Any]] | None:
    """Return the newest intact checkpoint of `folder`, in the structure of `like`; None if there is none."""
    for name in (LATEST, BEFORE):
        path = folder / name
        is_last = name == BEFORE or not (folder / BEFORE).exists()
        try:
            return read_arrays(path, like)
        except FileNotFoundError:
            continue
        except DamagedFileError as error:
            instead = "training begins anew" if is_last else "the one before it is used"
            on_message(f"{path}: damaged ({error}); {instead}")
        except OSError as error:
            raise EdgespecError(f"cannot read the training: {describe_os_error(error)}") from error
    return None


def write_arrays(path: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write arrays and facts as one file, and make its folder. Raises EdgespecError."""
    named: dict[str, Any] = {f"a{name}": np.asarray(leaf) for name, leaf in _named(tree)}
    named["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **named)
            file.flush()
            with Path(file.name).open("rb") as written:
                digest = _digest(written, file.tell())
            file.write(digest)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def read_arrays(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Read what `write_arrays` wrote, in the structure of `like`.

    Raises OSError, DamagedFileError, and EdgespecError for arrays of other names or shapes.
    """
    expected = _named(like)
    with path.open("rb") as file:
        size = file.seek(-_DIGEST, SEEK_END) if path.stat().st_size > _DIGEST else 0
        wanted = file.read()
        file.seek(0)
        if not size or _digest(file, size) != wanted:
            raise DamagedFileError("its checksum is wrong")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    facts = json.loads(arrays["facts"].tobytes())
    shapes = {name: array.shape for name, array in arrays.items() if name != "facts"}
    if shapes != {f"a{name}": np.shape(leaf) for name, leaf in expected}:
        raise EdgespecError(
            f"{path}: of a training with other settings; name another folder, or remove this one"
        )
    leaves = [arrays[f"a{name}"] for name, _ in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), facts


def _digest(file: BinaryIO, n: int) -> bytes:
    """Return the SHA-256 of the next `n` bytes."""
    digest = hashlib.sha256()
    while n > 0 and (data := file.read(min(n, 1 << 20))):
        digest.update(data)
        n -= len(data)
    return digest.digest()


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
