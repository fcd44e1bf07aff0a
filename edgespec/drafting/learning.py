"""Learning from a step's outcome: the predictor's tables count what was accepted (docs/scheduler.md)."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.drafter import DraftOutcome
from edgespec.decoding.tree import Tree
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.proposal import Proposal, SuffixOffer


def learn_step(predictor: Predictor, proposal: Proposal, outcome: DraftOutcome) -> None:
    """Count the outcome of `proposal` in the predictor's tables."""
    n_right = proposal.n_right(outcome.emitted)
    _learn_offers(predictor, proposal.offers, n_right, outcome.emitted)
    _learn_others(predictor, proposal.others, n_right, outcome.emitted)
    _learn_tree(predictor, proposal.tree, outcome)


def _learn_offers(
    predictor: Predictor, offers: Sequence[SuffixOffer], n_trunk: int, emitted: Sequence[int]
) -> None:
    """Learn from the suffix store's offers along a trunk, `n_trunk` tokens of which were emitted.

    The emitted tokens judge every offer, also one that was not taken.
    """
    for offer in offers:
        if n_trunk < offer.at:
            break
        for depth, token, bucket in zip(
            range(offer.at, len(emitted)), offer.tokens, offer.buckets, strict=False
        ):
            right = emitted[depth] == token
            predictor.learn_offered(depth, bucket, right)
            if not right:
                break


def _learn_others(
    predictor: Predictor, others: Sequence[Sequence[tuple[int, int]]], n_trunk: int, emitted: Sequence[int]
) -> None:
    """Learn from the draft model's likeliest tokens at each position of a trunk: (token, bucket).

    They too are compared with what was emitted, proposed or not.
    """
    for depth, likeliest in enumerate(others[: min(n_trunk + 1, len(emitted))]):
        for token, bucket in likeliest:
            predictor.other.learn(depth, bucket, emitted[depth] == token)


def _learn_tree(predictor: Predictor, tree: Tree, outcome: DraftOutcome) -> None:
    """Learn from the draft model's tokens that were judged: children of the root and of accepted nodes."""
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
                predictor.second.learn(depth, node.bucket, label)
            elif node.source == "sampled" or node.is_top:
                if i in judged:
                    p, q = judged[i]
                    label = min(1.0, p / q)
                    if node.is_top and node.source == "sampled":  # what the point mass would have got
                        predictor.argmax.learn(depth, node.bucket, p)
                table = predictor.sampled if node.source == "sampled" else predictor.argmax
                table.learn(depth, node.bucket, label)
                predictor.next.learn(depth, node.next_bucket, label)
        at = kept
