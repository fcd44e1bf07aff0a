"""The optimizer: Muon or AdamW for matrices, Adam for vectors and numbers.

Muon (K. Jordan, 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982) makes steps equally long
in all directions of a matrix. A new head learns about twice as much from a step as with AdamW, and bears
longer steps. Muon multiplies each matrix with itself: too slow for a model of many layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from edgespec.apps.forge.training.arithmetic import FACTOR, dot
from edgespec.apps.forge.training.family import Params, TrainingRecipe

_ITERATIONS = 4  # with the author's 5 a head learns no more
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration, its author's
_MOMENTUM = 0.95

MUON = TrainingRecipe("muon", rate=7e-3, vector_rate=5e-4, warm_up=10, n_rows=6)


def optimizer(recipe: TrainingRecipe) -> optax.GradientTransformation:
    """Return the transformation of gradients to full-length steps downhill."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    matrices = adam
    if recipe.matrices == "muon":
        matrices = optax.chain(optax.trace(_MOMENTUM, nesterov=True), optax.stateless(_orthogonalize))
    decay = optax.add_decayed_weights(recipe.decay)
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.multi_transform(
            {
                "matrix": optax.chain(matrices, decay, optax.scale(-recipe.rate)),
                "vector": optax.chain(adam, optax.scale(-recipe.vector_rate)),
            },
            lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params),
        ),
    )


def _orthogonalize(gradients: Params, _params: Params) -> Params:
    return jax.tree.map(orthogonal, gradients)


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
