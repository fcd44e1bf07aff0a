"""A Whisper decoder with few of the target's layers, trained to write what the target wrote of recordings.

Its layers begin as the target's first and last ones, as those of distil-whisper do (arXiv 2311.00430);
without training they write nothing that the target does. Embeddings, positions and output stay the target's.
It hears what the target's encoder heard, so that no sound is encoded twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax import Array

from edgespec.errors import EdgespecError
from edgespec.forge.recordings import HeardWindow
from edgespec.forge.training import checkpoint
from edgespec.forge.training.arithmetic import MASKED, project, score
from edgespec.forge.training.family import Params, TrainingRecipe
from edgespec.forge.training.loop import stop_signals
from edgespec.forge.training.optimizer import optimizer
from edgespec.models.whisper.contents import SourceTensor, WhisperContents
from edgespec.platform.messages import MessageFn, silent

RECIPE = TrainingRecipe("adam", rate=3e-4, vector_rate=3e-4, warm_up=20, n_rows=4)

_EPSILON = 1e-5  # of the norms
_STEP = 32  # columns of a batch are multiples of it: few programs are compiled
_TRANSPOSED = ".weight"  # matrices are (in, out) here, (out, in) in files
_CHECKPOINT_S, _EVALUATE_S = 120.0, 180.0


def layers_for(n_layer: int) -> tuple[int, ...]:
    """Return which layers of a target with `n_layer` a draft begins with: the last; from 12 on, the first."""
    return (n_layer - 1,) if n_layer < 12 else (0, n_layer - 1)


class SpeechDecoder:
    """The decoder: its parameters at the start, and what it makes of tokens."""

    def __init__(self, target: WhisperContents, layers: Sequence[int]) -> None:
        """Begin with `layers` of `target`, whose numbers are read."""
        self._target, self._n_head = target, target.sizes.n_text_head
        self.n_layer = len(layers)
        self.likeliest = jax.jit(lambda *inputs: self.logits(*inputs).argmax(-1))
        """Returns the likeliest token after each column; arguments as of `logits`."""
        self.start: Params = {
            "blocks": [self._block(f"decoder.blocks.{layer}.") for layer in layers],
            "ln": {part: self._read(f"decoder.ln.{part}") for part in ("weight", "bias")},
        }
        self.frozen: Params = {
            "embeddings": self._read("decoder.token_embedding.weight").T,
            "positions": self._read("decoder.positional_embedding"),
        }

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        numbers = self._target.tensors[name].read()
        return np.ascontiguousarray(
            numbers.T if numbers.ndim == 2 and name.endswith(_TRANSPOSED) else numbers
        )

    def _block(self, prefix: str) -> dict[str, npt.NDArray[np.float32]]:
        names = [name for name in self._target.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._read(name) for name in names}

    # ---- traced by JAX ----

    def hidden(self, params: Params, frozen: Params, tokens: Array, states: Array) -> Array:
        """Return what the output matrix takes, (n, columns, width), for `tokens` (n, columns)."""
        n = tokens.shape[1]
        x = frozen["embeddings"][tokens] + frozen["positions"][:n]
        causal = jnp.where(jnp.tril(jnp.ones((n, n), bool)), 0.0, MASKED)
        for block in params["blocks"]:
            y = _norm(x, block, "attn_ln")
            x = x + self._attention(y, y, block, "attn", causal)
            x = x + self._attention(_norm(x, block, "cross_attn_ln"), states, block, "cross_attn", None)
            y = jax.nn.gelu(_linear(_norm(x, block, "mlp_ln"), block, "mlp.0"), approximate=False)
            x = x + _linear(y, block, "mlp.2")
        return _scaled(x, params["ln"]["weight"], params["ln"]["bias"])

    def _attention(self, x: Array, of: Array, block: Params, name: str, mask: Array | None) -> Array:
        def heads(y: Array, part: str) -> Array:
            y = _linear(y, block, f"{name}.{part}")
            return y.reshape(*y.shape[:2], self._n_head, -1)

        q, k, v = heads(x, "query"), heads(of, "key"), heads(of, "value")
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(scores if mask is None else scores + mask, -1)
        y = jnp.einsum("nhqk,nkhd->nqhd", weights, v)
        return _linear(y.reshape(x.shape), block, f"{name}.out")

    def logits(self, params: Params, frozen: Params, tokens: Array, states: Array) -> Array:
        """Return the logits of all columns, (n x columns, n_vocab)."""
        x = self.hidden(params, frozen, tokens, states.astype(jnp.float32))
        return score(x.reshape(-1, x.shape[-1]), frozen["embeddings"])

    def contents(self, params: Params) -> WhisperContents:
        """Return the decoder with these parameters as a model without an encoder."""
        arrays = {"decoder.ln." + part: np.asarray(x) for part, x in params["ln"].items()}
        for i, block in enumerate(params["blocks"]):
            for name, x in block.items():
                stored = x.T if x.ndim == 2 and name.endswith(_TRANSPOSED) else x
                arrays[f"decoder.blocks.{i}.{name}"] = np.asarray(stored, np.float32)
        target = self._target
        tensors = {name: SourceTensor(x.shape, lambda x=x: x) for name, x in arrays.items()}  # type: ignore[misc]
        for name in ("decoder.token_embedding.weight", "decoder.positional_embedding"):
            tensors[name] = target.tensors[name]
        sizes = replace(target.sizes, n_audio_layer=0, n_text_layer=self.n_layer)
        return WhisperContents(target.path, sizes, target.tokens, (), tensors)


def _linear(x: Array, block: Params, name: str) -> Array:
    y = project(x, block[f"{name}.weight"])
    return y + block[f"{name}.bias"] if f"{name}.bias" in block else y


def _norm(x: Array, block: Params, name: str) -> Array:
    return _scaled(x, block[f"{name}.weight"], block[f"{name}.bias"])


def _scaled(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + _EPSILON) * weight + bias


# ---- training ----


@dataclass(frozen=True, slots=True)
class SpeechTraining:
    """Outcome of a training."""

    params: Params
    accepted: float
    """Share of the held-out tokens that are the decoder's likeliest."""
    n_tokens: int
    """Tokens learnt from, repetitions counted."""
    hours: float


