"""Summaries: worked out by hand, and what must hold of any runs."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.apps.bench import summary as room
from edgespec.apps.bench.runs import Cell, Run
from edgespec.apps.bench.suites import OVERALL
from edgespec.apps.bench.summary import Interval, noise, paired_interval, summarise_cell
from edgespec.platform.metering import Measurement


def run(variant: str, total_s: float, **changes: Any) -> Run:
    """A run of 10 tokens, the first of them after a second."""
    figures: dict[str, Any] = {
        **{"prompt": "p", "category": "code", "round": 0, "prompt_tokens": 5, "tokens": 10},
        **{"ttft_s": 1.0, "prefill_s": 0.9},
    }
    return Run(variant=variant, total_s=total_s, **figures | changes)


def joules(value: float | None, *, source: str = "RAPL", **more: Any) -> Measurement:
    return Measurement(seconds=2.0, joules=value, source=source, reason="" if value else "no counter", **more)


def summarised(*runs: Run, category: str = OVERALL) -> room.CategorySummary:
    cell = Cell(target="target", draft=None, kernels="stock", runs=runs)
    return {found.category: found for found in summarise_cell(cell)}[category]


def comparison(*runs: Run) -> room.VariantComparison:
    (found,) = summarised(*runs).comparisons
    return found


def of_variant(*runs: Run) -> room.VariantSummary:
    (found,) = summarised(*runs).variants
    return found


# ---- paired ratios ----


def test_ratios_by_hand():
    found = comparison(run("plain", 10.0), run("auto", 5.5, tokens=11))
    assert found.speedup == Interval(pytest.approx((10 / 10) / (5.5 / 11)), None, None, 1, 1)
    # 9 tokens in 9 s after the first one; 10 in 4.5 s.
    assert found.decode_speedup == Interval(pytest.approx((9 / 9) / (4.5 / 10)), None, None, 1, 1)
    assert found.joules is None


def test_runs_are_paired_by_prompt_and_round():
    runs = []
    for prompt, slowness in (("a", 1.0), ("b", 7.0)):
        for round_, drift in enumerate((1.0, 3.0, 2.0)):
            place = {"prompt": prompt, "round": round_}
            runs += [
                run("plain", 4.0 * slowness * drift, ttft_s=None, **place),
                run("auto", 2.0 * slowness * drift, ttft_s=None, **place),
            ]
    runs.append(run("auto", 99.0, prompt="c"))  # plain did not get there
    found = comparison(*runs)
    assert found.speedup == Interval(2.0, 2.0, 2.0, 6, 2)
    assert found.decode_speedup is None, "without the time of the first token"


def test_joule_ratios():
    plain, auto = run("plain", 10.0, energy=joules(40.0)), run("auto", 5.0, tokens=11, energy=joules(33.0))
    assert comparison(plain, auto).joules == Interval(pytest.approx((33 / 11) / (40 / 10)), None, None, 1, 1)
    for energy in (
        None,
        joules(None),
        joules(0.0),
        joules(33.0, source="battery BAT0"),
        joules(33.0, estimated=True),
    ):
        assert comparison(plain, replace(auto, energy=energy)).joules is None
    estimated = joules(33.0, source="15 W assumed", estimated=True)
    assert comparison(replace(plain, energy=estimated), replace(auto, energy=estimated)).joules is None


def test_identical_texts():
    def texts(variant: str, *hashes: str | None) -> list[Run]:
        return [run(variant, 1.0, round=i, text_sha256=text) for i, text in enumerate(hashes)]

    found = comparison(*texts("plain", "a", "b", "c", None), *texts("auto", "a", "x", None, "d", "e"))
    assert (found.n_identical, found.n_compared) == (1, 2)


# ---- intervals ----


def test_interval_of_rounds_by_hand():
    """Of three rounds, drawn anew, two or three are the lowest one in 7 of 27 cases, or the highest."""
    assert paired_interval([[1.0, 2.0, 3.0]]) == Interval(2.0, 1.0, 3.0, 3, 1)
    assert paired_interval([[1.0, 2.0, 3.0]], over_prompts=False) == Interval(2.0, 1.0, 3.0, 3, 1)


def test_interval_over_prompts_by_hand():
    """Of two prompts, one is drawn twice in half of the cases; the rounds of each are alike."""
    groups = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    assert paired_interval(groups) == Interval(1.5, 1.0, 2.0, 6, 2)
    assert paired_interval(groups, over_prompts=False) == Interval(1.5, 1.5, 1.5, 6, 2)


def test_nothing_is_repeated():
    assert paired_interval([]) is None
    assert paired_interval([[], []]) is None
    assert paired_interval([[1.5]]) == Interval(1.5, None, None, 1, 1)
    assert paired_interval([[], [1.5]]) == Interval(1.5, None, None, 1, 1)
    assert paired_interval([[1.0], [2.0]], over_prompts=False) == Interval(1.5, None, None, 2, 2)
    assert paired_interval([[1.0], [2.0]]) == Interval(1.5, None, None, 2, 2), "the two alone"


def plainly_resampled(groups: list[list[float]], *, over_prompts: bool) -> tuple[float, float]:
    """The same bootstrap, slowly and with other coins."""
    coins = random.Random(7)
    medians = []
    for _ in range(4000):
        drawn = coins.choices(groups, k=len(groups)) if over_prompts else groups
        medians.append(statistics.median([x for group in drawn for x in coins.choices(group, k=len(group))]))
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


@pytest.mark.parametrize("over_prompts", [True, False])
def test_as_a_plain_bootstrap(over_prompts):
    coins = random.Random(1)
    groups = [[coins.gauss(2.0 + i / 10, 0.2) for _ in range(2 + i % 4)] for i in range(12)]
    found = paired_interval(groups, over_prompts=over_prompts)
    low, high = plainly_resampled(groups, over_prompts=over_prompts)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.04)
    assert high - low > 0.12, "the tolerance says something"


_RATIOS = st.lists(st.lists(st.floats(0.1, 10.0), max_size=5), max_size=6)


@settings(max_examples=50, deadline=None)
@given(_RATIOS, st.randoms(use_true_random=False), st.booleans())
def test_any_order_gives_the_same_interval(groups, shuffler, over_prompts):
    found = paired_interval(groups, over_prompts=over_prompts)
    shuffled = [shuffler.sample(group, len(group)) for group in shuffler.sample(groups, len(groups))]
    assert paired_interval(shuffled, over_prompts=over_prompts) == found
    every = [ratio for group in groups for ratio in group]
    if found is None:
        assert not every
        return
    assert (found.n_ratios, found.n_prompts) == (len(every), sum(map(bool, groups)))
    assert found.median == statistics.median(every)
    if found.low is not None and found.high is not None:
        assert min(every) <= found.low <= found.median <= found.high <= max(every)


def covered(over_prompts: bool, n_prompts: int, n_rounds: int, repetitions: int = 200) -> int:
    """How often the interval of a made-up benchmark holds the true median, 2.0."""
    coins = np.random.default_rng(5)
    n_held = 0
    for _ in range(repetitions):
        prompts = 2.0 * np.exp(coins.normal(0.0, 0.3 if over_prompts else 0.0, n_prompts))
        ratios = prompts[:, None] * np.exp(coins.normal(0.0, 0.1, (n_prompts, n_rounds)))
        found = paired_interval(ratios.tolist(), over_prompts=over_prompts)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        n_held += found.low <= 2.0 <= found.high
    return n_held


@pytest.mark.parametrize(
    ("over_prompts", "n_prompts", "n_rounds"), [(True, 21, 3), (True, 8, 5), (False, 7, 5)]
)
def test_coverage(over_prompts, n_prompts, n_rounds):
    assert 176 <= covered(over_prompts, n_prompts, n_rounds) <= 200


# ---- one variant ----


def test_speeds_are_medians_over_runs():
    found = of_variant(
        run("auto", 2.0, ttft_s=1.0),
        run("auto", 4.0, ttft_s=2.0, round=1),
        run("auto", 10.0, ttft_s=None, round=2),
        run("auto", 10.0, ttft_s=3.0, tokens=0, round=3),
    )
    assert found.n_runs == 4
    assert found.whole_tokens_per_s == statistics.median([5.0, 2.5, 1.0])
    assert found.decode_tokens_per_s == statistics.median([9.0, 4.5])
    assert found.ttft_s == 2.0


def test_acceptance_is_pooled():
    first = run("model", 1.0, n_emitted=9, histogram=((0, 0, 1), (2, 2, 2), (2, 0, 2)))
    second = run("model", 1.0, round=1, n_emitted=4, histogram=((4, 1, 1), (2, 1, 1)))
    peer = run("model", 1.0, round=2)
    found = of_variant(first, second, peer)
    assert found.tau == pytest.approx((9 + 4) / 7)
    # Tested: 2 of both full steps, 1 of both rejected at once, then 2 and 2.
    assert found.alpha == pytest.approx((4 + 0 + 1 + 1) / (4 + 2 + 2 + 2))
    assert found.acceptance_by_position == pytest.approx((4 / 6, 2 / 6, 0.0, 0.0))
    plain = of_variant(run("plain", 1.0, n_emitted=9, histogram=((0, 0, 9),)))
    assert (plain.tau, plain.alpha, plain.acceptance_by_position) == (1.0, None, ())
    unknown = of_variant(peer)
    assert (unknown.tau, unknown.alpha, unknown.acceptance_by_position) == (None, None, ())


def test_time_shares():
    times = {"prefill_s": 1.0, "draft_prefill_s": 0.5, "draft_s": 0.5, "verify_s": 2.0, "rest_s": 0.0}
    found = of_variant(run("model", 4.0, **times), run("model", 4.0, round=1, **times | {"verify_s": 6.0}))
    assert list(found.time_shares) == ["prefill", "draft", "verify", "rest"]
    assert found.time_shares == {"prefill": 2 / 12, "draft": 2 / 12, "verify": 8 / 12, "rest": 0.0}
    peer = {"prefill_s": 1.0, "draft_s": 1.0, "verify_s": 2.0}
    assert of_variant(run("peer", 4.0, **peer)).time_shares == {"prefill": 0.25, "draft": 0.25, "verify": 0.5}
    assert of_variant(run("peer", 4.0)).time_shares == {}, "of a single part, the share says nothing"
    assert of_variant(run("peer", 4.0, prefill_s=None)).time_shares == {}


def test_joules_are_pooled():
    one = joules(30.0, idle_w=5.0, phases={"prefill": 10.0, "verify": 20.0})
    two = joules(50.0, idle_w=5.0, phases={"prefill": 10.0, "draft": 10.0, "verify": 30.0})
    found = of_variant(run("auto", 2.0, tokens=5, energy=one), run("auto", 2.0, round=1, energy=two))
    assert found.joules_per_token == pytest.approx(80 / 15)
    assert found.net_joules_per_token == pytest.approx((20 + 40) / 15)
    assert list(found.joule_shares.items()) == [("prefill", 0.25), ("draft", 0.125), ("verify", 0.625)]
    assert found.joule_seconds == statistics.median([60.0, 100.0])
    assert found.energy_source == "RAPL"


def test_energy_sources():
    def source(*energies: Measurement) -> str:
        return of_variant(
            *(run("auto", 2.0, round=i, energy=one) for i, one in enumerate(energies))
        ).energy_source

    assumed = joules(30.0, source="15 W assumed", estimated=True)
    assert source(assumed, assumed) == "15 W assumed (estimated)"
    assert source(joules(30.0), joules(30.0, source="battery BAT0")) == "mixed: RAPL, battery BAT0"
    assert source(joules(30.0), assumed) == "mixed: RAPL, 15 W assumed (estimated)"


# ---- cells ----


def test_categories_and_variants():
    runs = (
        run("auto", 5.0, category="poem", prompt="1"),
        run("plain", 10.0, category="poem", prompt="1"),
        run("plain", 10.0, category="code", prompt="2"),
        run("model-3", 10.0, category="code", prompt="2"),
        run("auto", 2.0, category="code", prompt="2"),
    )
    found = summarise_cell(Cell(target="t", draft=None, kernels="stock", runs=runs))
    assert [one.category for one in found] == [OVERALL, "poem", "code"]
    assert [one.n_prompts for one in found] == [2, 1, 1]
    assert [[variant.variant for variant in one.variants] for one in found] == [
        *(["plain", "auto", "model-3"], ["plain", "auto"], ["plain", "model-3", "auto"])
    ]
    medians = [
        {one.variant: one.speedup and one.speedup.median for one in part.comparisons} for part in found
    ]
    assert medians == [{"auto": 3.5, "model-3": 1.0}, {"auto": 2.0}, {"model-3": 1.0, "auto": 5.0}]


@st.composite
def benchmarks(draw: st.DrawFn) -> list[Run]:
    """Runs of two variants; some are missing, and some prompts have more rounds."""
    runs = []
    for prompt in range(draw(st.integers(1, 4))):
        for round_ in range(draw(st.integers(1, 4))):
            for variant in ("plain", "auto"):
                if draw(st.integers(0, 9)):
                    seconds, tokens = draw(st.floats(0.5, 50.0)), draw(st.integers(0, 20))
                    place = {"prompt": str(prompt), "category": "ab"[prompt % 2], "round": round_}
                    runs.append(run(variant, seconds + 0.1, ttft_s=0.1, tokens=tokens, **place))
    return runs


def by_category(runs: list[Run]) -> dict[str, Any]:
    found = summarise_cell(Cell(target="t", draft=None, kernels="stock", runs=tuple(runs)))
    return {
        one.category: (one.n_prompts, {variant.variant: variant for variant in one.variants}, one.comparisons)
        for one in found
    }


@settings(max_examples=40, deadline=None)
@given(benchmarks(), st.randoms(use_true_random=False))
def test_order_of_the_runs_says_nothing(runs, shuffler):
    assert by_category(shuffler.sample(runs, len(runs))) == by_category(runs)
    assert noise(shuffler.sample(runs, len(runs))) == noise(runs)


@settings(max_examples=40, deadline=None)
@given(benchmarks(), st.sampled_from([0.25, 0.5, 2.0, 3.0]))
def test_slower_by_a_factor(runs, factor):
    """A variant that takes `factor` times as long has 1/factor of the speed-up, its interval as well."""

    def speedups(runs: list[Run]) -> list[Interval]:
        found = [one for _, _, comparisons in by_category(runs).values() for one in comparisons]
        return [interval for one in found for interval in (one.speedup, one.decode_speedup) if interval]

    slower = [
        replace(one, total_s=one.total_s * factor, ttft_s=0.1 * factor) if one.variant == "auto" else one
        for one in runs
    ]
    before, after = speedups(runs), speedups(slower)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert other.median == pytest.approx(one.median / factor)
        if one.low is not None and one.high is not None:
            assert (other.low, other.high) == pytest.approx((one.low / factor, one.high / factor))


# ---- noise ----


def rounds(variant: str, *seconds: float, prompt: str = "p") -> list[Run]:
    return [run(variant, one, round=i, prompt=prompt) for i, one in enumerate(seconds)]


def test_noise():
    plain = rounds("plain", 4.0, 4.0, 4.0)
    assert noise([*plain, *rounds("auto", 2.0, 2.0, 2.0)]) == 0.0
    noisy = rounds("model", 1.0, 2.0, 4.0)  # speed-ups of 4, 2 and 1
    assert noise([*plain, *rounds("auto", 2.0, 2.0, 2.0), *noisy]) == pytest.approx((4 - 1) / 2), "the worst"
    # Prompts that differ are no noise.
    others = [*rounds("plain", 4.0, 4.0, prompt="q"), *rounds("auto", 0.5, 0.5, prompt="q")]
    assert noise([*plain, *rounds("auto", 2.0, 2.0, 2.0), *others]) == 0.0
