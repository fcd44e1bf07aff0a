"""The proposal of one step, as it grows: a trunk, branches off it, and the offers; what is learned of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.decoding.tree import DraftOutcome, Source, Tree, TreeNode
from edgespec.drafting.acceptance import AcceptanceTables


@dataclass(frozen=True, slots=True)
class SuffixOffer:
    """An offer of the suffix store after `at` drafted tokens, taken or not."""

    at: int
    tokens: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Proposal:
    """A step's draft: it grows while sources add to it, and is compiled to `tree` at the end."""

    n_sequence: int
    """Tokens of the sequence that it follows."""
    room: int
    """Most nodes."""
    drafted: list[int] = field(default_factory=list)
    """The trunk's tokens."""
    trunk: list[TreeNode] = field(default_factory=list)
    """Each node follows the one before it."""
    branches: list[TreeNode] = field(default_factory=list)
    """Nodes off the trunk, each below a node of the trunk (or the sequence)."""
    n_slots: int = 0
    """The sampler's slots in use."""
    offers: list[SuffixOffer] = field(default_factory=list)
    """All that the suffix store offered along the trunk."""
    others: list[list[tuple[int, int]]] = field(default_factory=list)
    """(token, bucket) of the draft model's likeliest tokens at each position that are not the trunk's."""
    rate: float = 0.0
    """Tokens a second (or a joule) that it was decided with."""
    n_unread: int | None = None
    """Tokens the draft model had not read; None without one."""
    n_prefilled: int = 0
    """Tokens the draft model read to be activated."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(tokens read, guesses among them) of each pass of the draft model."""
    stages: list[tuple[str, Tree]] = field(default_factory=list)
    """The tree of trunk and branches, that of the store, and the tree after each pass over them; none for a
    chain."""
    tree: Tree = ()
    """The tree that goes to the target."""
    draft_s: float = 0.0

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
    def n_left(self) -> int:
        """Room for more nodes: the trunk and sampled branches always stay."""
        return self.room - len(self.trunk) - sum(node.slot >= 0 for node in self.branches)

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
        node = TreeNode(
            self.depth - 1, token, source, self.path * chance, slot, chance, bucket, next_bucket, is_top
        )
        self.trunk.append(node)
        self.drafted.append(token)

    def n_right(self, emitted: Sequence[int]) -> int:
        """Return how many tokens of the trunk are what was emitted."""
        n = 0
        for token, right in zip(self.drafted, emitted, strict=False):
            if token != right:
                break
            n += 1
        return n


@dataclass(frozen=True, slots=True)
class DraftStep:
    """The state, choice and outcome of a step; `--explain` prints it."""

    rate: float
    """Tokens a second (or a joule) that the decision was made with."""
    unit: str
    """Unit of the rate: "tokens/s" or "tokens/J"."""
    offered: list[float]
    """Estimated acceptances of what the suffix store offered first."""
    n_unread: int | None
    """Tokens the draft model had not read; None without one."""
    n_prefilled: int
    """Tokens the draft model read to be activated."""
    passes: list[tuple[int, int]]
    """(tokens read, guesses among them) of each pass of the draft model."""
    passes_of_tree: list[tuple[str, Tree]]
    """`Proposal.stages`."""
    proposed: Tree
    n_accepted: int
    n_emitted: int
    draft_s: float
    verify_s: float


def learn_step(acceptance: AcceptanceTables, proposal: Proposal, outcome: DraftOutcome) -> None:
    """Count the outcome of `proposal` in the tables of acceptance."""
    n_right = proposal.n_right(outcome.emitted)
    _learn_offers(acceptance, proposal.offers, n_right, outcome.emitted)
    _learn_others(acceptance, proposal.others, n_right, outcome.emitted)
    _learn_tree(acceptance, proposal.tree, outcome)


def _learn_offers(
    acceptance: AcceptanceTables, offers: Sequence[SuffixOffer], n_trunk: int, emitted: Sequence[int]
) -> None:
    """Learn from the suffix store's offers along a trunk, `n_trunk` tokens of which were emitted.

    The emitted tokens show whether any offer was right, also one that was not taken.
    """
    for offer in offers:
        if n_trunk < offer.at:
            break
        for depth, token, bucket in zip(
            range(offer.at, len(emitted)), offer.tokens, offer.buckets, strict=False
        ):
            right = emitted[depth] == token
            acceptance.learn_offered(depth, bucket, right)
            if not right:
                break


def _learn_others(
    acceptance: AcceptanceTables,
    others: Sequence[Sequence[tuple[int, int]]],
    n_trunk: int,
    emitted: Sequence[int],
) -> None:
    """Learn from the draft model's likeliest tokens at each position of a trunk: (token, bucket).

    They too are compared with what was emitted, proposed or not.
    """
    for depth, likeliest in enumerate(others[: min(n_trunk + 1, len(emitted))]):
        for token, bucket in likeliest:
            acceptance.other.learn(depth, bucket, emitted[depth] == token)


def _learn_tree(acceptance: AcceptanceTables, tree: Tree, outcome: DraftOutcome) -> None:
    """Learn from the draft model's tokens that were tested: children of the root and of accepted nodes."""
    judged = {i: (p, q) for i, p, q in outcome.judged}
    at = -1
    for depth, kept in enumerate([*outcome.path, -1]):
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