SpeechTrainingFn = Callable[[float, str], None]
"""Told of each step: the share of the time that is over, and a detail."""


@dataclass(slots=True)
class _Progress:
    """Facts of a checkpoint."""

    n_steps: int = 0
    n_tokens: int = 0
    elapsed_s: float = 0.0
    best: float = -1.0


def train_speech(
    decoder: SpeechDecoder,
    windows: tuple[Sequence[HeardWindow], Sequence[HeardWindow]],
    folder: Path,
    *,
    hours: float,
    n_steps: int | None = None,
    on_progress: SpeechTrainingFn = lambda _share, _detail: None,
    on_message: MessageFn = silent,
) -> SpeechTraining:
    """Train for `hours` on the first of two lists of windows, judged by the second; checkpoints in `folder`.

    `n_steps`: the most steps.

    A training that was stopped goes on from its checkpoint. SIGINT and SIGTERM end it after a step, with a
    checkpoint and a KeyboardInterrupt. Raises EdgespecError if a list is empty.
    """
    if not all(windows):
        raise EdgespecError("no speech was heard in the recordings to learn from, or in those to judge by")
    return _SpeechTrainer(decoder, windows, folder, on_message).run(3600 * hours, n_steps, on_progress)


class _SpeechTrainer:
    def __init__(
        self,
        decoder: SpeechDecoder,
        windows: tuple[Sequence[HeardWindow], Sequence[HeardWindow]],
        folder: Path,
        on_message: MessageFn,
    ) -> None:
        self._decoder, self._folder = decoder, folder
        self._learnt, self._judged = windows
        self._optimizer = optimizer(RECIPE)
        self._step = jax.jit(self._traced_step)
        self._frozen = jax.tree.map(jnp.asarray, decoder.frozen)
        self._done = _Progress()
        params = jax.tree.map(jnp.asarray, decoder.start)
        self._arrays = (params, self._optimizer.init(params), params)  # the last are the best so far
        if found := checkpoint.load(folder, self._arrays, on_message=on_message):
            self._arrays = jax.tree.map(jnp.asarray, found[0])
            self._done = _Progress(**found[1])

    def _traced_step(
        self, params: Params, moments: optax.OptState, frozen: Params, batch: WindowBatch, length: Array
    ) -> tuple[Params, Any, Array]:
        loss, gradients = jax.value_and_grad(self._loss)(params, frozen, batch)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return jax.tree.map(lambda x, change: x + length * change, params, updates), moments, loss

    def _loss(self, params: Params, frozen: Params, batch: WindowBatch) -> Array:
        logits = self._decoder.logits(params, frozen, batch.tokens, batch.states)
        chosen = jnp.take_along_axis(logits, batch.targets.reshape(-1, 1), 1)[:, 0]
        losses = jax.nn.logsumexp(logits, -1) - chosen
        return (losses * batch.weights.reshape(-1)).sum() / jnp.maximum(batch.weights.sum(), 1.0)

    def _share(self, seconds: float, n_steps: int | None) -> float:
        return max(self._done.elapsed_s / seconds, self._done.n_steps / n_steps if n_steps else 0.0)

    def run(self, seconds: float, n_steps: int | None, on_progress: SpeechTrainingFn) -> SpeechTraining:
        done = self._done
        began = time.monotonic() - done.elapsed_s
        kept = judged = time.monotonic()
        feed = _batches(self._learnt, done.n_steps)
        with stop_signals() as asked:
            while (share := self._share(seconds, n_steps)) < 1:
                loss = self._train(next(feed), 0.5 * (1 + math.cos(math.pi * share)))
                now = time.monotonic()
                done.elapsed_s = now - began
                accepted = f", {done.best:.0%} accepted" if done.best >= 0 else ""
                on_progress(min(1.0, self._share(seconds, n_steps)), f"loss {loss:.2f}{accepted}")
                if now - judged > _EVALUATE_S and not asked.is_set():
                    self._judge()
                    judged = time.monotonic()
                if asked.is_set() or now - kept > _CHECKPOINT_S:
                    self._keep()
                    kept = time.monotonic()
                if asked.is_set():
                    raise KeyboardInterrupt
        self._judge()
        self._keep()
        best = jax.tree.map(np.asarray, self._arrays[2])
        return SpeechTraining(best, done.best, done.n_tokens, done.elapsed_s / 3600)

    def _train(self, batch: WindowBatch, length: float) -> float:
        """Take a step, of this share of its full length; return the loss before it."""
        params, moments, best = self._arrays
        length *= min(1.0, (self._done.n_steps + 1) / RECIPE.warm_up)
        params, moments, loss = self._step(params, moments, self._frozen, batch, jnp.float32(length))
        if not math.isfinite(float(loss)):
            raise EdgespecError(f"the training diverged at step {self._done.n_steps}")
        self._arrays = params, moments, best
        self._done.n_steps += 1
        self._done.n_tokens += int(batch.weights.sum())
        return float(loss)

    def _judge(self) -> None:
        params, moments, _ = self._arrays
        accepted = agreement(self._decoder, params, self._frozen, self._judged)
        if accepted > self._done.best:
            self._done.best, self._arrays = accepted, (params, moments, params)

    def _keep(self) -> None:
        checkpoint.save(self._folder, self._arrays, asdict(self._done))


