"""Muon for `draft_shapes.py`, as `forge.training.optimizer`, with large matrices orthogonalized in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from draft_shapes_model import Params
from edgespec.forge.training.optimizer import orthogonal

_VECTORS = ("mask",)  # rows that are vectors, not a matrix


def _in_parts(gradient: Array, part: int) -> Array:
    """Return `orthogonal` of parts of `part` rows or columns of the longer side each; 0: of the whole."""
    k, n = gradient.shape
    if not part or max(k, n) <= part or max(k, n) % part:
        return orthogonal(gradient)
    side = 1 if n >= k else 0
    parts = [orthogonal(each) for each in jnp.split(gradient, max(k, n) // part, side)]
    return jnp.concatenate(parts, side) * (1.0 if side else (part / k) ** 0.5)


def _is_matrix(path: tuple[object, ...], x: Array) -> bool:
    return x.ndim > 1 and not any(getattr(key, "key", "") in _VECTORS for key in path)


def shape_optimizer(rate: float, part: int) -> optax.GradientTransformation:
    """Return the transformation of gradients to full-length steps downhill."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)

    def step(gradients: Params, _params: Params) -> Params:
        return jax.tree.map(lambda x: _in_parts(x, part), gradients)

    muon = optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(step),
        optax.add_decayed_weights(0.01),
        optax.scale(-rate),
    )

    def label(path: tuple[object, ...], x: Array) -> str:
        return "matrix" if _is_matrix(path, x) else "vector"

    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.multi_transform(
            {"matrix": muon, "vector": optax.chain(adam, optax.scale(-5e-4))},
            lambda params: jax.tree_util.tree_map_with_path(label, params),
        ),
    )
