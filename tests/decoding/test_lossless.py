"""What is emitted is distributed as the target alone would: exact enumeration, then a chi-square.

A toy language model gives logits for every prefix over a vocabulary of three tokens. For every
draft that the drafter could propose, with its probability, the rule's own probabilities give the
distribution of what is emitted; continued by the target alone to a fixed length, it must be the
target's distribution over sequences. Mutants with the mistakes that other engines make must fail.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

import reference
from edgespec import _core
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.tree import TreeNode
from edgespec.testing import outcomes
from toy_models import ToyModel, V, chi_square_p_value

pytestmark = pytest.mark.proof

EOG = 2
NO_TOKENS = np.zeros(0, np.int32)
PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
FILTERS = [
    {**PLAIN},
    {**PLAIN, "temperature": 0.0},
    {**PLAIN, "temperature": 0.6},
    {**PLAIN, "top_k": 2},
    {**PLAIN, "top_p": 0.7},
    {**PLAIN, "min_p": 0.4},
    {**PLAIN, "typical_p": 0.6},
    {**PLAIN, "repeat_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2, "penalty_last_n": 2},
    {**PLAIN, "logit_bias": {0: 1.0, 1: -2.0}},
    {**PLAIN, "dry_multiplier": 0.9, "dry_allowed_length": 0, "dry_penalty_last_n": 3},
    {**PLAIN, "xtc_probability": 0.5, "xtc_threshold": 0.2, "top_n_sigma": 1.2, "dynatemp_range": 0.5},
    {},
]


def fixed_length(gamma):
    return lambda draft, q_next: len(draft) < gamma


def until_eog(gamma):
    """The engine's own: nothing is drafted after an end-of-generation token."""
    return lambda draft, q_next: len(draft) < gamma and EOG not in draft


def while_confident(gamma):
    """A scheduler may look at the past and at the draft's distribution at the next position."""
    return lambda draft, q_next: len(draft) < gamma and (not draft or q_next.max() > 0.55)


def after_token_0(gamma):
    """Whether to go on may depend on tokens already drafted."""
    return lambda draft, q_next: len(draft) < gamma and draft[-1:] != (0,)


def drafts(model, params, goes_on, draft=()):
    """Every draft the drafter may propose, with its probability."""
    q = model.probs(draft, params)
    if not goes_on(draft, q):
        yield draft, 1.0
        return
    for token in range(V):
        if q[token] > 0:
            for longer, probability in drafts(model, params, goes_on, (*draft, token)):
                yield longer, q[token] * probability


def chain_of(tokens, p, q):
    """What the twin verifies: a chain is the tree whose node i has the parent i - 1."""
    return reference.Drafted(tokens, range(-1, len(tokens) - 1), q, p)


class Twin:
    def __init__(self, target, draft, params):
        self.target, self.draft, self.params = target, draft, params

    def chain(self, tokens):
        n = len(tokens)
        p = np.stack([self.target.probs(tokens[:i], self.params) for i in range(n + 1)])
        q = np.stack([self.draft.probs(tokens[:i], self.params) for i in range(n)]) if n else np.empty((0, V))
        return chain_of(tokens, p, q)

    def outcomes(self, tokens, rule):
        """(tau, its probability, distribution of the next token)."""
        for node, chance, following in reference.outcomes(self.chain(tokens), rule):
            yield node + 1, chance, following


class C(Twin):
    def outcomes(self, tokens, rule):
        n = len(tokens)
        sampler = self.params.sampler(V, max(n, 1))
        slots = np.arange(n, dtype=np.int32)
        for i in range(n):
            prefix = np.asarray(tokens[:i], np.int32)
            sampler.sample(self.draft.logits(tokens[:i]), prefix, 0.0, i)
        rows = np.stack([self.target.logits(tokens[:i]) for i in range(n + 1)])
        yield from c_outcomes(sampler, rows, tokens, slots, rule)


def c_outcomes(sampler, rows, tokens, slots, rule):
    chain = tuple(
        TreeNode(i - 1, token, "sampled", 1.0, int(slot))
        for i, (token, slot) in enumerate(zip(tokens, slots, strict=True))
    )
    for end, chance, following in outcomes(sampler, rows, chain, block=rule == "block"):
        yield end + 1, chance, following


