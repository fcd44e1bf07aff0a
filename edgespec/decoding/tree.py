"""The token tree that a step proposes: a small program that every step compiles and runs once.

Drafters write trees, and passes.py rewrites them; the target's pass reads the last one, and the verifier
says which of its nodes stay. `dump` draws it:

    (the sequence's last token)
    ├╴0 ' return'     sampled     from slot 0
    │ ├╴1 ' a'        sampled     from slot 1
    │ │ └╴2 ' +'      argmax
    │ └╴3 ' sum'      sampled     from slot 2: drawn after ' a' and without it
    └╴4 ' if'         suffix      a point mass, the suffix store's

A node's parent comes before it. A chain is the tree whose node i has parent i - 1; no code treats it
specially.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.records import Step
from edgespec.decoding.session import ForwardResult

Source = Literal["suffix", "argmax", "sampled", "forced"]


class TreeNode(msgspec.Struct, frozen=True):
    """A proposed token: its place in the tree, and how it was drawn."""

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


def is_chain(tree: Tree) -> bool:
    """Whether no node has a sibling and each follows the one before it."""
    return [node.parent for node in tree] == list(range(-1, len(tree) - 1))


def lower(tree: Tree) -> tuple[array[int], array[int], array[int]]:
    """Return tokens, parents and slots of the nodes as int32, as the C core reads them."""
    return (
        array("i", [node.token for node in tree]),
        array("i", [node.parent for node in tree]),
        array("i", [node.slot for node in tree]),
    )


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Return the drafted tokens before each of the target's rows: none, then each node's path."""
    found: list[tuple[int, ...]] = [()]
    for node in tree:
        found.append((*found[node.parent + 1], node.token))
    return found


def drafted_depth(tree: Tree, path: Sequence[int]) -> int:
    """Return how many positions were drafted along the accepted `path` of nodes.

    len(path) if no node follows it, since the draft ended there; else the depth of the tree.
    """
    end = path[-1] if path else -1
    if all(node.parent != end for node in tree[end + 1 :]):
        return len(path)
    depths: list[int] = []
    for node in tree:
        depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
    return max(depths)


def dump(tree: Tree, piece: Callable[[int], str]) -> str:
    """Draw `tree`, one line per node: its text by `piece`, source, chance and path; "" without nodes."""
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
    """Return the children of each node; those of the root come last, at index -1."""
    below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for i, node in enumerate(tree):
        below[node.parent].append(i)
    return below


def depth_first(below: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes depth first, siblings in the order of `below`."""
    found: list[int] = []
    waiting = list(reversed(below[-1]))
    while waiting:
        i = waiting.pop()
        found.append(i)
        waiting.extend(reversed(below[i]))
    return found


# ---- the interface of drafters, which propose trees and learn what became of them ----

Tokens = npt.NDArray[np.int32]


class Position(msgspec.Struct, frozen=True):
    """Samples a token after the sequence or after drafted tokens, for target and draft alike."""

    sampler: _core.Sampler
    """Keeps in its slots what drafted tokens were sampled from."""
    recent: Callable[[Sequence[int]], array[int]]
    """The tokens that the filters look back on after these drafted ones, C ints."""
    coins: Callable[[int], list[float]]
    """Return the next n random numbers of the generation, each in [0, 1)."""


class Drafter(Protocol):
    """The three verbs of a drafter, called in this order: begin, then draft and accept in turns.

    For exactness, a drafter must sample each token from the q it leaves in the node's slot (a
    deterministic proposal is a point mass and has none), and whether a sampled token is proposed may depend
    on what came before and on the drafter's own distributions, never on the token's value.
    """

    n_max: int
    """Most nodes of a tree it makes: the slots that the sampler needs."""

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new sequence that holds `tokens` (the prompt and the first emitted token).

        `sampled`: the rule weighs p against q, so that sampled tokens may be proposed; else a token
        is accepted when it is the target's own sample, and only point masses make sense. At most
        `n_predict` tokens are emitted in all.
        """

    def draft(self, tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Return a tree of at most `room` nodes, maybe none, to follow `tokens`, in `tree.order`."""

    def accept(self, tokens: Sequence[int], made: Step, result: ForwardResult) -> None:
        """Learn the outcome of the last draft; the sequence now holds `tokens`.

        `result`: the target's, whose rows are the logits after the sequence and after each node.
        """

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted so far of each source of drafts."""

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""

    def note(self) -> str:
        """Return a sentence about what was drafted, or why nothing was."""
