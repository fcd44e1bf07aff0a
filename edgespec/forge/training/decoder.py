"""The layers of llama, qwen2 and qwen3 in JAX, with the weights of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from edgespec.errors import UsageError
from edgespec.forge.training import arithmetic
from edgespec.forge.training.arithmetic import MASKED, project, rms_norm, rope
from edgespec.forge.training.weights import BlockShape, ModelWeights

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""Architecture -> whether RoPE rotates neighbours (else elements half a head apart)."""

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NEEDED = {"attn_norm.weight", "ffn_norm.weight", *(f"{name}.weight" for name in _MATRICES)}
_POSSIBLE = _NEEDED | {
    *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    *("attn_q_norm.weight", "attn_k_norm.weight"),
}
_ROPE_FACTORS = "rope_freqs.weight"
_SAVED_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class LowRankMatrix(NamedTuple):
    """A frozen matrix (k, n), plus the product of two narrow ones."""

    frozen: Array
    down: Array
    """(k, rank)."""
    up: Array
    """(rank, n)."""


Layer: TypeAlias = Mapping[str, Array | LowRankMatrix]
"""A layer's tensors: names as in the file without "blk.N."; matrices transposed, (k, n).

Several layers have one more dimension in front.
"""


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """Computation of a model's layers."""

    shape: BlockShape
    interleaved: bool
    parts: tuple[str, ...]
    """Tensors of each layer."""
    frequencies: npt.NDArray[np.float64]
    """RoPE, in radians per position, (head_dim / 2,)."""

    def hidden(self, layers: Layer, x: Array, text: Array) -> Array:
        """Return the hidden states, before the last norm, of embeddings `x`, (n, m, n_embd).

        Tokens see those before them of the same text: `text`, int (n, m).
        """
        m = x.shape[1]
        angles = np.arange(m)[:, None] * self.frequencies
        turns = np.cos(angles).astype(np.float32)[None], np.sin(angles).astype(np.float32)[None]
        mask = (text[:, :, None] == text[:, None, :]) & np.tri(m, dtype=bool)

        # A loop, so that one layer is compiled. The backward pass has its large products, but computes
        # attention again: that takes little time and would take most of the memory.
        @partial(jax.checkpoint, prevent_cse=False, policy=_SAVED_PRODUCTS)
        def through(x: Array, layer: Layer) -> tuple[Array, None]:
            return self._layer(layer, x, mask, turns=turns), None

        return jax.lax.scan(through, x, dict(layers))[0]

    def _layer(self, layer: Layer, x: Array, mask: Array, *, turns: tuple[Array, Array]) -> Array:
        shape = self.shape
        h = rms_norm(x, layer["attn_norm.weight"], shape.epsilon)
        q = self._heads(layer, "attn_q", h, shape.n_head) * shape.head_dim**-0.5
        k, v = (self._heads(layer, name, h, shape.n_head_kv) for name in ("attn_k", "attn_v"))
        q, k = (rope(each, *turns, interleaved=self.interleaved) for each in (q, k))
        x = x + _product(layer, "attn_output", _attend(q, k, v, mask))
        h = rms_norm(x, layer["ffn_norm.weight"], shape.epsilon)
        h = jax.nn.silu(_product(layer, "ffn_gate", h)) * _product(layer, "ffn_up", h)
        return x + _product(layer, "ffn_down", h)

    def _heads(self, layer: Layer, name: str, h: Array, n_heads: int) -> Array:
        """Return queries, keys or values, shape (n, m, n_heads, head_dim)."""
        x = _product(layer, name, h).reshape(*h.shape[:2], n_heads, self.shape.head_dim)
        norm = layer.get(f"{name}_norm.weight")
        return x if norm is None else rms_norm(x, norm, self.shape.epsilon)


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Return the attention of queries (n, m, n_head, width) to keys and values (n, m, n_head_kv, width).

    Heads that share keys are rows of one matrix: three products where an einsum makes many small ones.
    """
    n, m, n_head, width = q.shape
    n_kv = k.shape[2]
    q = q.reshape(n, m, n_kv, -1, width).transpose(0, 2, 3, 1, 4).reshape(n * n_kv, -1, width)
    k, v = (each.transpose(0, 2, 1, 3).reshape(n * n_kv, m, width) for each in (k, v))
    scores = _batched(q, k, 2).reshape(n, n_kv, -1, m, m)
    shares = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), -1)
    found = _batched(shares.reshape(n * n_kv, -1, m), v, 1)
    return found.reshape(n, n_head, m, width).transpose(0, 2, 1, 3).reshape(n, m, -1)


def _batched(x: Array, y: Array, y_dim: int) -> Array:
    """Return the float32 products of the matrices in x and y over dimension 2 of x, `y_dim` of y."""
    dimensions = (((2,), (y_dim,)), ((0,), (0,)))
    x, y = x.astype(arithmetic.FACTOR), y.astype(arithmetic.FACTOR)
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


def multiply(x: Array, matrix: Array | LowRankMatrix) -> Array:
    """Return `x @ matrix`."""
    if isinstance(matrix, LowRankMatrix):
        return project(x, matrix.frozen) + project(project(x, matrix.down), matrix.up)
    return project(x, matrix)


def _product(layer: Layer, name: str, x: Array) -> Array:
    y = multiply(x, layer[f"{name}.weight"])
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def read_decoder(source: ModelWeights) -> DecoderLayers:
    """Return the layers of `source`. Raises UsageError for a model that is not known here."""
    header, shape = source.header, source.shape()
    if header.architecture not in ARCHITECTURES:
        raise _unknown(source, f"a {header.architecture} model")
    prefix = "blk.0."
    parts = {info.name.removeprefix(prefix) for info in header.gguf.tensors if info.name.startswith(prefix)}
    if not _NEEDED <= parts <= _POSSIBLE:
        odd = sorted((parts - _POSSIBLE) | (_NEEDED - parts))
        raise _unknown(source, f"its layers have or lack {odd[0]}")
    fields, arch = header.gguf.fields, header.architecture
    scaling = header.gguf.text(f"{arch}.rope.scaling.type")
    if scaling not in ("", "none"):
        raise _unknown(source, f"RoPE is scaled ({scaling})")
    turned = fields.get(f"{arch}.rope.dimension_count")
    if (turned and turned.value != shape.head_dim) or header.head_dim_v != shape.head_dim:
        raise _unknown(source, "RoPE turns a part of each head, or keys and values differ in width")
    frequencies = shape.rope_base ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    if _ROPE_FACTORS in source:
        frequencies = frequencies / source.vector(_ROPE_FACTORS)
    return DecoderLayers(shape, ARCHITECTURES[arch], tuple(sorted(parts)), frequencies)


def _unknown(source: ModelWeights, problem: str) -> UsageError:
    known = ", ".join(ARCHITECTURES)
    return UsageError(f"{source.header.path}: {problem}; only plain {known} models can be trained")
