"""The families "shallow" and "whole": a small model of the target's family, trained by distillation.

    whole      all layers of the small model, with a cut output vocabulary
    shallow    without the layers that matter least (choose_layers)

The student reads tokens alone, so its file is an ordinary model's (vocabulary_cut.py). It learns the target's
distribution over the kept tokens, softmax(W_out[cut] f), where the target itself wrote (arXiv 2310.08461
compares such losses). Its input embeddings are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from edgespec.errors import UsageError
from edgespec.forge.dataset import TrainingText
from edgespec.forge.training.acceptance import likeliest_is_next
from edgespec.forge.training.arithmetic import FACTOR, at_answers, rms_norm, score
from edgespec.forge.training.batches import BatchSize, TextPacking
from edgespec.forge.training.decoder import LowRankMatrix, multiply, read_decoder
from edgespec.forge.training.family import Params, TrainingBatch, TrainingRecipe
from edgespec.forge.training.weights import OUTPUT_NORM, ModelWeights
from edgespec.forge.vocabulary_cut import TensorChanges, cut
from edgespec.models.pull import hash_file

# At twice this rate the student lost what the source knew.
_WHOLE_MATRICES = TrainingRecipe("adam", rate=5e-5, vector_rate=5e-5, warm_up=60, n_rows=2)
_LOW_RANK = TrainingRecipe("adam", rate=5e-4, vector_rate=5e-4, warm_up=60, n_rows=2)

_FEW = BatchSize(n=2, columns=384, answers=320)  # for the choice of layers


@dataclass(frozen=True, slots=True)
class StudentSettings:
    """Layers of a small model that become the draft, and what is trained."""

    layers: tuple[int, ...] | None = None
    """Layers of the source to use, ascending; None: all."""
    rank: int | None = None
    """Rank of the change to each matrix (LoRA, arXiv 2106.09685); None: train whole matrices."""
    output: bool = True


class StudentFamily:
    """A small model that learns from one target, with a cut vocabulary."""

    def __init__(
        self,
        name: str,
        source: ModelWeights,
        target: ModelWeights,
        token_ids: npt.NDArray[np.int64],
        settings: StudentSettings | None = None,
    ) -> None:
        """Prepare `source`, of the target's vocabulary, to say `token_ids`, ascending.

        Raises UsageError for an architecture that cannot be trained.
        """
        self.name, self.token_ids = name, token_ids
        self._source, self._settings = source, settings or StudentSettings()
        self.recipe = _LOW_RANK if self._settings.rank else _WHOLE_MATRICES
        self._layers = self._settings.layers or tuple(range(source.header.n_layer))
        self._decoder = read_decoder(source)
        self.frozen: Params = {
            "target": _as_factor(target.rows(target.output, token_ids)),
            "row": jnp.asarray(source.output_rows(token_ids)),
            "layers": {},
        }
        if self._settings.rank is not None:
            matrices = filter(self._is_narrow, self._decoder.parts)
            self.frozen["layers"] = {part: _as_factor(self._layers_of(part)) for part in matrices}
        if self._settings.rank is not None or not self._settings.output:
            self.frozen["output"] = _as_factor(self._output())

    def embed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return the source's input embeddings of tokens."""
        return self._source.embed(tokens)

    def init(self, key: Array) -> Params:
        """Return the source's parameters; low-rank changes begin as 0."""
        parts = [part for part in self._decoder.parts if not self._is_narrow(part)]
        own = {part: jnp.asarray(self._layers_of(part)) for part in parts}
        params: Params = {"layers": own, "norm": jnp.asarray(self._source.vector(OUTPUT_NORM))}
        for part, frozen in self.frozen["layers"].items():
            key, own_key = jax.random.split(key)
            params["layers"][part] = self._change(frozen.shape, own_key)
        if self._settings.output:
            frozen = self.frozen.get("output")
            whole = frozen is None
            params["output"] = jnp.asarray(self._output()) if whole else self._change(frozen.shape, key)
        return params

    # ---- what JAX traces ----

    def loss(self, params: Params, frozen: Params, batch: TrainingBatch, key: Array) -> Array:
        """Return the mean of KL(target || student) over the kept tokens, in nats."""
        del key
        logits = self.logits(params, frozen, batch)
        features = at_answers(batch.features, batch).astype(jnp.float32)
        wanted = score(features.reshape(-1, features.shape[-1]), frozen["target"])
        p, q = jax.nn.log_softmax(wanted, -1), jax.nn.log_softmax(logits, -1)
        weights = batch.weights.reshape(-1)
        return ((jnp.exp(p) * (p - q)).sum(-1) * weights).sum() / jnp.maximum(weights.sum(), 1.0)

    def rollout(self, params: Params, frozen: Params, batch: TrainingBatch, n: int) -> Array:
        """Return bool (rows, a, n): whether the next tokens are the student's likeliest.

        Where all before were right, the student's own tokens are those of the text.
        """
        right = likeliest_is_next(self.logits(params, frozen, batch), frozen["row"], batch)
        return jnp.stack([jnp.roll(right, -step, 1) for step in range(n)], -1)

    def logits(self, params: Params, frozen: Params, batch: TrainingBatch) -> Array:
        """Return the logits after each answer's column, (rows * a, kept)."""
        layers = {
            part: _matrix(params["layers"].get(part), frozen["layers"].get(part))
            for part in self._decoder.parts
        }
        x = self._decoder.hidden(layers, batch.embeddings.astype(jnp.float32), batch.text)
        x = at_answers(x, batch).reshape(-1, x.shape[-1])
        x = rms_norm(x, params["norm"], self._decoder.shape.epsilon)
        return multiply(x, _matrix(params.get("output"), frozen.get("output")))

    # ---- the source's tensors; matrices transposed, (k, n) ----

    def _is_narrow(self, part: str) -> bool:
        """Return whether a low-rank change is trained for a layer's tensor."""
        return self._settings.rank is not None and self._source.info(f"blk.0.{part}").is_matrix

    def _layers_of(self, part: str) -> npt.NDArray[np.float32]:
        """Return a tensor of all used layers, shape (n_layers, ...)."""
        return np.stack([self._read(f"blk.{i}.{part}") for i in self._layers])

    def _output(self) -> npt.NDArray[np.float32]:
        return self._source.rows(self._source.output, self.token_ids).T

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        return self._source.rows(name).T if self._source.info(name).is_matrix else self._source.vector(name)

    def _change(self, shape: tuple[int, ...], key: Array) -> Params:
        """Return the factors of a low-rank change to matrices of a shape (..., k, n); their product is 0."""
        *layers, k, n = shape
        rank = self._settings.rank or 0
        down = jax.random.normal(key, (*layers, k, rank)) * k**-0.5
        return {"down": down, "up": jnp.zeros((*layers, rank, n))}

    # ---- the file ----

    def export(self, params: Params, path: Path, type_: str) -> None:
        """Write the student as a cut draft (vocabulary_cut.py), its matrices quantized to `type_`."""
        changes = TensorChanges(self._layers, type_, lambda name: self._exported(params, name))
        cut(
            self._source.header,
            path,
            self.token_ids,
            source_sha256=hash_file(self._source.header.path),
            changes=changes,
        )

    def _exported(self, params: Params, name: str) -> npt.NDArray[np.float32] | None:
        """Return a tensor for the file, by its name there; None: it is the source's."""
        if name == OUTPUT_NORM:
            return np.asarray(params["norm"])
        if name == self._source.output:
            return self._trained(params.get("output"), self._output)
        if not name.startswith("blk."):
            return None
        _, i, part = name.split(".", 2)
        own = jax.tree.map(lambda layers: layers[int(i)], params["layers"][part])
        return self._trained(own, lambda: self._read(f"blk.{self._layers[int(i)]}.{part}"))

    @staticmethod
    def _trained(
        own: Params | None, source: Callable[[], npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32] | None:
        if isinstance(own, dict):
            changed: npt.NDArray[np.float32] = source() + np.asarray(own["down"]) @ np.asarray(own["up"])
            return changed.T
        return None if own is None else np.asarray(own, np.float32).T


def _matrix(own: Params | None, frozen: Array | None) -> Array | LowRankMatrix:
    """Return a tensor that is trained, frozen, or frozen with a low-rank change."""
    if own is None:
        return frozen
    return LowRankMatrix(frozen, own["down"], own["up"]) if isinstance(own, dict) else own


def _as_factor(matrices: npt.NDArray[np.float32]) -> Array:
    """Return frozen matrices as they enter products."""
    return jnp.asarray(matrices).astype(FACTOR)


def choose_layers(
    source: ModelWeights,
    target: ModelWeights,
    token_ids: npt.NDArray[np.int64],
    texts: Sequence[TrainingText],
    n_kept: int,
) -> tuple[int, ...]:
    """Return the `n_kept` layers of `source` that a shallow student has, ascending.

    Leaves out neighbours (arXiv 2403.17887), where the rest is nearest to the target before training: without
    layers 7 to 14 of 24, Qwen2.5-Coder-0.5B agrees with the target in 55 %, without 14 to 21 in 10 %. Reads
    some hundred tokens of `texts` for each place. Raises UsageError unless 2 <= n_kept < all.
    """
    n_layer = source.header.n_layer
    if not 2 <= n_kept < n_layer:
        raise UsageError(
            f"a shallow student has 2 to {n_layer - 1} of the model's {n_layer} layers", value=n_kept
        )
    # With a change of rank 1, which begins as 0, the matrices stay in 16 bits.
    whole = StudentFamily("whole", source, target, token_ids, StudentSettings(rank=1, output=False))
    packing = TextPacking(texts, _FEW)
    batch = packing.batch(packing.epoch(0, 0)[: _FEW.n], whole.embed)
    params = whole.init(jax.random.key(0))

    def divergence(layers: Array, *trees: Params) -> Array:
        params, frozen = (
            {**tree, "layers": jax.tree.map(lambda x: x[layers], tree["layers"])} for tree in trees
        )
        return whole.loss(params, frozen, batch, jax.random.key(0))

    divergence = jax.jit(divergence)

    found: dict[tuple[int, ...], float] = {}
    for gap in range(1, n_kept):  # the first and the last layer always stay
        layers = (*range(gap), *range(gap + n_layer - n_kept, n_layer))
        found[layers] = float(divergence(jnp.array(layers), params, whole.frozen))
    return min(found, key=lambda layers: found[layers])
