"""Token trees are exact: enumeration of all that can be drafted and tossed, mutants, then a chi-square.

A model gives a distribution for every text over three or four tokens. From a shape, every tree that a drafter
can make of it is enumerated with its probability; of each, all that the rule's coins can do. Continued by the
target alone to a fixed length, that must be the target's distribution over texts. Mistakes that are easily
made must not pass.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import reference
from edgespec import _core
from toy_models import chi_square_p_value
from tree_enumeration import (
    NO_TOKENS,
    PAIRS,
    PLAIN,
    SHAPES,
    Filtered,
    Model,
    alone,
    core,
    drafted,
    emitted,
    error_of,
    fresh,
    sampled,
    texts,
    top,
    trees,
    twin,
    without_nodes,
)

pytestmark = pytest.mark.proof

RULES = ["block", "chain"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_enumeration(shape, pair, rule):
    target, draft = PAIRS[pair]
    proposals = list(trees(shape, draft))
    assert sum(chance for _, chance in proposals) == pytest.approx(1)
    assert error_of(target, proposals, partial(twin, target, rule=rule), shape) < 1e-12
    assert error_of(target, proposals, partial(core, target, rule=rule), shape) < 1e-6


DRY = {"dry_multiplier": 0.9, "dry_allowed_length": 0, "dry_base": 1.5}
XTC = {"xtc_probability": 0.6, "xtc_threshold": 0.15}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", ["two levels", "three levels"])
@pytest.mark.parametrize(
    "options",
    [DRY, XTC, XTC | {"temperature": 0.0}, {"top_n_sigma": 0.9}, {"dynatemp_range": 0.8}, DRY | XTC],
    ids=str,
)
def test_filters_of_a_nodes_own_text_and_position(options, shape, rule):
    """DRY's penalties change along each path. XTC's coins are those of the seed, whatever is drafted."""
    params = replace(PLAIN, **options)
    seeds = range(3) if "xtc_probability" in options else range(1)
    seen = set()
    for seed in seeds:
        target, draft = (Filtered(params, seed, Model(one, 3)) for one in (1, 101))
        proposals = list(trees(SHAPES[shape], draft))
        for engine, tolerance in ((twin, 1e-12), (core, 1e-6)):
            outcomes = partial(engine, target, rule=rule)
            assert error_of(target, proposals, outcomes, SHAPES[shape]) < tolerance
        seen.add(tuple(alone(target, 3).round(6).flat))
    assert len(seen) > 1 or len(seeds) == 1, "other coins, other texts"
    assert seen != {tuple(alone(Model(1, 3), 3).round(6).flat)}, "the filter does something"


@pytest.mark.parametrize("rule", RULES)
def test_coins_of_other_positions_are_caught(rule):
    """XTC tossed by how far a step came, as with coins from the stream that drafts are sampled with."""
    params = replace(PLAIN, xtc_probability=0.5, xtc_threshold=0.15)
    target, draft = (Filtered(params, 0, Model(one, 3)) for one in (1, 101))
    other = Filtered(params, 1, Model(1, 3))
    proposals = list(trees(SHAPES["chain"], draft))
    assert error_of(target, proposals, partial(core, other, rule=rule), SHAPES["chain"]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_point_masses_may_be_dropped_for_any_reason(rule):
    """And chosen: here by all that was sampled, wherever in the tree."""
    shape = (sampled(sampled(), top(top())), fresh(top()), top())
    for target, draft in PAIRS.values():
        proposals = []
        for nodes, chance in trees(shape, draft):
            sum_sampled = sum(node.token for node in nodes if node.how != "top")
            unwanted = [i for i, node in enumerate(nodes) if node.how == "top" and (i + sum_sampled) % 2]
            proposals.append((without_nodes(nodes, unwanted), chance))
        for engine, tolerance in ((twin, 1e-12), (core, 1e-6)):
            assert error_of(target, proposals, partial(engine, target, rule=rule), shape) < tolerance


# ---- a chain is the tree that it was ----


def block_as_it_was(drafted, coins):
    """The block rule of arXiv 2403.10444 as it is written there: tau, and its residual's weight."""
    n, weight, tau, weight_of_tau = len(drafted.tokens), 1.0, 0, 1.0
    for i, token in enumerate(drafted.tokens, start=1):
        p, q = drafted.target_probs, drafted.draft_probs
        weight = min(1.0, weight * p[i - 1, token] / q[i - 1, token])
        h = weight
        if i < n:
            left = float(np.maximum(0.0, weight * p[i] - q[i]).sum())
            h = left / (left + (1.0 - weight)) if left > 0.0 else 0.0
        if coins[i - 1] < h:
            tau, weight_of_tau = i, weight
    rest = drafted.target_probs[tau]
    return tau, rest if tau == n else reference.residual(rest, drafted.draft_probs[tau], weight_of_tau)[0]


