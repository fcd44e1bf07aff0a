"""A Whisper decoder with few of the target's layers, trained to write what the target wrote of recordings.

Its layers begin as the target's first and last ones, as those of distil-whisper do (arXiv 2311.00430);
without training they write nothing that the target does. Embeddings, positions and output stay the target's.
It hears what the target's encoder heard, so that no sound is encoded twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from edgespec.errors import EdgespecError
from edgespec.forge.recordings import HeardWindow
from edgespec.forge.training.acceptance import Acceptance
from edgespec.forge.training.arithmetic import MASKED, project, score
from edgespec.forge.training.batches import EpochPosition
from edgespec.forge.training.family import Params, TrainingRecipe
from edgespec.models.whisper.contents import SourceTensor, WhisperContents

_EPSILON = 1e-5  # of the norms
_STEP = 32  # columns of a batch are multiples of it: few programs are compiled
_TRANSPOSED = ".weight"  # matrices are (in, out) here, (out, in) in files


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


class SpeechLessons:
    """Windows that the target has heard, for a decoder."""

    recipe = TrainingRecipe("adam", rate=3e-4, vector_rate=3e-4, warm_up=20, n_rows=4)

    def __init__(
        self, decoder: SpeechDecoder, windows: Sequence[HeardWindow], held_out: Sequence[HeardWindow]
    ) -> None:
        """Teach `windows`, and judge by those `held_out`. Raises EdgespecError if one is empty."""
        if not windows or not held_out:
            raise EdgespecError(
                "no speech was heard in the recordings to learn from, or in those to judge by"
            )
        self.n, self.frozen = len(windows), jax.tree.map(jnp.asarray, decoder.frozen)
        self._decoder, self._windows, self._held_out = decoder, windows, held_out

    def init(self, _key: Array) -> Params:
        """Return the target's own parameters."""
        return self._decoder.start

    def loss(self, params: Params, frozen: Params, batch: WindowBatch, _key: Array) -> Array:
        """Return the cross-entropy, a mean over the tokens to learn. Traced by JAX."""
        logits = self._decoder.logits(params, frozen, batch.tokens, batch.states)
        chosen = jnp.take_along_axis(logits, batch.targets.reshape(-1, 1), 1)[:, 0]
        losses = jax.nn.logsumexp(logits, -1) - chosen
        return (losses * batch.weights.reshape(-1)).sum() / jnp.maximum(batch.weights.sum(), 1.0)

    def batches(self, seed: int, place: EpochPosition) -> Iterator[tuple[WindowBatch, EpochPosition]]:
        """Yield batches from `place` on, without end, each with the position after it."""
        n_rows = min(self.recipe.n_rows, self.n)
        epoch, row = place.epoch, place.row
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(self.n)[row : row + n_rows]
            row += n_rows
            if row + n_rows > self.n:
                epoch, row = epoch + 1, 0
            yield _batch([self._windows[i] for i in order]), EpochPosition(epoch, row)

    def evaluate(self, params: Params) -> Acceptance:
        """Return how many of the tokens held out are the decoder's likeliest after those before them."""
        n_right = n = 0
        for window in self._held_out:
            batch = _batch([window])
            found = np.asarray(self._decoder.likeliest(params, self.frozen, batch.tokens, batch.states))
            n_right += int(((found.reshape(batch.targets.shape) == batch.targets) * batch.weights).sum())
            n += int(batch.weights.sum())
        return Acceptance(n, (n_right,))


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
