"""A cost curve that follows timed passes: its scale, its shape, machines that change, and what it doubts."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafting.profile import N_MAX, CostCurve, PassCosts, guessed_curve, interpolated
from toy_paces import OURS, STEEPER, STOCK

QUICK = [0.0, *interpolated({1: 14.6, 4: 16.2, 6: 18.9, 8: 22.8, 9: 31.0, 12: 34.5, 16: 41.7, 33: 83.0})]
"""One machine (Zen 5, ms); below, in an hour in which its memory is slow: many tokens take no longer."""
SLOW = [0.0, *interpolated({1: 21.5, 4: 22.0, 7: 23.0, 8: 23.3, 9: 31.0, 12: 34.0, 16: 40.4, 33: 81.0})]


def curve_of(costs: list[float]) -> CostCurve:
    return CostCurve((tuple(costs[1:]), tuple(costs[1:])), 0.0005)


def errors(curve: PassCosts, costs: list[float], sizes: list[int]) -> list[float]:
    return [abs(float(np.log(curve.at(200)[n] / costs[n]))) for n in sizes]


def time_passes(curve: PassCosts, costs: list[float], sizes: list[int], n: int, seed: int = 1) -> None:
    rng = np.random.default_rng(seed)
    for size in rng.choice(sizes, n):
        curve.observe(int(size), 200, costs[size] * float(rng.lognormal(0, 0.03)))


@pytest.mark.parametrize("first_s", [0.5, 0.02, 30.0])
def test_a_guess_takes_its_scale_from_the_first_passes(first_s: float) -> None:
    """However slow the very first one was, and whatever the guess: it was 0.027."""
    curve = PassCosts(guessed_curve(1 << 30, own_kernels=True), guessed=True)
    for seconds in (first_s, 0.1, 0.1, 0.1):
        curve.observe(1, 100, seconds)
    assert curve.at(100)[1] == pytest.approx(0.1)
    assert curve.at(100)[8] == pytest.approx(0.1 * 2.0, rel=0.01)


def test_a_guess_thinks_no_token_cheaper_than_on_a_processor_that_was_measured() -> None:
    guess = guessed_curve(1 << 30, own_kernels=True).at(128)
    for costs in (OURS, STEEPER):
        assert all(guess[n] / guess[1] > 0.97 * costs[n] / costs[1] for n in range(2, N_MAX + 1))


def test_the_shape_of_a_guess_is_learned_in_an_answer() -> None:
    """From its own passes, of which most are over several tokens; also for sizes near theirs."""
    curve = PassCosts(guessed_curve(1 << 30, own_kernels=True), guessed=True)
    rng = np.random.default_rng(2)
    guess = curve.at(200)[8] / curve.at(200)[1]
    for i in range(40):
        n = 1 if i < 4 or rng.random() < 0.1 else int(rng.integers(4, 9))
        curve.observe(n, 200, OURS[n] * float(rng.lognormal(0, 0.05)))
    true = OURS[8] / OURS[1]
    assert curve.at(200)[8] / curve.at(200)[1] - true < 0.6 * (guess - true)
    assert curve.at(200)[10] / curve.at(200)[8] == pytest.approx(OURS[10] / OURS[8], rel=0.15)


def test_one_token_costs_no_more_than_several() -> None:
    """A machine was slow when T(1) was measured, and all steps draft since: nothing else would tell."""
    curve = PassCosts(curve_of([0.0, 1.5 * OURS[1], *OURS[2:]]))
    assert curve.at(200)[1] == pytest.approx(min(curve.at(200)[2:]))


def test_it_follows_a_machine_that_slows_down_and_a_shape_that_is_another() -> None:
    curve = PassCosts(curve_of(OURS))
    rng = np.random.default_rng(1)
    for n in rng.integers(1, 9, 3000):
        curve.observe(int(n), 200, 1.5 * STOCK[n] * float(rng.lognormal(0, 0.05)))
    for n in range(1, 9):
        assert curve.at(200)[n] == pytest.approx(1.5 * STOCK[n], rel=0.06)
    assert curve.curve().at(200)[4] == pytest.approx(1.5 * STOCK[4], rel=0.06)


def test_what_slows_down_passes_over_few_tokens_is_not_laid_to_those_over_many() -> None:
    """Memory became slow: T(3) rose by a third, T(12) did not, though no pass over twelve tells so yet."""
    curve = PassCosts(curve_of(QUICK))
    time_passes(curve, QUICK, [3, 12], 200)
    time_passes(curve, SLOW, [3], 24)
    assert errors(curve, SLOW, [3])[0] < 0.1
    assert errors(curve, SLOW, [12])[0] < 0.6 * np.log(SLOW[3] / QUICK[3])
    assert curve.at(200)[2] == pytest.approx(SLOW[2], rel=0.15), "a pass over two is much like one over three"


def test_hours_that_differ_leave_no_trace() -> None:
    """Of both kinds in turns: however often, each pass is foretold, and the price of a token with it."""
    curve = PassCosts(curve_of(QUICK), unsure=True)
    for turn in range(12):
        costs = SLOW if turn % 2 else QUICK
        time_passes(curve, costs, [1, 3, 4, 5, 6, 7, 8], 120, seed=turn)
        assert max(errors(curve, costs, [3, 4, 5, 6, 7, 8])) < 0.12
        assert curve.at(200)[7] - curve.at(200)[3] == pytest.approx(costs[7] - costs[3], abs=0.12 * costs[3])


def test_one_slow_pass_does_not_spoil_a_curve() -> None:
    curve = PassCosts(curve_of(OURS))
    curve.observe(1, 100, 30.0)
    assert curve.at(100)[1] < 1.2 * OURS[1]
    time_passes(curve, OURS, [1], 3000)
    curve.observe(1, 100, 30.0)
    assert curve.at(100)[1] < 1.1 * OURS[1], "nor one that was timed often, and others that never were"
    curve.observe(16, 100, 30.0)
    assert curve.at(100)[16] < 2.2 * OURS[16]


def test_costs_grow_with_the_context() -> None:
    curve = CostCurve((tuple(OURS[1:]), tuple(2 * x for x in OURS[1:])), 0.001)
    assert curve.at(128)[4] == pytest.approx(OURS[4])
    assert curve.at(2048)[4] == pytest.approx(2 * OURS[4])
    assert curve.at(1088)[4] == pytest.approx(1.5 * OURS[4])
    assert all(x > 0 for x in curve.at(0)[1:])
    assert curve.at(8192)[4] > 4 * OURS[4]


def in_long_text(n: int, n_past: int) -> float:
    """What a pass takes where attention costs twice what is guessed."""
    return OURS[n] + 2 * (n_past - 128) / 1920 * OURS[1] * (0.06 + 0.08 * n)


@pytest.mark.parametrize("learned", [False, True], ids=["in its first text", "after short texts"])
def test_what_the_context_adds_is_learned_where_it_runs(learned: bool) -> None:
    """A dozen passes over one and six tokens at 8,192 tell of all others, there and in longer texts."""
    curve = PassCosts(guessed_curve(1 << 30, own_kernels=True), guessed=True)
    if learned:
        time_passes(curve, OURS, [*range(1, 9)], 300)
    for n in [1, 6] * 6:
        curve.observe(n, 8192, in_long_text(n, 8192))
    tables = {n_past: curve.at(n_past) for n_past in (8192, 16384)}
    wrong = [abs(np.log(tables[at][n] / in_long_text(n, at))) for at in tables for n in (1, 3, 6, 8)]
    assert max(wrong) < 0.25
    assert curve.curve().at(8192)[8] == pytest.approx(tables[8192][8])
    if learned:
        assert max(errors(curve, OURS, [*range(1, 9)])) < 0.2, "little was unlearned of short ones"


def test_a_guess_expects_a_further_token_to_cost_more_in_a_long_text() -> None:
    """One token's attention is not shared: T(8) / T(1) was 2.4 at 128 tokens and 3.4 at 8,192 (Zen 3)."""
    guess = guessed_curve(1 << 30, own_kernels=True)
    assert guess.at(8192)[8] / guess.at(8192)[1] > 1.4 * guess.at(128)[8] / guess.at(128)[1]