def emitted(engine, rule, proposals, length):
    """The distribution over sequences of `length` tokens, the target alone continuing each step."""
    total = np.zeros((V,) * length)

    def spread(prefix, chance):
        if chance == 0:
            return
        if len(prefix) == length:
            total[prefix] += chance
            return
        for token in range(V):
            spread((*prefix, token), chance * engine.target.probs(prefix, engine.params)[token])

    for tokens, proposed in proposals:
        for tau, chance, following in engine.outcomes(tokens, rule):
            for token in range(V):
                spread((*tokens[:tau], token), proposed * chance * following[token])
    return total


def alone(model, params, length):
    total = np.zeros((V,) * length)
    for sequence in itertools.product(range(V), repeat=length):
        total[sequence] = np.prod([model.probs(sequence[:i], params)[t] for i, t in enumerate(sequence)])
    return total


@pytest.mark.parametrize("length_rule", [fixed_length, until_eog, while_confident, after_token_0])
@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_enumeration(options, rule, length_rule):
    params = SamplingParams(**options)
    for seed, gamma in [(1, 1), (2, 2), (3, 3), (4, 3)]:
        target, draft = ToyModel(seed), ToyModel(seed + 100)
        want = alone(target, params, gamma + 1)
        for engine, tolerance in ((Twin, 1e-12), (C, 1e-6)):
            proposals = drafts(draft, params, length_rule(gamma))
            got = emitted(engine(target, draft, params), rule, proposals, gamma + 1)
            np.testing.assert_allclose(got, want, atol=tolerance)


class CutDraft(ToyModel):
    """A draft, or a head, that lacks a token which the target says."""

    IDS = np.array([0, 2], np.int32)

    def logits(self, prefix):
        row = np.full(V, -np.inf, np.float32)
        row[self.IDS] = super().logits(prefix)[self.IDS]
        return row


class CCut(C):
    """Slots are filled from rows of the tokens that the draft has."""

    def outcomes(self, tokens, rule):
        n = len(tokens)
        sampler = self.params.sampler(V, max(n, 1))
        for i in range(n):
            row = self.draft.logits(tokens[:i])[CutDraft.IDS]
            sampler.sample(row, np.asarray(tokens[:i], np.int32), 0.0, i, CutDraft.IDS)
        rows = np.stack([self.target.logits(tokens[:i]) for i in range(n + 1)])
        yield from c_outcomes(sampler, rows, tokens, np.arange(n, dtype=np.int32), rule)


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_draft_that_lacks_what_the_target_says(options, rule):
    params = SamplingParams(**options)
    for seed, gamma in [(1, 1), (2, 2), (3, 3)]:
        target, draft = ToyModel(seed), CutDraft(seed + 100)
        want = alone(target, params, gamma + 1)
        for engine, tolerance in ((Twin, 1e-12), (CCut, 1e-6)):
            proposals = drafts(draft, params, while_confident(gamma))
            got = emitted(engine(target, draft, params), rule, proposals, gamma + 1)
            np.testing.assert_allclose(got, want, atol=tolerance)


class SharpDraft(ToyModel):
    """A draft whose temperature is `ratio` times the target's."""

    def __init__(self, seed, ratio, params):
        super().__init__(seed)
        self.ratio = ratio
        temperatures = {name: ratio * getattr(params, name) for name in ("temperature", "dynatemp_range")}
        self._params = replace(params, **temperatures)

    def probs(self, prefix, params):
        return super().probs(prefix, self._params)


class CSharp(C):
    """Slots are filled at the draft's temperature, or at `recorded` times the target's."""

    recorded = None

    def outcomes(self, tokens, rule):
        n, ratio = len(tokens), self.recorded or self.draft.ratio
        sampler = self.params.sampler(V, max(n, 1))
        for i in range(n):
            row = self.draft.logits(tokens[:i])
            sampler.sample(row, np.asarray(tokens[:i], np.int32), 0.0, i, None, ratio)
        rows = np.stack([self.target.logits(tokens[:i]) for i in range(n + 1)])
        yield from c_outcomes(sampler, rows, tokens, np.arange(n, dtype=np.int32), rule)


