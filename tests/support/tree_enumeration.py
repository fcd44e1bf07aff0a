"""Enumerates all drafts and coin tosses over a few tokens, for test_tree_verify.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

import reference
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.tree import TreeNode
from edgespec.testing import outcomes
from reference import filtered_probs

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
NO_TOKENS = np.zeros(0, np.int32)


class Model:
    """Random distributions for every text; with holes, some tokens are impossible."""

    params, seed = PLAIN, 0

    def __init__(self, seed, n_vocab=3, holes=0.0, only=None, sharpness=1.5):
        self.n_vocab = n_vocab
        self._seed, self._holes, self._only, self._sharpness = seed, holes, only, sharpness
        self.probs = cache(self._probs)

    def _probs(self, text):
        rng = np.random.default_rng([self._seed, len(text), *text])
        p = np.exp(rng.normal(0, self._sharpness, self.n_vocab))
        keep = rng.random(self.n_vocab) >= self._holes
        if self._only is not None:
            keep = np.isin(np.arange(self.n_vocab), self._only)
        if keep.any():
            p[~keep] = 0
        p[p < 1e-9 * p.max()] = 0  # nothing that would be rounded to 0 in the C core
        return p / p.sum()

    def logits(self, text):
        with np.errstate(divide="ignore"):
            return np.log(self.probs(text)).astype(np.float32)


class Filtered(Model):
    """The same after the filters of `params`, XTC's coins being those of `seed`."""

    def __init__(self, params, seed, model):
        self.params, self.seed, self.n_vocab, self.logits = params, seed, model.n_vocab, model.logits
        self.probs = cache(lambda text: filtered_probs(model.logits(text), params, text, seed=seed))


def pairs():
    for seed in range(3):
        yield f"random-{seed}", Model(seed), Model(seed + 100)
    yield "four-tokens", Model(1, 4), Model(101, 4)
    yield "p-is-q", Model(5), Model(5)
    yield "disjoint", Model(6, 4, only=[0, 1]), Model(7, 4, only=[2, 3])
    yield "draft-has-holes", Model(8, 4), Model(9, 4, holes=0.5)
    yield "target-has-holes", Model(10, 4, holes=0.5), Model(11, 4)
    yield "both-have-holes", Model(12, 4, holes=0.4), Model(13, 4, holes=0.4)
    yield "sure-target", Model(14, sharpness=40), Model(15)
    yield "sure-draft", Model(16), Model(17, sharpness=40)


PAIRS = {name: (target, draft) for name, target, draft in pairs()}


# ---- shapes: how a node's token is found, and what hangs below it ----


@dataclass(frozen=True)
class Branch:
    how: str
    """sampled: from q; fresh: from the q of the sibling before, without its token; top: the likeliest token
    that no sibling before has, a point mass."""
    below: tuple[Branch, ...] = ()


def sampled(*below):
    return Branch("sampled", below)


def fresh(*below):
    return Branch("fresh", below)


def top(*below):
    return Branch("top", below)


SHAPES = {
    "nothing": (),
    "chain": (sampled(sampled(sampled())),),
    "chain of point masses": (top(top(top())),),
    "with replacement": (sampled(), sampled(), sampled()),
    "without replacement": (sampled(), fresh(), fresh()),
    "point masses": (top(), top(), top()),
    "sampled, then point masses": (sampled(), top(), top()),
    "both kinds of sampled, then a point mass": (sampled(), fresh(), sampled(), top()),
    "subtrees": (sampled(sampled()), fresh(sampled()), top(sampled())),
    "deep first": (sampled(sampled(), fresh()), fresh(), top()),
    "deep last": (sampled(), fresh(), top(sampled(), fresh())),
    "two levels": (sampled(sampled(), fresh()), fresh(sampled(), top())),
    "three levels": (sampled(sampled(top()), top()), top(sampled())),
}


@dataclass(frozen=True)
class Node:
    token: int
    parent: int
    how: str
    q: tuple[float, ...]
    previous: int = -1
    """The sibling whose q, without its token, this one's is."""