def agreement(
    decoder: SpeechDecoder, params: Params, frozen: Params, windows: Sequence[HeardWindow]
) -> float:
    """Return the share of the windows' tokens that are the decoder's likeliest after those before them."""
    n_right = n = 0.0
    for window in windows:
        batch = _batch([window])
        found = np.asarray(decoder.likeliest(params, frozen, batch.tokens, batch.states))
        n_right += float(((found.reshape(batch.targets.shape) == batch.targets) * batch.weights).sum())
        n += float(batch.weights.sum())
    return n_right / max(n, 1.0)


class WindowBatch(NamedTuple):
    """Windows of one step: arrays of n rows."""

    tokens: Any
    """int32 (n, columns)."""
    targets: Any
    """int32: the tokens after them."""
    weights: Any
    """float32: 1 for a target to learn, 0 for the prompt's and for padding."""
    states: Any
    """float16 (n, n_audio_ctx, n_audio_state)."""


def _batch(windows: Sequence[HeardWindow]) -> WindowBatch:
    n = max(len(window.tokens) - 1 for window in windows)
    shape = len(windows), max(_STEP, (n + _STEP - 1) // _STEP * _STEP)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights = np.zeros(shape, np.float32)
    for i, window in enumerate(windows):
        m = len(window.tokens) - 1
        tokens[i, :m], targets[i, :m] = window.tokens[:-1], window.tokens[1:]
        weights[i, window.n_prompt - 1 : m] = 1.0
    return WindowBatch(tokens, targets, weights, np.stack([window.states for window in windows]))


def _batches(windows: Sequence[HeardWindow], n_done: int) -> Iterator[WindowBatch]:
    """Yield batches for ever, in another order each time round, after the first `n_done`."""
    n_rows = min(RECIPE.n_rows, len(windows))
    while True:
        epoch, place = divmod(n_done, len(windows) // n_rows)
        order = np.random.default_rng(epoch).permutation(len(windows))
        yield _batch([windows[i] for i in order[place * n_rows : (place + 1) * n_rows]])
        n_done += 1
