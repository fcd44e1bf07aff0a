"""Every drafter, tree and decision is exact: the real loop over toy models, sequences counted.

Generation, TreeDrafter, Scheduler, DraftModel, the suffix store and the C core are the real ones; only the
models are functions of the prefix. The target's distribution over sequences is known exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial

import msgspec
import numpy as np
import pytest

from edgespec._core import SuffixStore
from edgespec.decoding.generate import Generation
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting import tree_drafter
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import ModelAction, Policy
from edgespec.drafting.suffix import Document
from edgespec.drafting.tree_drafter import TreeDrafter
from toy_models import ToyModel, V, chi_square_p_value
from toy_paces import (
    POLICIES,
    FixedPolicy,
    RandomPace,
    SoonDrafting,
    Wakes,
    cases,
    curves,
    pace_of,
    soon_drafting,
    with_gamma,
)
from toy_sessions import ToySession, ToyStateSession
from toy_tasks import task_of

pytestmark = pytest.mark.proof

LENGTH = 5
N_RUNS = 1_500  # of as many texts each mutant below gives less than 1e-16
PROMPT = (0, 1, 2, 0, 1)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class DropsUnlikely(TreeDrafter):
    """The trap: a sampled token is taken back because of its own probability (as other engines do)."""

    def draft(self, tokens, room, position):
        tree = super().draft(tokens, room, position)
        kept, probs = [], np.empty(V, np.float32)
        for node in tree:
            position.sampler.probs(node.slot, probs)
            if probs[node.token] < 0.4:
                break
            kept.append(node)
        self._step.proposed = tuple(kept)
        return self._step.proposed


class DropsUnlikelySiblings(TreeDrafter):
    """The same trap in a tree: of what was sampled beside the trunk, the unlikely is taken back."""

    def draft(self, tokens, room, position):
        tree = super().draft(tokens, room, position)
        probs = np.empty(V, np.float32)
        unlikely = set()
        for i, node in enumerate(tree):
            if node.slot >= 0 and node.parent != i - 1:
                position.sampler.probs(node.slot, probs)
                if probs[node.token] < 0.6:
                    unlikely.add(i)
        place = [i - sum(j < i for j in unlikely) for i in range(len(tree))]
        self._step.proposed = tuple(
            msgspec.structs.replace(node, parent=place[node.parent] if node.parent >= 0 else -1)
            for i, node in enumerate(tree)
            if i not in unlikely
        )
        return self._step.proposed


class ForgetsItsTemperature(TreeDrafter):
    """The trap: what was drawn at the draft's temperature is judged as if it had been at the target's."""

    def draft(self, tokens, room, position):
        tree = super().draft(tokens, room, position)
        probs = np.empty(V, np.float32)
        for node in tree:
            if node.slot >= 0:
                position.sampler.probs(node.slot, probs)
                at_targets = probs**self._model.temperature_ratio
                position.sampler.set_probs(node.slot, at_targets / at_targets.sum())
        return tree


class Branches(SoonDrafting):
    """A fixed shape: two tokens at the first position, of the model alone."""

    def next(self, path, depth, unread, offered, bucket):
        return ModelAction(0) if depth < 3 else None

    def verifies(self, path, depth, bucket, *, chance=1.0):
        return True

    def branches(self, path, n_drafted):
        return n_drafted < 2


def counts_of(
    clock,
    target,
    draft,
    params,
    rule,
    n_runs,
    policy,
    *,
    scheduler=soon_drafting,
    kind=TreeDrafter,
    prompt=PROMPT,
    n_draft_ctx=1 << 20,
    keep_states=False,
    ratio=1.0,
):
    """Count the sequences of LENGTH tokens that the real loop emits after `prompt`.

    `keep_states`: both models are such as take tokens back by reading others again. `ratio`: the draft's
    temperature over the target's.
    """
    clocks = curves()
    chosen = scheduler(policy, clocks)
    suffix = SuffixStore(1024)
    kinds = (ToyStateSession, partial(ToyStateSession, n_marks=3)) if keep_states else (ToySession,) * 2
    target_session = kinds[0](cache(target.logits), V, clock=clock, cost=lambda n: 0.05)
    draft_session = kinds[1](cache(draft.logits), V, clock=clock, cost=lambda n: 0.001, n_ctx=n_draft_ctx)
    model = DraftModel(draft_session, n_vocab=V)
    model.temperature_ratio = ratio
    counts = np.zeros((V,) * LENGTH)
    totals = {}
    for seed in range(n_runs):
        drafter = kind(chosen, suffix=suffix, model=model, is_eog=lambda token: False, clocks=clocks)
        run = Generation(target_session, drafter, prompt, task_of(params, seed, rule=rule, n_predict=LENGTH))
        for _ in run.events():
            pass
        counts[tuple(run.tokens[len(prompt) :])] += 1
        for source, (drafted, accepted) in drafter._totals.items():
            before = totals.get(source, (0, 0))
            totals[source] = (before[0] + drafted, before[1] + accepted)
    return counts, totals


def expected(target, params, prompt=PROMPT):
    total = np.zeros((V,) * LENGTH)
    for sequence in itertools.product(range(V), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(sequence):
            chance *= target.probs((*prompt, *sequence[:i]), params)[token]
        total[sequence] = chance
    return total


@pytest.mark.parametrize(("name", "rule"), cases(POLICIES))
def test_every_policy_is_exact(clock, name, rule):
    n = N_RUNS
    target, draft = ToyModel(1), ToyModel(101)
    scheduler = RandomPace if name == "random" else soon_drafting
    policy = POLICIES.get(name, Policy())
    counts, totals = counts_of(clock, target, draft, WARM, rule, n, policy, scheduler=scheduler)
    assert sum(accepted for _, accepted in totals.values()) > n / 10, "little was accepted: it proves little"
    if policy.model:
        assert totals["sampled"][1] > n / 100, "sampled tokens are what can go wrong"
    assert chi_square_p_value(counts, n * expected(target, WARM)) > 1e-4


@pytest.mark.parametrize(("name", "rule"), [*cases(["auto", "auto, gamma 3"]), ("random", "match")])
def test_models_that_keep_a_state_are_exact(clock, name, rule):
    """What is read again must not change what is sampled, however much of it piles up."""
    n = N_RUNS
    target, draft = ToyModel(1), ToyModel(101)
    policy = replace(POLICIES.get(name, Policy()), branches=False, siblings=False, rereads=True, splits=True)
    scheduler = RandomPace if name == "random" else soon_drafting
    counts, totals = counts_of(
        clock, target, draft, WARM, rule, n, policy, scheduler=scheduler, keep_states=True
    )
    assert sum(accepted for _, accepted in totals.values()) > n / 10, "little was accepted: it proves little"
    assert chi_square_p_value(counts, n * expected(target, WARM)) > 1e-4


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_a_draft_model_that_sleeps_wakes_and_slides_is_exact(clock, monkeypatch, rule):
    """A prompt longer than what the draft model reads at once, in a context that is soon full."""
    monkeypatch.setattr(tree_drafter, "MAX_UNREAD", 5)
    n = N_RUNS
    target, draft = ToyModel(1), ToyModel(101)
    prompt = (0, 1, 2, 0, 2, 1) * 5
    counts, totals = counts_of(
        clock,
        target,
        draft,
        WARM,
        rule,
        n,
        Policy(),
        scheduler=partial(pace_of, kind=Wakes),
        prompt=prompt,
        n_draft_ctx=16,
    )
    assert totals["sampled"][1] > n / 100
    assert chi_square_p_value(counts, n * expected(target, WARM, prompt)) > 1e-4


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("policy", [FixedPolicy(suffix=False, staged=False, gamma=3), Policy(suffix=False)])
def test_dropping_a_sampled_token_by_its_own_probability_is_caught(clock, policy, rule):
    """Even with p = q, for a fixed length and for lengths that the data decides."""
    n = N_RUNS
    target = ToyModel(1)
    counts, _ = counts_of(clock, target, target, WARM, rule, n, policy, kind=DropsUnlikely)
    assert chi_square_p_value(counts, n * expected(target, WARM)) < 1e-6


@pytest.mark.parametrize("rule", ["block", "chain"])
def test_dropping_a_sampled_sibling_by_its_own_probability_is_caught(clock, rule):
    n = N_RUNS
    target, draft = ToyModel(24), ToyModel(124)  # whose unlikely siblings matter
    policy, shape = Policy(suffix=False, staged=False), partial(pace_of, kind=Branches)
    got = {
        kind: chi_square_p_value(
            counts_of(clock, target, draft, WARM, rule, n, policy, scheduler=shape, kind=kind)[0],
            n * expected(target, WARM),
        )
        for kind in (TreeDrafter, DropsUnlikelySiblings)
    }
    assert got[TreeDrafter] > 1e-4
    assert got[DropsUnlikelySiblings] < 1e-6


@pytest.mark.parametrize(("ratio", "rule"), [(0.5, "block"), (2.0, "chain")])
def test_a_draft_of_another_temperature_is_exact(clock, ratio, rule):
    n = N_RUNS
    target, draft = ToyModel(1), ToyModel(101)
    policy = FixedPolicy(suffix=False, staged=False, gamma=3)
    got = {}
    for kind in (TreeDrafter, ForgetsItsTemperature):
        counts, totals = counts_of(clock, target, draft, WARM, rule, n, policy, kind=kind, ratio=ratio)
        assert totals["sampled"][1] > n / 10, "little was accepted: it proves little"
        got[kind] = chi_square_p_value(counts, n * expected(target, WARM))
    assert got[TreeDrafter] > 1e-4
    assert got[ForgetsItsTemperature] < 1e-6


def test_with_the_match_rule_the_text_is_a_function_of_the_seed():
    """Whatever is drafted, the text is plain decoding's, also where coins decide it."""
    target, draft = ToyModel(7), ToyModel(107)
    clocks = curves()
    suffix = SuffixStore(1024)

    def text(seed, policy, scheduler=soon_drafting):
        drafter = None
        if policy:
            chosen = scheduler(policy, clocks)
            model = DraftModel(ToySession(cache(draft.logits), V), n_vocab=V)
            drafter = TreeDrafter(chosen, suffix=suffix, model=model, is_eog=lambda t: t == 2, clocks=clocks)
        session = ToySession(cache(target.logits), V, is_eog=lambda t: t == 2)
        run = Generation(session, drafter, (0, 1), task_of(WARM, seed, rule="match", n_predict=30))
        list(run.events())
        return run.tokens, run.stop_reason

    for seed in range(60):
        plain = text(seed, None)
        for policy in POLICIES.values():
            assert text(seed, policy) == plain
        assert text(seed, Policy(), RandomPace) == plain


