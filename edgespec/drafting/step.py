"""One step of a drafter: a growing trunk, its branches, the offers, and their outcome."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgespec.decoding.records import Step
from edgespec.decoding.tree import Source, Tree, TreeNode
from edgespec.drafting.acceptance import AcceptanceTables


class DraftStep(msgspec.Struct):
    """A step's draft: sources add to it, `proposed` is compiled from it and verified; --explain prints it."""

    n_sequence: int
    """Tokens of the sequence that it follows."""
    room: int
    """Most nodes."""
    unit: str
    """Unit of the rate: "tokens/s" or "tokens/J"."""
    drafted: list[int] = msgspec.field(default_factory=list)
    """The trunk's tokens."""
    trunk: list[TreeNode] = msgspec.field(default_factory=list)
    """Each node follows the one before it."""
    branches: list[TreeNode] = msgspec.field(default_factory=list)
    """Nodes off the trunk, each below a node of the trunk (or the sequence)."""
    n_slots: int = 0
    """The sampler's slots in use."""
    offers: list[Tree] = msgspec.field(default_factory=list)
    """All continuations of the trunk that the suffix store offered, each a chain, taken or not."""
    others: list[list[tuple[int, int]]] = msgspec.field(default_factory=list)
    """(token, bucket) of the draft model's likeliest tokens at each position that are not the trunk's."""
    rate: float = 0.0
    """Tokens a second (or a joule) that it was decided with."""
    n_unread: int | None = None
    """Tokens the draft model had not read; None without one."""
    n_prefilled: int = 0
    """Tokens the draft model read before its first pass."""
    passes: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(tokens read, guesses among them) of each pass of the draft model."""
    passes_of_tree: list[tuple[str, Tree]] = msgspec.field(default_factory=list)
    """The tree of trunk and branches, that of the store, and the tree after each pass over them; none for a
    chain."""
    proposed: Tree = ()
    """The tree that goes to the target."""
    draft_s: float = 0.0
    n_accepted: int = 0
    n_emitted: int = 0
    verify_s: float = 0.0

    @property
    def offered(self) -> list[float]:
        """Estimated acceptances of the suffix store's first offer."""
        return [node.chance for node in self.offers[0]] if self.offers else []

    @property
    def depth(self) -> int:
        """Tokens of the trunk."""
        return len(self.drafted)

    @property
    def path(self) -> float:
        """Probability that the whole trunk is accepted."""
        return self.trunk[-1].path if self.trunk else 1.0

    @property
    def bucket(self) -> int:
        """Bucket of the trunk's last token; 0 where there is none."""
        return self.trunk[-1].bucket if self.trunk else 0

    @property
    def n_nodes_left(self) -> int:
        """Room for more nodes: the trunk and sampled branches always stay."""
        return self.room - len(self.trunk) - sum(node.slot >= 0 for node in self.branches)

    def add(self, node: TreeNode) -> None:
        """Append to the trunk a node that follows its end."""
        self.trunk.append(node)
        self.drafted.append(node.token)

    def grow(
        self,
        token: int,
        source: Source,
        chance: float,
        bucket: int,
        *,
        next_bucket: int = 0,
        slot: int = -1,
        is_top: bool = True,
    ) -> None:
        """Append `token` to the trunk; the arguments are fields of its TreeNode."""
        parent, path = self.depth - 1, self.path * chance
        self.add(TreeNode(parent, token, source, path, slot, chance, bucket, next_bucket, is_top))

    def n_right(self, emitted: Sequence[int]) -> int:
        """Return how many tokens of the trunk are what was emitted."""
        n = 0
        for token, right in zip(self.drafted, emitted, strict=False):
            if token != right:
                break
            n += 1
        return n


def learn_step(acceptance: AcceptanceTables, step: DraftStep, made: Step) -> None:
    """Count the outcome `made` of `step` in the tables of acceptance.

    The emitted tokens show whether any offer of the suffix store, or any other likely token of the draft
    model, was right, even if it was not proposed.
    """
    emitted, n_right = made.tokens, step.n_right(made.tokens)
    for offer in step.offers:
        at = offer[0].parent + 1 if offer else 0
        if n_right < at:
            break
        for depth, node in zip(range(at, len(emitted)), offer, strict=False):
            right = emitted[depth] == node.token
            acceptance.learn_offered(depth, node.bucket, right)
            if not right:
                break
    for depth, likeliest in enumerate(step.others[: min(n_right + 1, len(emitted))]):
        for token, bucket in likeliest:
            acceptance.other.learn(depth, bucket, emitted[depth] == token)
    _learn_tree(acceptance, step.proposed, made)


def _learn_tree(acceptance: AcceptanceTables, tree: Tree, made: Step) -> None:
    """Learn from the draft model's tokens that were tested: children of the root and of accepted nodes."""
    judged = {i: (p, q) for i, p, q in made.judged}
    at = -1
    for depth, kept in enumerate([*made.path, -1]):
        below = [i for i in range(at + 1, len(tree)) if tree[i].parent == at]
        for i in below:
            node = tree[i]
            if node.source in {"suffix", "forced"}:
                continue
            label = float(i == kept)
            if node.source == "sampled" and i != below[0]:
                acceptance.second.learn(depth, node.bucket, label)
            elif node.source == "sampled" or node.is_top:
                if i in judged:
                    p, q = judged[i]
                    label = min(1.0, p / q)
                    if node.is_top and node.source == "sampled":  # what the point mass would have got
                        acceptance.argmax.learn(depth, node.bucket, p)
                table = acceptance.sampled if node.source == "sampled" else acceptance.argmax
                table.learn(depth, node.bucket, label)
                acceptance.next.learn(depth, node.next_bucket, label)
        at = kept
