"""One decision for several requests: what the tokens of all of them add to the pass that they share."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafting.costs import extrapolated, one_more_each, per_request
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.online_curve import OnlineCurve
from edgespec.drafting.policy import ModelAction, Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.profile import N_MAX, CostCurve, interpolated
from edgespec.drafting.scheduler import FixedLength
from edgespec.drafting.shared_decision import Bid, PassLoad, decide, is_worth_timing
from toy_schedulers import SoonDrafting

FLAT = [0.0, *(0.02 + 0.0001 * n for n in range(1, N_MAX + 1))]
STEEP = [0.0, *(0.02 + 0.002 * n for n in range(1, N_MAX + 1))]
MEASURED = interpolated({1: 0.023, 8: 0.031, 16: 0.045, 31: 0.091, 32: 0.090, N_MAX: 0.093})
STEPPED = [0.0, *MEASURED]
"""As on a processor whose kernels take tokens by sixteens (Zen 5): 32 are quicker than 31."""


def curve_of(costs: list[float]) -> OnlineCurve:
    side = tuple(costs[1:])
    return OnlineCurve(CostCurve((side, side), costs[1]))


def bids_of(
    n: int, target: OnlineCurve, *, depth: int = 0, in_joules: bool = False, gamma: int | None = None
) -> list[Bid]:
    """Those of `n` requests whose draft model is right in seven of ten tokens."""
    bids = []
    policy = Policy(suffix=False, staged=False)
    for _ in range(n):
        draft = curve_of([0.0, *[0.0005] * N_MAX])
        learned = LearnedCosts(target, draft, Predictor(), in_joules=in_joules)
        scheduler = SoonDrafting(learned, policy) if gamma is None else FixedLength(gamma, learned, policy)
        scheduler.begin(100, None)
        scheduler.start_step(100)
        bids.append(Bid(scheduler, 0.7**depth, depth, 1, [], 0))
    return bids


def choices(costs: list[float], n: int, *, depth: int = 0) -> list[object]:
    """What is decided for `n` requests whose draft model is right in seven of ten tokens."""
    bids = bids_of(n, curve_of(costs), depth=depth)
    n_tokens = n * (1 + depth)
    rate = n / extrapolated(costs, n_tokens, n_tokens)[0]
    return decide(bids, PassLoad(n, n_tokens, 100, rate))


@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_all_draft_where_a_token_costs_little(n: int) -> None:
    assert all(isinstance(choice, ModelAction) for choice in choices(FLAT, n))


def test_sixteen_do_not_draft_where_only_the_last_of_their_tokens_is_cheap() -> None:
    """Each of them saw a pass of 31 tokens become one of 32, for nothing; together they pay for sixteen."""
    assert choices(STEPPED, 16) == [None] * 16
    assert isinstance(choices(STEPPED, 1)[0], ModelAction)


def test_what_was_drafted_before_is_in_the_pass_already() -> None:
    assert choices(STEPPED, 10, depth=2) == [None] * 10
    assert all(isinstance(choice, ModelAction) for choice in choices(FLAT, 10, depth=2))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 3), (16, 16), (33, 2), (70, 5)])
def test_each_pays_an_equal_part_of_what_all_add(n: int, m: int) -> None:
    whole = extrapolated(STEEP, n + 20 * m)
    parts = one_more_each(STEEP, n, m, 21)
    expected = [whole[n] + (whole[n + m * i] - whole[n]) / m for i in range(21)]
    assert np.allclose(parts, expected)
    assert np.allclose(extrapolated(STEEP, n + 20 * m, n, m), whole[n::m])


def test_costs_beyond_the_curve_grow_as_in_its_upper_half() -> None:
    longer = extrapolated(STEEP, 100)
    assert longer[: N_MAX + 1] == STEEP
    assert np.allclose(np.diff(longer[N_MAX:]), 0.002)
    assert np.allclose(per_request(STEEP, 4), np.array(extrapolated(STEEP, 4 * N_MAX)[::4]) / 4)


def test_a_pass_goes_without_drafts_where_nothing_else_tells_what_it_costs() -> None:
    """All drafted in hundreds of steps; then one goes without, and the price of a draft is known again."""
    target = curve_of(STEPPED)
    load = PassLoad(8, 8, 100, 300.0)
    assert not is_worth_timing(bids_of(8, target), load), "it was measured"
    for _ in range(400):
        target.observe(16, 100, STEPPED[16])
    assert is_worth_timing(bids_of(8, target), load)
    assert not is_worth_timing(bids_of(8, target, depth=1), load), "drafts are in the pass already"
    assert not is_worth_timing(bids_of(8, target, gamma=2), load), "the user wants two in every step"
    assert not is_worth_timing(bids_of(8, target, in_joules=True), load), "passes are timed, not weighed"
    assert not is_worth_timing(bids_of(8, target), PassLoad(8, N_MAX + 1, 100, 200.0)), "it teaches nothing"
    assert isinstance(decide(bids_of(8, target), load)[0], ModelAction)
    for _ in range(4):
        target.observe(8, 100, STEPPED[16] * 0.5)
        target.observe(16, 100, STEPPED[16])
    assert not is_worth_timing(bids_of(8, target), load)
    assert decide(bids_of(8, target), load)[0] is None, "eight tokens more are dearer than they seemed"


def test_requests_that_run_together_do_not_spend_savings_again() -> None:
    learned = LearnedCosts(curve_of(FLAT), curve_of([0.0, *[0.0005] * N_MAX]), Predictor())
    for _ in range(1000):
        learned.count_step(0.02, idle=True)
    assert learned.affords_probe(0.1)
    forks = [learned.fork(), learned.fork()]
    assert not any(fork.affords_probe(1e-6) for fork in forks)
    assert learned.affords_probe(0.1)
    forks[0].count_step(0.02, idle=True)
    assert forks[0].affords_probe(1e-6)
    assert not forks[1].affords_probe(1e-6)
