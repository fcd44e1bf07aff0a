"""One decision for several requests: what the tokens of all of them add to the pass that they share."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafting.costs import (
    N_MAX,
    CostCurve,
    OnlineCurve,
    extrapolated,
    interpolated,
    one_more_each,
    per_request,
)
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.policy import ModelAction, Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.shared_decision import DraftDecision, PassLoad, decide
from toy_schedulers import SoonDrafting

FLAT = [0.0, *(0.02 + 0.0001 * n for n in range(1, N_MAX + 1))]
STEEP = [0.0, *(0.02 + 0.002 * n for n in range(1, N_MAX + 1))]
MEASURED = interpolated({1: 0.023, 8: 0.031, 16: 0.045, 31: 0.091, 32: 0.090, N_MAX: 0.093})
STEPPED = [0.0, *MEASURED]
"""As on a processor whose kernels take tokens by sixteens (Zen 5): 32 are quicker than 31."""


def curve_of(costs: list[float]) -> OnlineCurve:
    side = tuple(costs[1:])
    return OnlineCurve(CostCurve((side, side), costs[1]))


def choices(costs: list[float], n: int, *, depth: int = 0) -> list[object]:
    """What is decided for `n` requests whose draft model is right in seven of ten tokens."""
    bids = []
    for _ in range(n):
        learned = LearnedCosts(curve_of(costs), curve_of([0.0, *[0.0005] * N_MAX]), Predictor())
        scheduler = SoonDrafting(learned, Policy(suffix=False, staged=False))
        scheduler.begin(100, None)
        scheduler.start_step(100)
        bids.append(DraftDecision(scheduler, 0.7**depth, depth, 1, [], 0))
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