class ForgetsTheRatio(CSharp):
    """What was drawn sharper is judged as if it had been drawn at the target's temperature."""

    recorded = 1.0


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.7])
@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_draft_of_another_temperature(options, rule, ratio):
    params = SamplingParams(**options)
    for seed, gamma in [(1, 1), (2, 2), (3, 3)]:
        target, draft = ToyModel(seed), SharpDraft(seed + 100, ratio, params)
        want = alone(target, params, gamma + 1)
        for engine, tolerance in ((Twin, 1e-12), (CSharp, 1e-6)):
            proposals = drafts(draft, params, while_confident(gamma))
            got = emitted(engine(target, draft, params), rule, proposals, gamma + 1)
            np.testing.assert_allclose(got, want, atol=tolerance)


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.7])
@pytest.mark.parametrize("rule", ["block", "chain"])
def test_a_draft_judged_at_another_temperature_than_its_own_is_caught(rule, ratio):
    params = SamplingParams(temperature=1.0, **PLAIN)
    target, draft = ToyModel(1), SharpDraft(101, ratio, params)
    proposals = drafts(draft, params, fixed_length(2))
    got = emitted(ForgetsTheRatio(target, draft, params), rule, proposals, 3)
    assert np.abs(got - alone(target, params, 3)).max() > 1e-3


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_deterministic_proposals_are_exact(rule):
    """A point mass as q: argmax drafts, n-grams and suffixes."""
    params = SamplingParams(temperature=0.9, **PLAIN)

    class ArgmaxDraft(ToyModel):
        def probs(self, prefix, params):
            return np.eye(V)[int(np.argmax(self.logits(prefix)))]

    class CPoint(C):
        def outcomes(self, tokens, rule):
            sampler = self.params.sampler(V, max(len(tokens), 1))
            rows = np.stack([self.target.logits(tokens[:i]) for i in range(len(tokens) + 1)])
            yield from c_outcomes(sampler, rows, tokens, np.full(len(tokens), -1, np.int32), rule)

    for seed in range(5):
        target, draft = ToyModel(seed), ArgmaxDraft(seed + 50)
        for engine, tolerance in ((Twin, 1e-12), (CPoint, 1e-6)):
            proposals = drafts(draft, params, fixed_length(3))
            got = emitted(engine(target, draft, params), rule, proposals, 4)
            np.testing.assert_allclose(got, alone(target, params, 4), atol=tolerance)


def test_block_never_accepts_less_than_chain():
    params = SamplingParams(temperature=1.0, **PLAIN)
    gains = []
    for seed in range(20):
        engine = Twin(ToyModel(seed), ToyModel(seed + 100), params)
        mean = {}
        for rule in ("block", "chain"):
            mean[rule] = sum(
                proposed * tau * chance
                for tokens, proposed in drafts(engine.draft, params, fixed_length(3))
                for tau, chance, _ in engine.outcomes(tokens, rule)
            )
        gains.append(mean["block"] - mean["chain"])
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


# ---- mutants: each has a mistake that some engine makes, and must be caught ----


class ResamplesFromTarget(Twin):
    """After a rejection it samples p instead of the residual."""

    def outcomes(self, tokens, rule):
        for tau, chance, _ in super().outcomes(tokens, rule):
            yield tau, chance, self.target.probs(tokens[:tau], self.params)


class IndependentBlock(Twin):
    """The block rule with the chain rule's residual."""

    def outcomes(self, tokens, rule):
        drafted = self.chain(tokens)
        for tau, chance, bonus in super().outcomes(tokens, "block"):
            if tau == len(tokens):
                yield tau, chance, bonus
            else:
                yield tau, chance, reference.residual(drafted.target_probs[tau], drafted.draft_probs[tau])[0]


