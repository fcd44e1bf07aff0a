"""The suffix store as a source: tokens for the trunk of a proposal, and a tree of other continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.tree import Tree, TreeNode
from edgespec.drafting.predictor import Predictor, bucket_of
from edgespec.drafting.proposal import Proposal, SuffixOffer
from edgespec.drafting.suffix import Document

_OFFERED = 16  # tokens asked of the suffix store at once
_NODES = 8  # of the suffix store's tree


class SuffixSource:
    """Asks the suffix store for continuations of a sequence, and says how likely they are right."""

    def __init__(
        self,
        document: Document,
        predictor: Predictor,
        *,
        is_eog: Callable[[int], bool],
        constraint: Constraint | None,
    ) -> None:
        """Offer continuations of `document` that `constraint` allows; `predictor` has the acceptances."""
        self._document = document
        self._predictor = predictor
        self._is_eog = is_eog
        self._constraint = constraint

    def extend(self, emitted: Sequence[int]) -> None:
        """Append the tokens that followed the sequence."""
        self._document.extend(emitted)

    def offer(self, proposal: Proposal) -> SuffixOffer:
        """Return a continuation of the trunk, and remember it to learn from."""
        drafted = proposal.drafted
        n = min(proposal.n_left, _OFFERED)
        if n < 1:
            return SuffixOffer(len(drafted))
        tokens, probabilities = self._document.offer(drafted, n)
        if self._constraint:
            n = self._constraint.fitting(drafted, tokens)
            tokens, probabilities = tokens[:n], probabilities[:n]
        buckets = [bucket_of(p) for p in probabilities]
        chance = self._predictor.offered
        chances = [chance(depth, bucket) for depth, bucket in enumerate(buckets, len(drafted))]
        offer = SuffixOffer(len(drafted), tokens, buckets, chances)
        proposal.offers.append(offer)
        return offer

    def take(self, offer: SuffixOffer, n: int, proposal: Proposal) -> None:
        """Propose the first `n` offered tokens to the target."""
        for token, bucket, chance in zip(offer.tokens[:n], offer.buckets, offer.chances, strict=False):
            proposal.grow(token, "suffix", chance, bucket)
            if self._is_eog(token):
                break

    def tree(self) -> Tree:
        """Return a tree of the likeliest continuations of the sequence, where several were seen."""
        nodes: list[TreeNode] = []
        depths: list[int] = []
        place: list[int | None] = []  # in `nodes`, of what was offered; None: what cannot be
        texts: list[tuple[int, ...]] = [()]  # that end with each node, and last at the root
        left = [1.0]  # chance that siblings before leave, of each node and last of the root
        for token, above, probability in zip(*self._document.offer_tree((), _NODES), strict=True):
            parent = place[above] if above >= 0 else -1
            if parent is None or not self._may_follow(nodes, parent, texts[parent], token):
                place.append(None)
                continue
            texts.insert(-1, (*texts[parent], token))
            place.append(len(nodes))
            depth = depths[parent] + 1 if parent >= 0 else 0
            bucket = bucket_of(probability)
            chance = min(self._predictor.offered(depth, bucket), left[parent])
            left[parent] -= chance
            left.insert(-1, 1.0)
            path = chance * (nodes[parent].path if parent >= 0 else 1.0)
            nodes.append(TreeNode(parent, token, "suffix", path, chance=chance, bucket=bucket))
            depths.append(depth)
        return tuple(nodes)

    def _may_follow(self, nodes: list[TreeNode], parent: int, text: tuple[int, ...], token: int) -> bool:
        """Say whether `token` may stand below a node that ends with `text`."""
        if parent >= 0 and self._is_eog(nodes[parent].token):
            return False
        return not self._constraint or self._constraint.allows(text, token)