def test_the_draft_model_checks_guesses_in_one_pass():
    """Staged: what the suffix store repeats costs the draft model a pass, not a pass a token."""
    period = (4, 1, 3, 0, 2, 5, 7, 6)

    def logits(prefix):
        row = np.zeros(8)
        row[period[(period.index(prefix[-1]) + 1) % 8]] = 9.0
        return row

    clocks = curves()
    chosen = pace_of(with_gamma(Policy(suffix=False, staged=True), 7), clocks)
    session = ToySession(logits, 8)
    drafter = TreeDrafter(
        chosen,
        suffix=SuffixStore(256),
        model=DraftModel(session, n_vocab=8),
        is_eog=lambda t: False,
        clocks=clocks,
    )
    prompt = period * 3
    run = Generation(ToySession(logits, 8), drafter, prompt, task_of(WARM, 1, rule="match", n_predict=64))
    list(run.events())
    drafted, accepted = drafter.sources()["model"]
    assert accepted > 40
    assert len(session.passes) - 1 < drafted / 4


def test_no_branch_of_the_store_goes_beyond_the_end():
    """Earlier texts went on after an end of generation, as a chat's next turn does; no draft may."""
    end, drafts = 3, []
    suffix = SuffixStore(256)
    Document(suffix, (0, 1, 2, end, 4, 5, 0, 1, 2, end, 4, 4, 0, 1, 2, 2, 5) * 3)
    for policy in (Policy(model=False, staged=False), Policy(model=False, staged=False, branches=False)):
        clocks = curves()
        chosen = soon_drafting(policy, clocks)
        drafter = TreeDrafter(
            chosen,
            suffix=suffix,
            model=None,
            is_eog=lambda t: t == end,
            clocks=clocks,
            on_step=lambda step: drafts.append(step.proposed),
        )
        session = ToySession(
            cache(lambda prefix: np.random.default_rng([1, *prefix]).normal(0, 1.5, 6)),
            6,
            is_eog=lambda t: t == end,
        )
        for seed in range(40):
            run = Generation(session, drafter, (0, 1), task_of(WARM, seed, rule="block", n_predict=24))
            list(run.events())
            assert end not in run.tokens[2:-1]
    assert any(node.token == end for tree in drafts for node in tree)
    assert all(tree[node.parent].token != end for tree in drafts for node in tree if node.parent >= 0)


def test_nothing_is_drafted_after_an_end_of_generation_token():
    sequence = (5, 1, 2, 3, 4)  # 3 ends

    def logits(prefix):
        row = np.zeros(6)
        if prefix[-1] in sequence:  # a branch may hold anything
            row[sequence[(sequence.index(prefix[-1]) + 1) % 5]] = 20.0
        return row

    for policy in POLICIES.values():
        clocks = curves()
        chosen = soon_drafting(policy, clocks)
        suffix = SuffixStore(256)
        Document(suffix, sequence * 4)
        drafter = TreeDrafter(
            chosen,
            suffix=suffix,
            model=DraftModel(ToySession(logits, 6), n_vocab=6),
            is_eog=lambda t: t == 3,
            clocks=clocks,
        )
        session = ToySession(logits, 6, is_eog=lambda t: t == 3)
        params = SamplingParams(temperature=0.0)
        run = Generation(session, drafter, (5,), task_of(params, 1, rule="match"))
        list(run.events())
        assert run.tokens == [5, 1, 2, 3]
        assert run.stop_reason == "eog"
