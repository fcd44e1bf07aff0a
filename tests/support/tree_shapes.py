"""Shapes of trees of tokens: the parents of their nodes in depth-first pre-order, -1 above the first."""

from __future__ import annotations

import numpy as np

DEEP = [*range(-1, 31), 15]  # 32 below each other, and one beside the lower half
WIDE = [-1] * 31
WIDEST = [*range(-1, 7), *[7] * 32]  # a trunk of 8, then 32 leaves
SPREAD = [-1, 0, 1, 1, 0, 4, -1, 6, 7, 7, -1]


def random_shape(rng: np.random.Generator, n: int) -> list[int]:
    """Return the parents of n nodes."""
    path, parents = [-1], []
    for node in range(n):
        if rng.random() < 0.5:
            del path[rng.integers(1, len(path) + 1) :]
        parents.append(path[-1])
        path.append(node)
    return parents


def paths(parents: list[int]) -> list[list[int]]:
    """Return for each node the nodes from the top down to it."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def trunk(parents: list[int]) -> int:
    """Return how many nodes the trunk has."""
    return next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
