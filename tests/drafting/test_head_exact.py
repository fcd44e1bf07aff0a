"""A head in the real loop is exact: sequences counted over toy models, with a cut that lacks a token.

Generation, TargetFeatures, HeadModel, TreeDrafter, Scheduler and the C core are the real ones.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from msgspec.structs import replace

from edgespec._core import SuffixStore
from edgespec.decoding.generate import Generation
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting import tree_drafter
from edgespec.drafting.pace import Policy
from edgespec.drafting.tree_drafter import TreeDrafter
from toy_heads import ToyTargetSession, state_of, toy_head, toy_mtp_head
from toy_models import ToyModel, V, chi_square_p_value
from toy_paces import FixedPolicy, Wakes, WithoutGuesses, cases, curves, pace_of, soon_drafting
from toy_sessions import ToySession
from toy_tasks import task_of

pytestmark = pytest.mark.proof

LENGTH = 5
N_RUNS = 1_000  # of as many texts each mutant of test_tree_drafter.py gives less than 1e-7
PROMPT = (0, 1, 2, 0, 1)
KEPT = (0, 2)
POLICIES = {
    "auto": Policy(staged=False),
    "chain": Policy(staged=False, branches=False),
    "model": Policy(suffix=False, staged=False),
    "model, gamma 3": FixedPolicy(suffix=False, staged=False, gamma=3),
}


def warm(temperature):
    return SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


def expected(target, params, prompt=PROMPT):
    total = np.zeros((V,) * LENGTH)
    for sequence in np.ndindex(total.shape):
        total[sequence] = np.prod(
            [target.probs((*prompt, *sequence[:i]), params)[token] for i, token in enumerate(sequence)]
        )
    return total


def counts_of(
    clock,
    params,
    rule,
    n_runs,
    policy,
    *,
    scheduler=soon_drafting,
    prompt=PROMPT,
    window=3,
    n_ctx=64,
    is_mtp=False,
):
    """Count the sequences of LENGTH tokens that the loop emits after `prompt`; return also what was accepted.

    One head writes all texts, as an engine has it: `window` tokens of each prompt have states. `is_mtp`: it
    is in the target's own file.
    """
    target = ToyModel(1)
    clocks = curves()
    chosen = scheduler(policy, clocks)
    suffix = SuffixStore(1024)
    session = ToyTargetSession(cache(target.logits), V, clock=clock, cost=lambda n: 0.05, leaves=not is_mtp)
    options = {"clock": clock, "cost": lambda n: 0.001, "n_ctx": n_ctx}
    head = toy_mtp_head(V, **options) if is_mtp else toy_head(V, KEPT, **options)
    head.features.n_prompt = lambda: window
    counts = np.zeros((V,) * LENGTH)
    n_accepted = 0
    for seed in range(n_runs):
        drafter = TreeDrafter(chosen, suffix=suffix, model=head, is_eog=lambda token: False, clocks=clocks)
        task = task_of(params, seed, rule=rule, n_predict=LENGTH)
        run = Generation(session, drafter, prompt, task, features=head.features)
        for _ in run.events():
            pass
        counts[tuple(run.tokens[len(prompt) :])] += 1
        n_accepted += drafter.sources().get("model", (0, 0))[1]
    return counts, n_accepted


@pytest.mark.parametrize(("name", "rule"), cases(POLICIES))
def test_every_policy_is_exact(clock, name, rule):
    n = N_RUNS
    params = warm(1.0)
    scheduler = WithoutGuesses if name == "random" else soon_drafting
    policy = POLICIES.get(name, POLICIES["auto"])
    counts, n_accepted = counts_of(clock, params, rule, n, policy, scheduler=scheduler)
    assert n_accepted > n / 20, "little was accepted: it proves little"
    assert chi_square_p_value(counts, n * expected(ToyModel(1), params)) > 1e-4


@pytest.mark.parametrize(("name", "rule"), cases(["auto", "model, gamma 3"]))
def test_a_head_in_the_targets_own_file_is_exact(clock, name, rule):
    n = N_RUNS
    scheduler = WithoutGuesses if name == "random" else soon_drafting
    policy = POLICIES.get(name, POLICIES["auto"])
    counts, n_accepted = counts_of(clock, warm(0.9), rule, n, policy, scheduler=scheduler, is_mtp=True)
    assert n_accepted > n / 20, "little was accepted: it proves little"
    assert chi_square_p_value(counts, n * expected(ToyModel(1), warm(0.9))) > 1e-4


@pytest.mark.parametrize("is_mtp", [False, True])
@pytest.mark.parametrize("name", [*POLICIES, "random"])
def test_with_the_match_rule_the_texts_are_plain_decodings(clock, name, is_mtp):
    scheduler = WithoutGuesses if name == "random" else soon_drafting
    policy = POLICIES.get(name, POLICIES["auto"])
    n = 60
    plain = np.zeros((V,) * LENGTH)
    for seed in range(n):
        task = task_of(warm(1.0), seed, rule="match", n_predict=LENGTH)
        run = Generation(ToySession(ToyModel(1).logits, V), None, PROMPT, task)
        list(run.events())
        plain[tuple(run.tokens[len(PROMPT) :])] += 1
    counts, n_accepted = counts_of(clock, warm(1.0), "match", n, policy, scheduler=scheduler, is_mtp=is_mtp)
    assert np.array_equal(counts, plain) and (plain > 0).sum() > n / 3
    assert n_accepted > n / 20, "little was accepted: it proves little"


@pytest.mark.parametrize("is_mtp", [False, True])
@pytest.mark.parametrize("name", [*POLICIES, "random"])
def test_at_temperature_0_the_text_is_the_targets(clock, name, is_mtp):
    params = warm(0.0)
    scheduler = WithoutGuesses if name == "random" else soon_drafting
    policy = POLICIES.get(name, POLICIES["auto"])
    for prompt in [(0,), PROMPT, (2, 1) * 6]:
        counts, _ = counts_of(
            clock, params, "match", 20, policy, scheduler=scheduler, prompt=prompt, is_mtp=is_mtp
        )
        assert np.array_equal(counts, 20 * expected(ToyModel(1), params, prompt))


@pytest.mark.parametrize("rule", ["block", "chain"])
@pytest.mark.parametrize("window", [0, 20])
def test_a_head_that_sleeps_wakes_and_slides_is_exact(clock, monkeypatch, rule, window):
    """A prompt longer than what it reads at once, in a context that is soon full."""
    monkeypatch.setattr(tree_drafter, "MAX_UNREAD", 5)
    n = N_RUNS
    prompt = (0, 1, 2, 0, 2, 1) * 5
    counts, n_accepted = counts_of(
        clock,
        warm(1.0),
        rule,
        n,
        POLICIES["auto"],
        scheduler=partial(pace_of, kind=Wakes),
        prompt=prompt,
        window=window,
        n_ctx=16,
    )
    assert n_accepted > n / 100
    assert chi_square_p_value(counts, n * expected(ToyModel(1), warm(1.0), prompt)) > 1e-4


class RereadingSession(ToyTargetSession):
    """Steps are read with a part of the text, as after a pause, in a pass that leaves states of all of it."""

    def forward(self, parts):
        (part,) = parts
        (result,) = super().forward(parts)
        if not part.with_last_states:
            return [result]
        return [replace(result, features=np.concatenate([[[-1.0], [-2.0]], result.features]))]


@pytest.mark.parametrize("leaves", [False, True, "again"])
@pytest.mark.parametrize("name", [*POLICIES, "random"])
def test_what_was_accepted_is_read_with_the_targets_states(clock, name, leaves):
    """Before each draft the head has read the emitted tokens, each after the target's state before it."""
    clocks = curves()
    scheduler = WithoutGuesses if name == "random" else soon_drafting
    chosen = scheduler(POLICIES.get(name, POLICIES["auto"]), clocks)
    head = toy_head(V, KEPT, clock=clock, cost=lambda n: 0.001)
    head.features.n_prompt = lambda: 4
    logits = cache(ToyModel(1).logits)
    kind = RereadingSession if leaves == "again" else ToyTargetSession
    session = kind(logits, V, clock=clock, cost=lambda n: 0.05, leaves=bool(leaves))
    n_checked = 0

    class Checked(TreeDrafter):
        def accept(self, tokens, made, result):
            nonlocal n_checked
            super().accept(tokens, made, result)
            first = head.features.first + 1
            for i, (token, state) in enumerate(head._session.inputs[: head.n_past], first):
                assert (token, state) == (tokens[i], state_of(tokens[:i]))
                n_checked += 1

    for seed in range(20):
        drafter = Checked(
            chosen, suffix=SuffixStore(64), model=head, is_eog=lambda token: False, clocks=clocks
        )
        task = task_of(warm(1.0), seed, n_predict=30)
        list(Generation(session, drafter, PROMPT, task, features=head.features).events())
    assert n_checked > 1000
