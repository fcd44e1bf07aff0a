"""The token tree that a step proposes: a small program that every step compiles and runs once.

Drafters write trees, and passes.py rewrites them. `lower` makes of the last one what the target's pass
and the verifier read; `dump` draws it:

    (the sequence's last token)
    ├╴0 ' return'     sampled     from slot 0
    │ ├╴1 ' a'        sampled     from slot 1
    │ │ └╴2 ' +'      argmax
    │ └╴3 ' sum'      sampled     from slot 2: drawn after ' a' and without it
    └╴4 ' if'         suffix      a point mass, the suffix store's

A node's parent comes before it. A chain is the tree whose node i has parent i - 1; no code treats it as
another thing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Source = Literal["suffix", "argmax", "sampled", "forced"]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A proposed token: where it hangs in the tree, and how it was drawn."""

    parent: int
    """Index of the node it follows, smaller than its own; -1: it follows the sequence's last token."""
    token: int
    source: Source
    path: float
    """Estimated probability that this node and all above it are accepted."""
    slot: int = -1
    """The sampler's slot with the distribution that it was sampled from; -1: a point mass."""
    chance: float = 1.0
    """Estimated acceptance, given that its parent is accepted."""
    bucket: int = 0
    next_bucket: int = 0
    is_top: bool = True
    """Whether it is the likeliest token of its distribution."""


Tree = tuple[TreeNode, ...]


class Lowered(NamedTuple):
    """A tree as the target's batch and the verifier read it: an int32 for each node, as in TreeNode."""

    tokens: array[int]
    parents: array[int]
    slots: array[int]

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes in the pass."""
        return len(self.tokens)

    def paths(self) -> list[tuple[int, ...]]:
        """Return the tokens that lead to each of the target's rows: none to the first, then to each node."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return paths

    def depth(self, path: Sequence[int]) -> int:
        """Return how many positions were drafted along the accepted `path` of nodes.

        len(path) if no node follows it, so that the draft ended there; else the depth of the tree.
        """
        end = path[-1] if path else -1
        if end not in self.parents[end + 1 :]:
            return len(path)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths)


NO_NODES = Lowered(array("i"), array("i"), array("i"))


def is_chain(tree: Tree) -> bool:
    """Whether no node has a sibling and each follows the one before it."""
    return [node.parent for node in tree] == list(range(-1, len(tree) - 1))


def lower(tree: Tree) -> Lowered:
    """The arrays of `tree` for the batch and the verifier; `order` has laid it out."""
    if not tree:
        return NO_NODES
    return Lowered(
        array("i", [node.token for node in tree]),
        array("i", [node.parent for node in tree]),
        array("i", [node.slot for node in tree]),
    )


def dump(tree: Tree, piece: Callable[[int], str]) -> str:
    """Draw `tree`, a line a node: its text as `piece` gives it, source, chance and path; "" without nodes."""
    below = children_of(tree)
    margins = [""] * (len(tree) + 1)
    rows = []
    for i in depth_first(below):
        node = tree[i]
        is_last = i == below[node.parent][-1]
        margins[i] = margins[node.parent] + ("  " if is_last else "│ ")
        branch = margins[node.parent] + ("└╴" if is_last else "├╴")
        rows.append((branch + repr(piece(node.token)), node))
    width = max((len(text) for text, _ in rows), default=0)
    return "\n".join(
        f"{text:{width}}  {node.source:7}  chance {node.chance:.2f}  path {node.path:.2f}"
        for text, node in rows
    )


def children_of(tree: Tree) -> list[list[int]]:
    """Return the children of each node; last, so at -1, come those of the root."""
    below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for i, node in enumerate(tree):
        below[node.parent].append(i)
    return below


def depth_first(below: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes depth first, siblings as they stand in `below`."""
    found: list[int] = []
    waiting = list(reversed(below[-1]))
    while waiting:
        i = waiting.pop()
        found.append(i)
        waiting.extend(reversed(below[i]))
    return found
