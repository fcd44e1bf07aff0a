"""What the trainer asks of a family of drafts, and the batches that it hands out.

A batch has n rows of m columns. A row holds the ends of one or several texts, one after another: a family
keeps attention inside one text (`text` tells them apart). Column c means the same everywhere:

    tokens[c]      the token that is read there
    features[c]    the target's hidden state after reading it: what the target predicts tokens[c + 1] from

A draft learns the columns listed in `answers`, of which the next token is the target's own.
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


class TrainingBatch(NamedTuple):
    """The texts of one training step; numpy arrays on the host, JAX arrays inside a traced function."""

    tokens: Any
    """int32 (n, m)."""
    embeddings: Any
    """float16 (n, m, width): `TrainableFamily.embed` of the tokens."""
    features: Any
    """float16 (n, m, n_embd); 0 where it is not known (the last token of a text, padding)."""
    text: Any
    """int32 (n, m): which text of its row a column belongs to, from 0; -1 for padding at the row's end.

    RoPE turns by the distance of two columns only, so that a column's number serves as its position.
    """
    answers: Any
    """int32 (n, a): columns c to learn, ascending; 0 for padding. tokens[c + 1] is of the same text and was
    written by the target, features[c] is known; c is not the text's first column. A text's answers are
    neighbours: c, c + 1, c + 2, ..."""
    weights: Any
    """float32 (n, a): 1 for an answer, 0 for padding."""


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """How a family of drafts is trained, whatever the data and the time."""

    matrices: Literal["muon", "adam"]
    rate: float
    """Of matrices, after the warm-up. Muon: the length of a step in each direction."""
    vector_rate: float
    """Of vectors (norms, biases) and numbers."""
    warm_up: int
    """Steps until the rates are reached."""
    n_rows: int
    """Rows of a batch (batches.Rows)."""
    clip: float = 0.5
    """Longest gradient."""
    decay: float = 0.01
    """Weight decay of matrices (arXiv 1711.05101)."""


class TrainableFamily(Protocol):
    """A kind of draft: its parameters, what they are trained for, and the file that it becomes."""

    @property
    def name(self) -> str:
        """Return the name of the family, as in `--families`."""

    @property
    def recipe(self) -> TrainingRecipe:
        """Return how it is trained."""

    @property
    def frozen(self) -> Params:
        """Return arrays that `loss` and `walk` read and training leaves alone, such as the output matrix.

        Handed to them as an argument: what a traced function reads from outside is copied into the program.
        """

    def init(self, key: jax.Array) -> Params:
        """Return the parameters that training starts from; `key` for what is random of them."""

    def embed(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return the input embeddings of tokens, shape (*tokens.shape, width); called on the host."""

    def loss(
        self, params: Params, frozen: Params, batch: TrainingBatch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return what is to be made small, a mean over the batch's answers, and numbers to show by name.

        Traced by JAX; `key` for what is random (noise).
        """

    def walk(self, params: Params, frozen: Params, batch: TrainingBatch, n: int) -> jax.Array:
        """Return bool (rows, a, n): whether the draft, walking on its own, likes the text's next tokens best.

        [row, i, s]: the draft has the target's features up to column answers[i] - 1 only, read the tokens up
        to column answers[i] + s, and its likeliest next one is tokens[answers[i] + s + 1]. Undefined where
        answers[i] + s is not an answer of the same text. Traced by JAX.
        """

    def export(self, params: Params, path: Path, type_: str) -> None:
        """Write the draft as the GGUF file `path`, quantized to `type_` ("q4_0", "q8_0", "f16", "f32").

        The file appears complete or not at all. Raises EdgespecError when it cannot be written.
        """
