"""Distance of a draft's predictions from the target's."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from edgespec.apps.forge.training.arithmetic import score


@dataclass(frozen=True)
class ComparedTokens:
    """Tokens whose logits are compared, with the target's probabilities."""

    output: Array
    """Rows of the output matrix, (v, n_embd)."""
    stands_for: Array
    """Logarithm of the number of tokens that each stands for, (v,)."""
    log_probs: Array
    """The target's, (answers, v)."""

    def divergence(self, predicted: Array) -> Array:
        """Return KL(target || head) at each answer, in nats; `predicted` features are (answers, n_embd)."""
        log_probs = jax.nn.log_softmax(score(predicted, self.output) + self.stands_for, -1)
        return (jnp.exp(self.log_probs) * (self.log_probs - log_probs)).sum(-1)


def choose_tokens(
    features: Array, weights: Array, output: Array, n: tuple[int, int], key: Array
) -> ComparedTokens:
    """Choose the target's n[0] likeliest tokens over all answers, and a random n[1] of the others.

    `features` are the target's, (rows, a, n_embd), `weights` the answers', (rows, a), `output` the matrix of
    all kept tokens, (kept, n_embd). A sample of unlikely tokens suffices, as the gradients of single ones are
    tiny; it saves most of the work with the output matrix.
    """
    n_kept = len(output)
    if sum(n) >= n_kept:
        log_probs = jax.nn.log_softmax(score(features.reshape(-1, features.shape[-1]), output), -1)
        return ComparedTokens(output, jnp.zeros(n_kept), log_probs)
    mass = jax.lax.map(  # by rows: all logits at once would take most of the memory
        lambda row: (jax.nn.softmax(score(row[0], output), -1) * row[1][:, None]).sum(0), (features, weights)
    ).sum(0)
    _, likeliest = jax.lax.top_k(mass, n[0])
    # A random sample: the greatest of independent random numbers.
    chance = jax.random.uniform(key, (n_kept,)).at[likeliest].set(-1.0)
    _, others = jax.lax.top_k(chance, n[1])
    each = np.log((n_kept - n[0]) / n[1])
    stands_for = jnp.concatenate([jnp.zeros(n[0]), jnp.full(n[1], each)])
    # Gathering rows of the matrix for a second product is faster than gathering columns of the logits.
    rows = output[jnp.concatenate([likeliest, others])]
    logits = score(features.reshape(-1, features.shape[-1]), rows)
    return ComparedTokens(rows, stands_for, jax.nn.log_softmax(logits + stands_for, -1))