def trees(shape, draft, text=(), parent=-1, nodes=(), siblings=()):
    """Every tree that comes of a shape, in depth-first order, with its probability."""
    if not shape:
        yield nodes, 1.0
        return
    branch, rest = shape[0], shape[1:]
    q, previous = draft.probs(text), -1
    if branch.how == "fresh" and siblings and nodes[siblings[-1]].how != "top":
        previous = siblings[-1]
        q = np.array(nodes[previous].q)
        q[nodes[previous].token] = 0
        if not q.any():  # nothing is left to sample
            yield from trees(rest, draft, text, parent, nodes, siblings)
            return
        q /= q.sum()
    if branch.how == "top":
        taken = [nodes[i].token for i in siblings]
        left = [token for token in range(len(q)) if token not in taken]
        likeliest = max(left, key=q.__getitem__, default=None)
        if likeliest is None:
            yield from trees(rest, draft, text, parent, nodes, siblings)
            return
        choices = {likeliest: 1.0}
        q = np.eye(len(q))[likeliest]
    else:
        choices = {token: q[token] for token in np.flatnonzero(q)}
    at = len(nodes)
    for token, chance in choices.items():
        node = Node(int(token), parent, branch.how, tuple(q), previous)
        for deeper, below in trees(branch.below, draft, (*text, int(token)), at, (*nodes, node)):
            for tree, beside in trees(rest, draft, text, parent, deeper, (*siblings, at)):
                yield tree, chance * below * beside


def texts(nodes):
    """The text before each node's children, that of the root first."""
    found = [()]
    for node in nodes:
        found.append((*found[node.parent + 1], node.token))
    return found


def without_nodes(nodes, unwanted):
    """The tree without some nodes and what hangs below them."""
    place, kept = {-1: -1}, []
    for i, node in enumerate(nodes):
        if i in unwanted or node.parent not in place:
            continue
        place[i] = len(kept)
        kept.append(replace(node, parent=place[node.parent], previous=place.get(node.previous, -1)))
    return tuple(kept)


# ---- engines: (node that the path ends at, probability, distribution of the next token) ----


def drafted(target, nodes):
    q = np.array([node.q for node in nodes]).reshape(-1, target.n_vocab)
    p = np.array([target.probs(text) for text in texts(nodes)])
    return reference.Drafted([node.token for node in nodes], [node.parent for node in nodes], q, p)


def twin(target, nodes, rule, lenience=1.0):
    return reference.outcomes(drafted(target, nodes), rule, lenience=lenience)


def fill_slots(sampler, nodes):
    """Slots as a drafter leaves them: siblings without replacement come of `without`."""
    slots = []
    for i, node in enumerate(nodes):
        slots.append(-1 if node.how == "top" else i)
        if node.previous >= 0:
            sampler.without(node.previous, nodes[node.previous].token, i)
        elif node.how != "top":
            sampler.set_probs(i, np.asarray(node.q, np.float32))
    return slots


def core(target, nodes, rule, lenience=1.0):
    sampler = target.params.sampler(target.n_vocab, len(nodes), seed=target.seed)
    slots = fill_slots(sampler, nodes)
    tree = tuple(
        TreeNode(node.parent, node.token, "sampled", 1.0, slot)
        for node, slot in zip(nodes, slots, strict=True)
    )
    rows = np.stack([target.logits(text) for text in texts(nodes)])
    return outcomes(sampler, rows, tree, block=rule == "block", lenience=lenience)


def alone(target, length, text=()):
    """The target's own distribution over the texts of `length` tokens that begin with `text`."""
    if len(text) == length:
        return np.ones(())
    p = target.probs(text)
    return np.stack([p[t] * alone(target, length, (*text, t)) for t in range(target.n_vocab)])


def emitted(target, proposals, outcomes, length):
    """The distribution over texts of `length` tokens, the target alone continuing what a step emits."""
    total = np.zeros((target.n_vocab,) * length)
    continued = cache(lambda text: alone(target, length, text))
    for nodes, proposed in proposals:
        before = texts(nodes)
        for end, chance, rest in outcomes(nodes):
            text = before[end + 1]
            for token in np.flatnonzero(rest):
                after = (*text, int(token))
                total[after] += proposed * chance * rest[token] * continued(after)
    return total


def depth_of(shape):
    return 1 + max(depth_of(branch.below) for branch in shape) if shape else 0


def error_of(target, proposals, outcomes, shape):
    """The largest error in the distribution of what is emitted, at least two tokens of it."""
    length = max(2, depth_of(shape) + 1)
    got = emitted(target, proposals, outcomes, length)
    return np.abs(got - alone(target, length)).max()
