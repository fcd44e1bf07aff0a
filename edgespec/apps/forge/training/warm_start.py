"""Weights that a head starts from: the best linear prediction of the target's next hidden state.

Least squares over some ten thousand tokens take seconds. For a 1.5B target they find the likeliest token in a
third of all places, as half an hour of training from random numbers does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import TrainingText
from edgespec.apps.forge.training.batches import EmbedFn

Floats = npt.NDArray[np.float32]

_BLOCK = 4096  # columns
_RIDGE = 1e-2  # of the mean variance: damps directions that the sample hardly has


def fit_fusion(
    texts: Iterable[TrainingText], embed: EmbedFn, norm: Floats, n_most: int
) -> tuple[Floats, Floats] | None:
    """Fit We and Wf, each (n_embd, n_embd), to predict feature(c) / norm.

    The prediction for column c is `embed(token c) @ We + feature(c - 1) @ Wf`. Up to `n_most` columns
    are read; None if there are fewer than a matrix has rows. `norm`: weights of the target's last norm.
    """
    width, n = len(norm), 0
    squares, products = np.zeros((2 * width, 2 * width)), np.zeros((2 * width, width))
    scale = np.where(np.abs(norm) < 0.1 * np.abs(norm).mean(), np.inf, norm)  # tiny: no information
    for x, y in _blocks(texts, embed):
        squares += x.T @ x
        products += x.T @ (y / scale)
        n += len(x)
        if n >= n_most:
            break
    if n < 2 * width:
        return None
    variances = np.diag(squares)
    # Embeddings are a hundred times smaller than features: each part has its own ridge.
    ridge = _RIDGE * np.repeat([variances[:width].mean(), variances[width:].mean()], width)
    found = np.linalg.solve(squares + np.diag(ridge), products).astype(np.float32)
    return found[:width], found[width:]


def _blocks(texts: Iterable[TrainingText], embed: EmbedFn) -> Iterator[tuple[Floats, Floats]]:
    """Yield inputs (columns, 2 * n_embd) and features to predict, some thousand columns at a time."""
    inputs, outputs, n = [], [], 0
    for text in texts:
        features = text.features.astype(np.float32)
        embeddings = embed(text.tokens[text.first + 1 : -1]).astype(np.float32)
        inputs.append(np.concatenate([embeddings, features[:-1]], axis=1))
        outputs.append(features[1:])
        n += len(embeddings)
        if n >= _BLOCK:
            yield np.concatenate(inputs), np.concatenate(outputs)
            inputs, outputs, n = [], [], 0
    if inputs:
        yield np.concatenate(inputs), np.concatenate(outputs)
