"""Requests that share passes rest from drafting where it makes them slower, and try again."""

from __future__ import annotations

import pytest

from edgespec.drafting.pace import BatchPace
from edgespec.drafting.profile import N_MAX, Clocks, CostCurve, PassCosts

PLAIN = 0.025


def batch_pace(plain: float = PLAIN) -> BatchPace:
    """That of texts whose passes take `plain` seconds, over however many tokens."""
    return BatchPace(Clocks(PassCosts(CostCurve(((plain,) * N_MAX,) * 2, plain)), None))


def n_steps_until(pace: BatchPace, *, rests: bool, gain: float, n: int = 8) -> int:
    """Count steps that make `gain` times as many tokens a second as plain ones, until it rests or wakes."""
    for i in range(1000):
        if pace.is_paused == rests:
            return i
        seconds = PLAIN if pace.is_paused else 1.5 * PLAIN / gain
        pace.learn(n, n if pace.is_paused else int(1.5 * n), seconds, 100)
    return 1000


def test_it_rests_where_drafts_are_slower_and_tries_again_ever_more_rarely() -> None:
    pace = batch_pace()
    rests = []
    for _ in range(6):
        assert n_steps_until(pace, rests=True, gain=0.94) == 16
        rests.append(n_steps_until(pace, rests=False, gain=0.94))
    assert rests == [64, 128, 256, 256, 256, 256]
    assert n_steps_until(pace, rests=True, gain=1.1) == 1000, "they pay again"
    assert n_steps_until(pace, rests=True, gain=0.9) <= 32
    assert n_steps_until(pace, rests=False, gain=0.9) == 64, "short again, as at first"


def test_what_is_far_slower_is_known_sooner() -> None:
    assert n_steps_until(batch_pace(), rests=True, gain=0.8) == 8


@pytest.mark.parametrize("gain", [0.99, 1.0, 1.5])
def test_it_goes_on_where_drafts_are_no_slower(gain: float) -> None:
    assert n_steps_until(batch_pace(), rests=True, gain=gain) == 1000


@pytest.mark.parametrize(
    ("n", "wakes"), [(8, False), (7, False), (10, False), (5, True), (11, True), (2, True)]
)
def test_it_tries_again_when_others_are_there(n: int, wakes: bool) -> None:
    pace = batch_pace()
    n_steps_until(pace, rests=True, gain=0.9)
    pace.learn(n, n, PLAIN, 100)
    assert pace.is_paused != wakes


def test_what_was_found_is_kept_for_as_many_requests() -> None:
    """Waves of short requests: the second one rests from its first step on, and longer than the first."""
    pace = batch_pace()
    n_steps_until(pace, rests=True, gain=0.9)
    n_steps_until(pace, rests=False, gain=0.9)
    n_steps_until(pace, rests=True, gain=0.9)
    pace.learn(2, 2, PLAIN, 100)
    assert not pace.is_paused, "of two nothing is known"
    pace.learn(7, 7, PLAIN, 100)
    assert pace.is_paused
    assert n_steps_until(pace, rests=False, gain=0.9, n=7) >= 127
    assert n_steps_until(pace, rests=True, gain=1.5, n=7) == 1000, "they pay now"
    pace.learn(2, 2, PLAIN, 100)
    pace.learn(8, 8, PLAIN, 100)
    assert not pace.is_paused


def test_what_a_plain_step_takes_beside_its_pass_is_learned_in_a_rest() -> None:
    """A small model: a step of 8 ms takes one more for all that is no pass, with drafts or without."""
    pace = batch_pace(0.008)
    n_rests = 0
    for _ in range(2000):
        began = pace.is_paused
        seconds = 0.009 if began else 1.5 * 0.009 / 1.05
        pace.learn(8, 8 if began else 12, seconds, 100)
        n_rests += pace.is_paused and not began
    assert n_rests == 1, "drafts gain 5 %, as the first rest has shown"
