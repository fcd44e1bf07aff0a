"""Arithmetic that decoders share, for training on processors.

Matrix products take nearly all of the time. Where the processor multiplies bfloat16 at twice the speed of
float32 (AVX512-BF16, AMX), factors are rounded to it; sums and the optimizer's weights are float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from edgespec.apps.forge.training.batches import TrainingBatch
from edgespec.platform.machine import read_cpu

FACTOR: Any = jnp.bfloat16 if {"avx512_bf16", "amx_bf16"} & read_cpu().flags else jnp.float32

Params = Any
"""Nested dicts of float32 arrays."""

MASKED = -1e9
"""An attention score that softmax turns into 0."""


def dot(x: Array, y: Array, x_dim: int, y_dim: int) -> Array:
    """Return the product of two matrices over dimension `x_dim` of x and `y_dim` of y, in float32."""
    dimensions = (((x_dim,), (y_dim,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(FACTOR), y.astype(FACTOR), dimensions, preferred_element_type=jnp.float32
    )


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _transposed(x: Array) -> Array:
    """Transpose x so that XLA does not fold that into the next product.

    XLA's products over the first dimensions of both factors run at a third of the speed.
    """
    half = x.shape[1] // 2
    return jnp.concatenate([x[:, :half].T.astype(FACTOR), x[:, half:].T.astype(FACTOR)])


def _product(x: Array, weight: Array) -> Array:
    return dot(_rows(x), weight, 1, 0).reshape(*x.shape[:-1], weight.shape[1])


def _project_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x.astype(FACTOR), weight)


def _project_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    gradients = _rows(gradient)
    return dot(gradients, weight, 1, 1).reshape(x.shape), dot(_transposed(_rows(x)), gradients, 1, 0)


_project: Any = jax.custom_vjp(_product)
_project.defvjp(_project_forward, _project_backward)


def project(x: Array, weight: Array) -> Array:
    """Return `x @ weight`, shapes (..., k) and (k, n)."""
    return _project(x, weight)


def _row_products(x: Array, rows: Array) -> Array:
    return dot(x, rows, 1, 1)


def _score_forward(x: Array, rows: Array) -> tuple[Array, Array]:
    return _row_products(x, rows), rows


def _score_backward(rows: Array, gradient: Array) -> tuple[Array, None]:
    return dot(gradient, rows, 1, 0), None


_score: Any = jax.custom_vjp(_row_products)
_score.defvjp(_score_forward, _score_backward)


def score(x: Array, rows: Array) -> Array:
    """Return the products of `x`, (n, k), with frozen `rows`, (v, k): shape (n, v)."""
    return _score(x, rows)


def at_answers(x: Array, batch: TrainingBatch) -> Array:
    """Return the answers' columns of x, (n, m, width): shape (n, a, width)."""
    return jnp.take_along_axis(x, batch.answers[:, :, None], 1)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return x scaled to a mean square of 1, times `weight` (arXiv 1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rope_turns(n: int, width: int, base: float) -> tuple[Any, Any]:
    """Return cosines and sines, each (n, width / 2), of the angles of `n` positions (arXiv 2104.09864)."""
    angles = np.arange(n)[:, None] / base ** (np.arange(0, width, 2) / width)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate neighbouring elements of x, (..., heads, width), by angles of shape (..., width / 2)."""
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cosine - b * sine, a * sine + b * cosine], -1).reshape(x.shape)
