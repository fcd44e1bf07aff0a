"""Statistics come from one acceptance histogram; each rate under its own name."""

import pytest

from edgespec.decoding.records import Stats, Step, Tally, summarise


def step(n_drafted, n_accepted, n_tokens=None, depth=None):
    tokens = tuple(range(n_accepted + 1 if n_tokens is None else n_tokens))
    depth = n_drafted if depth is None else depth
    return Step(tokens, n_drafted, range(n_accepted), depth, draft_s=0.1, verify_s=0.3, rest_s=0.0)


def stats_of(*steps, n_tokens=10, ttft_s=0.5, total_s=2.5) -> Stats:
    tally = Tally(prefill_s=0.4, draft_prefill_s=0.1)
    for one in steps:
        tally.add(one)
    return summarise(tally, n_prompt=20, n_tokens=n_tokens, ttft_s=ttft_s, total_s=total_s, peak_rss_bytes=1)


def test_rates():
    stats = stats_of(step(4, 4), step(4, 1), step(2, 0))
    assert stats.steps == 3
    assert stats.tau == pytest.approx((5 + 2 + 1) / 3)
    assert stats.n_drafted == 10
    assert stats.n_accepted == 5
    assert stats.draft_acceptance_rate == pytest.approx(5 / 10)
    # Tested: 4 in the first step, 2 in the second (one accepted, one rejected), 1 in the third.
    assert stats.alpha == pytest.approx(5 / 7)
    assert stats.acceptance_by_position == pytest.approx((2 / 3, 1 / 3, 1 / 2, 1 / 2))
    assert stats.prompt_tokens_per_s == pytest.approx(50)
    assert stats.generation_tokens_per_s == pytest.approx(9 / 2)
    assert stats.time_shares == pytest.approx({"draft": 0.25, "verify": 0.75, "rest": 0.0})


def test_rates_of_trees():
    """Of siblings one at most is accepted; a position is tested once however many stand there."""
    stats = stats_of(step(5, 2, depth=2), step(5, 1, depth=3))
    assert (stats.n_drafted, stats.n_accepted) == (10, 3)
    assert stats.draft_acceptance_rate == pytest.approx(3 / 10)
    assert stats.alpha == pytest.approx(3 / 4)  # the first step's path ended with its branch: two tested
    assert stats.acceptance_by_position == pytest.approx((1, 1 / 2, 0))


def test_nothing_to_divide_by():
    stats = stats_of(n_tokens=0, ttft_s=None)
    assert (stats.tau, stats.alpha, stats.draft_acceptance_rate, stats.generation_tokens_per_s) == (None,) * 4
    assert stats.time_shares == {}
    assert stats_of(step(0, 0)).alpha is None


def test_origins():
    assert step(0, 0).origins == ("target",)
    assert step(3, 1).origins == ("accepted", "resampled")
    assert step(4, 2, depth=2).origins == ("accepted", "accepted", "bonus")  # a branch, to its end
    assert step(2, 2).origins == ("accepted", "accepted", "bonus")
    assert step(2, 2, n_tokens=2).origins == ("accepted", "accepted")  # the draft ended the answer
