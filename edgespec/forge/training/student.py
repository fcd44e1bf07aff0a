"""The families "shallow" and "whole": a small model of the target's family, taught by distillation.

    whole      all layers of the small model, with a cut output vocabulary
    shallow    fewer of its layers: those left out that are missed least (choose_layers)

The student reads tokens alone, as any model does, so that its file is an ordinary one (cutting.py). It learns
the target's distribution over the kept tokens, softmax(W_out[cut] f), where the target itself wrote
(arXiv 2310.08461 compares such losses). Its input embeddings stay as they are.
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
from edgespec.forge.cutting import Changes, cut
from edgespec.forge.training.arithmetic import FACTOR, rms_norm, score
from edgespec.forge.training.batches import Packing, Rows, Written
from edgespec.forge.training.decoder import Changed, Layer, multiply, read_decoder
from edgespec.forge.training.family import Batch, Params, Recipe
from edgespec.forge.training.target import EMBEDDINGS, OUTPUT, OUTPUT_NORM, Weights
from edgespec.models.pull import hash_file

# At twice the rate of whole matrices, what the source knew was lost faster than it was taught.
_WHOLE_MATRICES = Recipe("adam", rate=5e-5, vector_rate=5e-5, warm_up=60, n_rows=2)
_LOW_RANK = Recipe("adam", rate=5e-4, vector_rate=5e-4, warm_up=60, n_rows=2)

_FEW = Rows(n=2, columns=384, answers=320)  # what the choice of layers reads


@dataclass(frozen=True, slots=True)
class StudentSettings:
    """Which part of a small model becomes the draft, and what of it is trained."""

    layers: tuple[int, ...] | None = None
    """Layers of the source that stay, ascending; None: all."""
    n_trained: int | None = None
    """How many of them, counted from the end, are trained; None: all."""
    rank: int | None = None
    """Train only a change of this rank to each matrix (LoRA, arXiv 2106.09685); None: the matrices."""
    output: bool = True
    """Train the output matrix too."""


class Student:
    """A student of one target, with a cut vocabulary."""

    def __init__(
        self,
        name: str,
        source: Weights,
        target: Weights,
        token_ids: npt.NDArray[np.int64],
        settings: StudentSettings | None = None,
    ) -> None:
        """Teach the model `source` to say `token_ids`, ascending, as `target` does; both have one vocabulary.

        Raises UsageError for a source whose architecture cannot be trained.
        """
        self.name, self.token_ids = name, token_ids
        self._source, self._settings = source, settings or StudentSettings()
        self.recipe = _LOW_RANK if self._settings.rank else _WHOLE_MATRICES
        self._layers = self._settings.layers or tuple(range(source.header.n_layer))
        self._decoder = read_decoder(source)
        row = np.full(source.info(EMBEDDINGS).rows, -1, np.int32)
        row[token_ids] = np.arange(len(token_ids))
        self.frozen: Params = {
            "target": jnp.asarray(target.rows(target.output, token_ids)).astype(FACTOR),
            "row": jnp.asarray(row),
        }
        for tensor in self._names():
            if not self._is_trained(tensor) or self._is_narrow(tensor):
                self.frozen[tensor] = _as_factor(self._initial(tensor))

    def embed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return the source's own input embeddings of tokens, shape (*tokens.shape, n_embd)."""
        used, where = np.unique(tokens, return_inverse=True)
        rows = self._source.rows(EMBEDDINGS, used).astype(np.float16)
        return rows[where.reshape(tokens.shape)]

    def init(self, key: Array) -> Params:
        """Return the parameters as the source has them; of a change of low rank one factor is random."""
        params: Params = {}
        for tensor in filter(self._is_trained, self._names()):
            if not self._is_narrow(tensor):
                params[tensor] = jnp.asarray(self._initial(tensor))
                continue
            (k, n), rank = self.frozen[tensor].shape, self._settings.rank or 0
            key, part = jax.random.split(key)
            params[f"{tensor}.down"] = jax.random.normal(part, (k, rank)) * k**-0.5
            params[f"{tensor}.up"] = jnp.zeros((rank, n))
        return params

    def layer_of(self, layer: int) -> dict[str, Array]:
        """Return the tensors of a layer of the source, as a frozen one has them."""
        return {part: _as_factor(self._read(f"blk.{layer}.{part}")) for part in self._decoder.parts}

    # ---- what JAX traces ----

    def loss(
        self, params: Params, frozen: Params, batch: Batch, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Return the mean of KL(target || student) over the kept tokens, in nats, and two shares.

        "overlap" is the sum of min(p, q): what is accepted at temperature 1. "agreement" is how often
        both like the same token best: at temperature 0.
        """
        del key
        logits = self.logits(params, frozen, batch)
        features = _at_answers(batch.features, batch.answers).astype(jnp.float32)
        wanted = score(features.reshape(-1, features.shape[-1]), frozen["target"])
        p, q = jax.nn.log_softmax(wanted, -1), jax.nn.log_softmax(logits, -1)
        weights = batch.weights.reshape(-1)
        n = jnp.maximum(weights.sum(), 1.0)
        divergence = ((jnp.exp(p) * (p - q)).sum(-1) * weights).sum() / n
        overlap = (jnp.exp(jnp.minimum(p, q)).sum(-1) * weights).sum() / n
        agreement = ((p.argmax(-1) == q.argmax(-1)) * weights).sum() / n
        return divergence, {"divergence": divergence, "overlap": overlap, "agreement": agreement}

    def walk(self, params: Params, frozen: Params, batch: Batch, n: int) -> Array:
        """Return bool (rows, a, n): whether the next tokens are the student's likeliest.

        Where all before were right, a student that reads its own tokens reads those of the text.
        """
        last = batch.tokens.shape[1] - 1
        following = jnp.take_along_axis(batch.tokens, jnp.minimum(batch.answers + 1, last), 1)
        likeliest = self.logits(params, frozen, batch).argmax(-1).reshape(following.shape)
        right = likeliest == frozen["row"][following]
        return jnp.stack([jnp.roll(right, -step, 1) for step in range(n)], -1)

    def logits(self, params: Params, frozen: Params, batch: Batch) -> Array:
        """Return the student's logits of what follows each answer, (rows * a, kept)."""
        layers = [self._layer(params, frozen, i) for i in range(len(self._layers))]
        x = self._decoder.hidden(layers, batch.embeddings.astype(jnp.float32), batch.text)
        x = _at_answers(x, batch.answers).reshape(-1, x.shape[-1])
        x = rms_norm(x, _tensor(params, frozen, OUTPUT_NORM), self._decoder.shape.epsilon)
        return multiply(x, _tensor(params, frozen, OUTPUT))

    def _layer(self, params: Params, frozen: Params, i: int) -> Layer:
        return {part: _tensor(params, frozen, f"blk.{i}.{part}") for part in self._decoder.parts}

    # ---- the student's tensors: names as in its own file ----

    def _names(self) -> list[str]:
        layers = range(len(self._layers))
        blocks = [f"blk.{i}.{part}" for i in layers for part in self._decoder.parts]
        return [*blocks, OUTPUT_NORM, OUTPUT]

    def _is_trained(self, tensor: str) -> bool:
        if tensor == OUTPUT:
            return self._settings.output
        if tensor == OUTPUT_NORM or self._settings.n_trained is None:
            return True
        return int(tensor.split(".")[1]) >= len(self._layers) - self._settings.n_trained

    def _is_narrow(self, tensor: str) -> bool:
        """Whether a change of low rank to it is trained."""
        is_vector = tensor == OUTPUT_NORM or tensor.endswith(("_norm.weight", ".bias"))
        return self._is_trained(tensor) and self._settings.rank is not None and not is_vector

    def _initial(self, tensor: str) -> npt.NDArray[np.float32]:
        """Return a tensor as the source has it; a matrix transposed, (k, n)."""
        if tensor == OUTPUT:
            return self._source.rows(self._source.output, self.token_ids).T
        if not tensor.startswith("blk."):
            return self._read(tensor)
        _, i, part = tensor.split(".", 2)
        return self._read(f"blk.{self._layers[int(i)]}.{part}")

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        return self._source.rows(name).T if self._source.info(name).is_matrix else self._source.vector(name)

    # ---- the file ----

    def export(self, params: Params, path: Path, type_: str) -> None:
        """Write the student as a cut draft (cutting.py), its matrices quantized to `type_`."""
        changes = Changes(self._layers, type_, lambda name: self._exported(params, name))
        cut(
            self._source.header,
            path,
            self.token_ids,
            source_sha256=hash_file(self._source.header.path),
            changes=changes,
        )

    def _exported(self, params: Params, name: str) -> npt.NDArray[np.float32] | None:
        """Return a tensor that was trained, as the file has it; None for others."""
        tensor = OUTPUT if name == self._source.output else name
        if f"{tensor}.down" in params:
            change = np.asarray(params[f"{tensor}.down"]) @ np.asarray(params[f"{tensor}.up"])
            changed: npt.NDArray[np.float32] = self._initial(tensor) + change
            return changed.T
        return np.asarray(params[tensor], np.float32).T if tensor in params else None


def _tensor(params: Params, frozen: Params, name: str) -> Array | Changed:
    if f"{name}.down" in params:
        return Changed(frozen[name], params[f"{name}.down"], params[f"{name}.up"])
    return params[name] if name in params else frozen[name]


def _as_factor(values: npt.NDArray[np.float32]) -> Array:
    """Return a frozen tensor: a matrix as it enters products."""
    return jnp.asarray(values).astype(FACTOR if values.ndim > 1 else jnp.float32)


def _at_answers(x: Array, answers: Array) -> Array:
    """Return the answers' columns of x, (n, m, width): shape (n, a, width)."""
    return jnp.take_along_axis(x, answers[:, :, None], 1)


def choose_layers(
    source: Weights,
    target: Weights,
    token_ids: npt.NDArray[np.int64],
    texts: Sequence[Written],
    n_kept: int,
    *,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> tuple[int, ...]:
    """Return the layers of `source` that a shallow student of `n_kept` layers has, ascending.

    Neighbours are left out (arXiv 2403.17887), there where what is left is nearest to the target before it is
    trained: of 24 layers of Qwen2.5-Coder-0.5B the target agrees with 55 % without layers 7 to 14, and with
    10 % without 14 to 21. Reads some hundred tokens of `texts` for each place. Raises UsageError for an
    `n_kept` that leaves nothing or everything.
    """
    n_layer = source.header.n_layer
    if not 2 <= n_kept < n_layer:
        raise UsageError(
            f"a shallow student has 2 to {n_layer - 1} of the model's {n_layer} layers", value=n_kept
        )
    few = Student(
        "shallow", source, target, token_ids, StudentSettings(tuple(range(n_kept)), 0, output=False)
    )
    packing = Packing(texts, _FEW)
    batch = packing.batch(packing.epoch(0, 0)[: _FEW.n], few.embed)
    params, frozen = few.init(jax.random.key(0)), dict(few.frozen)
    blocks = {layer: few.layer_of(layer) for layer in range(n_layer)}

    loss = jax.jit(few.loss)
    found: dict[tuple[int, ...], float] = {}
    n_places = n_kept - 1  # the first and the last layer always stay
    for gap in range(1, n_places + 1):
        on_progress((gap - 1) / n_places)
        layers = (*range(gap), *range(gap + n_layer - n_kept, n_layer))
        for i, layer in enumerate(layers):
            frozen |= {f"blk.{i}.{part}": tensor for part, tensor in blocks[layer].items()}
        found[layers] = float(loss(params, frozen, batch, jax.random.key(0))[0])
    return min(found, key=lambda layers: found[layers])