def test_reading_costs_more_in_a_long_text() -> None:
    far = [cost + 1920 * 1e-6 * n for n, cost in enumerate(OURS)]
    curve = PassCosts(CostCurve((tuple(OURS[1:]), tuple(far[1:])), 0.005))
    first, later = curve.read(512, 0), curve.read(512, 8192)
    assert later - first == pytest.approx(512 * 8192 * 1e-6, rel=0.05)
    assert curve.read(2048, 0) == pytest.approx(2048 * 0.005, rel=0.02), "as it was measured"
    for _ in range(30):
        curve.observe_read(512, 8192, later)
    assert curve.read(512, 0) == pytest.approx(first), "a long text says nothing new of short ones"
    curve.observe_read(512, 8192, 2 * later)
    assert first < curve.read(512, 0) < 2 * first


def test_a_table_of_costs_does_not_depend_on_who_asked_first() -> None:
    """Neither on the context within a span, nor on how many passes were timed when it was first asked for."""
    asked, unasked = (PassCosts(guessed_curve(1 << 30, own_kernels=True)) for _ in range(2))
    for i, n_past in enumerate((600, 1000, 703, 580, 100, 640, 3000)):
        asked.at(n_past)
        for curve in (asked, unasked):
            curve.observe(1 + i % 3, n_past, 0.03 + 0.01 * i)
        if i % 2:
            unasked.at(699)
    for n_past in (577, 703, 3000, 0):
        assert asked.at(n_past) == unasked.at(n_past)