def test_on_a_chain_the_block_rule_is_that_of_chains():
    """The C core's answers stay the same to the last bit, which csrc/tests/test_fuzz.c looks at."""
    rng = np.random.default_rng(1)
    for target, draft in PAIRS.values():
        for nodes, _ in trees(SHAPES["chain"], draft):
            chain = drafted(target, nodes)
            for _ in range(5):
                coins = list(rng.random(len(nodes) + 1))
                tau, rest = block_as_it_was(chain, coins)
                path, token = reference.verify(chain, coins, "block")
                assert path == list(range(tau))
                assert token == reference.sample(rest, coins[-1])


def mean_accepted(target, draft, shape, rule, lenience=1.0):
    return sum(
        proposed * chance * len(texts(nodes)[end + 1])
        for nodes, proposed in trees(shape, draft)
        for end, chance, _ in twin(target, nodes, rule, lenience)
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_block_never_accepts_less_than_chain(shape):
    gains = [
        mean_accepted(*pair, shape, "block") - mean_accepted(*pair, shape, "chain") for pair in PAIRS.values()
    ]
    assert min(gains) > -1e-12
    has_sampled_below = any(branch.how == "sampled" and branch.below for branch in shape)
    assert max(gains) > 1e-3 or not has_sampled_below


# ---- lenience ----


@pytest.mark.parametrize(
    "shape", ["chain", "without replacement", "both kinds of sampled, then a point mass"]
)
@pytest.mark.parametrize("lenience", [0.8, 0.3, 0.01])
def test_lenience_accepts_more_and_keeps_its_bound(shape, lenience):
    """No token is more than 1 / lenience times as likely as the target makes it."""
    shape = SHAPES[shape]
    gains = []
    for target, draft in PAIRS.values():
        twice = [
            emitted(target, trees(shape, draft), partial(engine, target, rule="chain", lenience=lenience), 4)
            for engine in (twin, core)
        ]
        np.testing.assert_allclose(twice[1], twice[0], atol=1e-6)
        first_token = twice[0].sum(axis=(1, 2, 3))
        assert (first_token <= target.probs(()) / lenience + 1e-12).all()
        gains.append(
            mean_accepted(target, draft, shape, "chain", lenience)
            - mean_accepted(target, draft, shape, "chain")
        )
    assert min(gains) > -1e-12
    assert max(gains) > 0.05


def test_lenience_is_not_exact():
    target, draft = PAIRS["random-0"]
    shape = SHAPES["chain"]
    assert (
        error_of(target, trees(shape, draft), lambda nodes: twin(target, nodes, "chain", 0.5), shape) > 1e-3
    )


# ---- mutants: mistakes that are easily made ----


def caught(proposals, outcomes, shape, pairs=("random-0", "random-1", "random-2")):
    """Whether some pair of models shows that what is emitted is not the target's."""
    errors = []
    for target, draft in (PAIRS[name] for name in pairs):
        errors.append(error_of(target, proposals(draft), lambda n, t=target: outcomes(t, n), shape))
    return max(errors) > 1e-3


@pytest.mark.parametrize("pairs", [("random-0", "random-1"), ("p-is-q",)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_dropping_a_sampled_node_by_its_own_probability_is_caught(rule, pairs):
    shape = SHAPES["two levels"]

    def unlikely_dropped(draft):
        for nodes, chance in trees(shape, draft):
            unlikely = [i for i, node in enumerate(nodes) if node.how != "top" and node.q[node.token] < 0.4]
            yield without_nodes(nodes, unlikely), chance

    assert caught(unlikely_dropped, lambda t, n: twin(t, n, rule), shape, pairs)
    assert not caught(lambda draft: trees(shape, draft), lambda t, n: twin(t, n, rule), shape, pairs)


@pytest.mark.parametrize("rule", RULES)
def test_dropping_a_sampled_node_for_what_hangs_below_it_is_caught(rule):
    """Even with p = q."""
    shape = SHAPES["subtrees"]

    def dropped(draft):
        for nodes, chance in trees(shape, draft):
            unwanted = [node.parent for node in nodes if node.parent >= 0 and node.token == 0]
            yield without_nodes(nodes, unwanted), chance

    assert caught(dropped, lambda t, n: twin(t, n, rule), shape, ("p-is-q",))


@pytest.mark.parametrize("rule", RULES)
def test_merging_two_samples_of_one_token_is_caught(rule):
    shape = SHAPES["with replacement"]

    def merged(draft):
        for nodes, chance in trees(shape, draft):
            tokens = [node.token for node in nodes]
            again = [i for i, token in enumerate(tokens) if token in tokens[:i]]
            yield without_nodes(nodes, again), chance

    assert caught(merged, lambda t, n: twin(t, n, rule), shape)


@pytest.mark.parametrize("rule", RULES)
def test_not_renormalising_q_without_a_token_is_caught(rule):
    shape = SHAPES["without replacement"]

    def not_normalised(draft):
        for nodes, chance in trees(shape, draft):
            q = draft.probs(())
            wrong = list(nodes)
            for i in range(1, len(nodes)):
                q = np.where(np.arange(len(q)) == nodes[i - 1].token, 0, q)
                wrong[i] = replace(nodes[i], q=tuple(q))
            yield tuple(wrong), chance

    assert caught(not_normalised, lambda t, n: twin(t, n, rule), shape)


@pytest.mark.parametrize("rule", RULES)
def test_taking_a_siblings_q_for_that_of_without_it_is_caught(rule):
    """The second sampled without the first, but verified as if with it."""
    shape = SHAPES["without replacement"]

    def full(draft):
        for nodes, chance in trees(shape, draft):
            yield tuple(replace(node, q=nodes[0].q) for node in nodes), chance

    assert caught(full, lambda t, n: twin(t, n, rule), shape)


@pytest.mark.parametrize("rule", RULES)
def test_a_point_mass_chosen_by_what_is_sampled_after_it_is_caught(rule):
    """Why sampled siblings stand first: a point mass before them must not know them."""
    shape = (sampled(), top())

    def turned_round(draft):
        for nodes, chance in trees(shape, draft):
            yield nodes[::-1], chance

    assert caught(turned_round, lambda t, n: twin(t, n, rule), shape)


def ignores_the_residual(tree, node=-1, chance=1.0):
    """The chain rule whose second sibling is tested against p itself."""
    p = rest = tree.target_probs[node + 1]
    for child in tree.children(node):
        q, token = tree.draft_probs[child], tree.tokens[child]
        accept = min(1.0, p[token] / q[token])
        yield from ignores_the_residual(tree, child, chance * accept)
        chance *= 1.0 - accept
        rest, _ = reference.residual(rest, q)
    yield node, chance, rest


def forgets_the_weight(tree):
    """The block rule whose weight stays what it was when something below the node is rejected."""

    def climb(node, weight, chance):
        p = tree.target_probs[node + 1]
        for child in tree.children(node):
            q, token = tree.draft_probs[child], tree.tokens[child]
            chance = yield from climb(child, min(1.0, weight * p[token] / q[token]), chance)
            p, _ = reference.residual(p, q, weight)
        accept = weight if node >= 0 else 1.0
        yield node, chance * accept, p
        return chance * (1.0 - accept)

    yield from climb(-1, 1.0, 1.0)


def samples_from_the_target(tree, rule):
    """What follows a rejection comes from p instead of from what is left of it."""
    for end, chance, _ in reference.outcomes(tree, rule):
        yield end, chance, tree.target_probs[end + 1]


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        (ignores_the_residual, "without replacement"),
        (ignores_the_residual, "point masses"),
        (forgets_the_weight, "subtrees"),
        (forgets_the_weight, "chain"),
        (lambda tree: samples_from_the_target(tree, "chain"), "with replacement"),
        (lambda tree: samples_from_the_target(tree, "block"), "two levels"),
    ],
)
def test_biased_rules_are_caught(mutant, shape):
    assert caught(
        lambda draft: trees(SHAPES[shape], draft), lambda t, n: mutant(drafted(t, n)), SHAPES[shape]
    )


# ---- samples through the C core ----

LENGTH, N_COINS = 3, 24


def draw(shape, draft, sampler, coins, rows, text=(), parent=-1, tree=()):
    """Let the core sample one tree of a shape: (token, parent, slot) of its nodes."""
    sampled_sibling = None
    for branch in shape:
        at = len(tree)
        if branch.how == "top":
            token, slot = int(np.argmax(draft.probs(text))), -1
        else:
            slot = at
            if branch.how == "fresh" and sampled_sibling is not None:
                sampler.without(*sampled_sibling, slot)
                probs = np.empty(draft.n_vocab, np.float32)
                sampler.probs(slot, probs)
                token = int(np.searchsorted(np.cumsum(probs), coins.pop() * probs.sum(), side="right"))
            else:
                token = sampler.sample(rows[text], NO_TOKENS, coins.pop(), slot)
            sampled_sibling = (slot, token)
        tree = draw(
            branch.below, draft, sampler, coins, rows, (*text, token), at, (*tree, (token, parent, slot))
        )
    return tree


def run_core(target, draft, shape, rule, n_runs, *, lenience=1.0):
    """Counts of the texts of three tokens that steps emit, the target alone continuing each."""
    n_vocab = target.n_vocab
    sampler = PLAIN.sampler(n_vocab, 8)
    every = [text for n in range(LENGTH + 1) for text in itertools.product(range(n_vocab), repeat=n)]
    draft_rows = {text: draft.logits(text) for text in every}
    target_rows = {text: target.logits(text) for text in every}
    counts = np.zeros((n_vocab,) * LENGTH)
    stream = _core.coins(20261122, 0, n_runs * N_COINS)
    for run in range(n_runs):
        coins = stream[run * N_COINS : (run + 1) * N_COINS]
        tree = draw(shape, draft, sampler, coins, draft_rows)
        before = [()]
        for token, parent, _ in tree:
            before.append((*before[parent + 1], token))
        rows = np.stack([target_rows[text] for text in before])
        tokens, parents, slots = (np.asarray(column, np.int32) for column in zip(*tree, strict=True))
        tossed = [coins.pop() for _ in range(len(tree) + 1)]
        path, following, _ = sampler.verify(
            rows, tokens, parents, slots, NO_TOKENS, tossed, rule == "block", lenience=lenience
        )
        text = (*before[path[-1] + 1 if path else 0], following)
        while len(text) < LENGTH:
            text = (*text, sampler.sample(target_rows[text], NO_TOKENS, coins.pop(), -1))
        counts[text] += 1
    return counts


SAMPLED_SHAPE = (sampled(sampled(), fresh()), fresh(sampled()), top(sampled()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", ["random-0", "four-tokens", "both-have-holes"])
def test_samples_through_the_c_core(pair, rule):
    n = 10_000
    target, draft = PAIRS[pair]
    if pair == "both-have-holes":
        draft = Model(13, 4, sharpness=0.5)  # `without` must leave something
    counts = run_core(target, draft, SAMPLED_SHAPE, rule, n)
    assert chi_square_p_value(counts, n * alone(target, LENGTH)) > 1e-6


def test_the_chi_square_catches_lenience():
    n = 10_000
    target, draft = PAIRS["random-0"]
    counts = run_core(target, draft, SAMPLED_SHAPE, "chain", n, lenience=0.5)
    assert chi_square_p_value(counts, n * alone(target, LENGTH)) < 1e-9
