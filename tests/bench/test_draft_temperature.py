"""bench/draft_temperature.py: its filters are the sampler's, and what it counts is what the rules accept."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import reference
from draft_temperature import FILTERS, Acceptance, Likeliest, Places, Text, probs
from toy_models import ToyModel, V

GAMMA = 3


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("name", FILTERS)
def test_the_filters_are_the_samplers(name, ratio):
    rows = np.random.default_rng(1).normal(0, 3, (20, 60)).astype(np.float32)
    params = replace(FILTERS[name], temperature=0.7)
    likeliest = Likeliest.of(rows)
    for sharp, wanted in (
        (probs(likeliest.logits, params, ratio), [(row, ratio) for row in rows]),
        (
            probs(likeliest.logits, params, ratio, before=True),
            [(row / np.float32(ratio), 1.0) for row in rows],
        ),
    ):
        for ids, got, (row, factor) in zip(likeliest.ids, sharp, wanted, strict=True):
            want = reference.filtered_probs(row, replace(params, temperature=0.7 * factor))
            np.testing.assert_allclose(got, want[ids], atol=1e-6)


def rows_of(model: ToyModel, prefixes: list[tuple[int, ...]]) -> Likeliest:
    return Likeliest.of(np.stack([model.logits(prefix) for prefix in prefixes]))


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1.5])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("rule", ["chain", "block"])
def test_what_is_counted_is_what_the_rule_accepts(rule, name, ratio):
    """Over all texts, as often as they are written, and over all drafts, as often as they are drafted."""
    params = replace(FILTERS[name], temperature=1.1)
    for seed in range(5):
        target, draft = ToyModel(seed), ToyModel(seed + 100)
        texts, drafts, weights = [], [], []
        for tokens in itertools.product(range(V), repeat=GAMMA):
            text = Text([0])
            text.tokens += tokens
            prefixes = [tokens[:i] for i in range(GAMMA)]
            text.rows = [rows_of(target, [prefix]) for prefix in prefixes]
            drafts.append((len(texts), 0, rows_of(draft, prefixes)))
            texts.append(text)
            unfiltered = replace(FILTERS["none"], temperature=params.temperature)
            weights.append(np.prod([target.probs(tokens[:i], unfiltered)[t] for i, t in enumerate(tokens)]))
        places = Places(texts, drafts, GAMMA)
        acceptance = Acceptance(places, params)
        got = np.array(weights) @ acceptance.accepted(
            probs(places.q.logits, params, ratio), block=rule == "block"
        )

        sharper = replace(params, temperature=params.temperature * ratio)
        want = np.zeros(GAMMA)
        for tokens in itertools.product(range(V), repeat=GAMMA):
            p = np.stack([target.probs(tokens[:i], params) for i in range(GAMMA + 1)])
            q = np.stack([draft.probs(tokens[:i], sharper) for i in range(GAMMA)])
            chance = np.prod([q[i][t] for i, t in enumerate(tokens)])
            chain = reference.Drafted(tokens, range(-1, GAMMA - 1), q, p)
            for end, of_end, _ in reference.outcomes(chain, rule) if chance else ():
                want[: end + 1] += chance * of_end
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_second_token_is_what_recursive_rejection_accepts():
    params = replace(FILTERS["none"], temperature=1.0)
    target, draft = ToyModel(1), ToyModel(101)
    text = Text([0])
    text.tokens.append(0)
    text.rows = [rows_of(target, [()])]
    places = Places([text], [(0, 0, rows_of(draft, [()]))], 1)
    p, q = target.probs((), params), draft.probs((), params)
    want = 0.0
    for first, second in itertools.permutations(range(V), 2):
        without = np.where(np.arange(V) == first, 0.0, q)
        without /= without.sum()
        tree = reference.Drafted((first, second), (-1, -1), np.stack([q, without]), np.stack([p] * 3))
        for end, chance, _ in reference.outcomes(tree, "chain"):
            want += (end == 1) * q[first] * without[second] * chance
    assert Acceptance(places, params).second(probs(places.q.logits, params)) == pytest.approx(want, abs=1e-6)
