"""Interface between the training loop and a family of drafts: the family's methods, and batches.

A batch has n rows of m columns. A row holds the ends of one or several texts; attention stays inside a text
(`text` tells them apart). For a column c:

    tokens[c]      its token
    features[c]    the target's hidden state after it, from which the target predicts tokens[c + 1]

A draft learns to predict what follows the columns in `answers`: the target wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import jax

Params = Any
"""Nested dicts of float32 arrays."""

Batch = Any
"""Data of one training step: a TrainingBatch, or another tuple of arrays that has `weights`."""


class TrainingBatch(NamedTuple):
    """Texts of one training step: numpy arrays on the host, JAX arrays in a traced function."""

    tokens: Any
    """int32 (n, m)."""
    embeddings: Any
    """float16 (n, m, width): `TrainableFamily.embed` of the tokens."""
    features: Any
    """float16 (n, m, n_embd); 0 where unknown (last token of a text, padding)."""
    text: Any
    """int32 (n, m): number of the column's text in its row, from 0; -1: padding at the row's end.

    RoPE depends on distances only, so a column's number serves as its position.
    """
    answers: Any
    """int32 (n, a): columns c to learn, ascending; 0: padding.

    tokens[c + 1] is of the same text and the target wrote it, features[c] is known, c is not the text's first
    column. A text's answers are neighbours: c, c + 1, c + 2, ...
    """
    weights: Any
    """float32 (n, a): of an answer in the loss, mostly 1; 0 for padding."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Hyperparameters with which a family is trained."""

    matrices: Literal["muon", "adam"]
    rate: float
    """Learning rate of matrices, after the warm-up. Muon: step length in each direction."""
    vector_rate: float
    warm_up: int
    n_rows: int
    clip: float = 0.5
    """Longest global norm of gradients."""
    decay: float = 0.01


class Trainable(Protocol):
    """A draft as far as a training step knows it: parameters and loss."""

    @property
    def recipe(self) -> TrainingRecipe:
        """The hyperparameters it is trained with."""

    @property
    def frozen(self) -> Params:
        """Arrays that training does not change, such as the output matrix; an argument of traced functions.

        A traced function would copy arrays that are no arguments into its program.
        """

    def init(self, key: jax.Array) -> Params:
        """Return new parameters; `key` for random ones."""

    def loss(self, params: Params, frozen: Params, batch: Batch, key: jax.Array) -> jax.Array:
        """Return the loss, a mean over the batch's answers; `key` is for noise. Traced by JAX."""


class TrainableFamily(Trainable, Protocol):
    """A kind of draft: parameters, loss of a TrainingBatch, and the file that it becomes."""

    @property
    def name(self) -> str:
        """The kind of draft: "head"."""

    def embed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return input embeddings, shape (*tokens.shape, width); called on the host."""

    def rollout(self, params: Params, frozen: Params, batch: TrainingBatch, n: int) -> jax.Array:
        """Return bool (rows, a, n): whether a draft from each answer has the text's next tokens.

        Traced by JAX. [row, i, s]: given the target's features up to column answers[i] - 1 and the tokens up
        to column answers[i] + s, the draft's likeliest next token is tokens[answers[i] + s + 1]. Undefined
        where answers[i] + s is no answer of the same text.
        """

    def export(self, params: Params, path: Path, type_: str) -> None:
        """Write the draft as a GGUF file, quantized to `type_` ("q4_0", "q8_0", "f16", "f32").

        The file is complete or missing. Raises EdgespecError when it cannot be written.
        """