def drops_unlikely_tokens(draft, params):
    """Confidence cut-off on the sampled token itself: what other engines do."""
    for tokens, chance in drafts(draft, params, fixed_length(3)):
        kept = []
        for i, token in enumerate(tokens):
            if draft.probs(tokens[:i], params)[token] < 0.4:
                break
            kept.append(token)
        yield tuple(kept), chance


@pytest.mark.parametrize(("mutant", "rule"), [(ResamplesFromTarget, "chain"), (IndependentBlock, "block")])
def test_biased_rules_are_caught(mutant, rule):
    params = SamplingParams(temperature=1.0, **PLAIN)
    target = ToyModel(1)
    draft = ToyModel(101)
    got = emitted(mutant(target, draft, params), rule, drafts(draft, params, fixed_length(2)), 3)
    assert np.abs(got - alone(target, params, 3)).max() > 1e-3


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_dropping_a_sampled_token_by_its_own_probability_is_caught(rule):
    """Even with p = q."""
    params = SamplingParams(temperature=1.0, **PLAIN)
    model = ToyModel(1)
    got = emitted(Twin(model, model, params), rule, drops_unlikely_tokens(model, params), 4)
    assert np.abs(got - alone(model, params, 4)).max() > 1e-3


# ---- a million samples through the C core ----


def run_c_core(target, draft, params, rule, n_runs, *, argmax_drafts=False):
    """Counts of emitted sequences of 3 tokens, gamma 2, the target alone continuing each run."""
    gamma, length = 2, 3
    sampler = params.sampler(V, gamma)
    rows = {
        prefix: (target.logits(prefix), draft.logits(prefix), np.asarray(prefix, np.int32))
        for n in range(length)
        for prefix in itertools.product(range(V), repeat=n)
    }
    verify_rows = {
        tokens: np.stack([rows[tokens[:i]][0] for i in range(gamma + 1)])
        for tokens in itertools.product(range(V), repeat=gamma)
    }
    ids = {tokens: np.asarray(tokens, np.int32) for tokens in verify_rows}
    slots = np.arange(gamma, dtype=np.int32)
    counts = np.zeros((V,) * length)
    per_run = 2 * gamma + 1 + length
    coins = _core.coins(20261121, 0, min(n_runs * per_run, 1 << 24))
    block = rule == "block"
    for run in range(n_runs):
        c = coins[run * per_run : (run + 1) * per_run]
        tokens = ()
        for i in range(gamma):
            _, row, prefix = rows[tokens]
            token = sampler.sample(row, prefix, c[i], i)
            if argmax_drafts:  # llama.cpp's examples/speculative at temperature > 0
                token = int(np.argmax(row))
            tokens = (*tokens, token)
        path, following, _ = sampler.verify(
            verify_rows[tokens], ids[tokens], slots - 1, slots, NO_TOKENS, c[gamma : 2 * gamma + 1], block
        )
        sequence = (*tokens[: len(path)], following)
        while len(sequence) < length:
            row, _, prefix = rows[sequence]
            sequence = (*sequence, sampler.sample(row, prefix, c[2 * gamma + 1 + len(sequence) - 1], -1))
        counts[sequence] += 1
    return counts


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_a_million_samples_through_the_c_core(rule):
    """Half of them by each rule. Under a sanitizer fewer go through the same code: statistics need none."""
    n = 50_000 if os.environ.get("SANITIZED") else 500_000
    params = SamplingParams(temperature=1.0, **PLAIN)
    target, draft = ToyModel(1), ToyModel(101)
    p_value = chi_square_p_value(run_c_core(target, draft, params, rule, n), n * alone(target, params, 3))
    print(f"chi-square p-value over {n} samples, {rule} rule: {p_value:.3f}")
    assert p_value > 1e-3


def test_the_chi_square_catches_a_biased_drafter():
    """Argmax drafts accepted with min(1, p/q), as in llama.cpp's examples/speculative."""
    n = 50_000
    params = SamplingParams(temperature=1.0, **PLAIN)
    target, draft = ToyModel(1), ToyModel(101)
    counts = run_c_core(target, draft, params, "chain", n, argmax_drafts=True)
    assert chi_square_p_value(counts, n * alone(target, params, 3)) < 1e-9
