"""Computes the tables' numbers from raw runs: paired ratios with intervals, speeds, acceptance, joules.

Formulas and sources are in docs/measuring.md.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.runs import PLAIN, Cell, Run
from edgespec.decoding.records import rates
from edgespec.models.suites import OVERALL
from edgespec.platform.metering import Measurement, Phase

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles of the resampled medians
_DRAWN_AT_ONCE = 1 << 20  # ratios: arrays stay at 8 MiB even for hundreds of prompts
_PARTS = get_args(Phase)
_FEWEST_ROUNDS = 3  # with fewer, a prompt's runs say nothing about noise
_FEWEST_RATIOS = 3  # the interval of two ratios would end at these two

_T = TypeVar("_T", float, None)

_Places = dict[tuple[str, int], Run]
"""The runs of one variant, by prompt and round."""
_Ratio = Callable[[Run, Run], float | None]
"""Compares a variant's run with the plain run of the same prompt and round; None if either lacks the
figure."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median of paired ratios with its 95 % interval."""

    median: float
    low: float | None
    """None if nothing was repeated."""
    high: float | None
    n_ratios: int
    n_prompts: int


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """The figures of one variant in one category, medians over its runs. None: unavailable."""

    variant: str
    n_runs: int
    decode_tokens_per_s: float | None
    whole_tokens_per_s: float | None
    ttft_s: float | None
    tau: float | None
    alpha: float | None
    acceptance_by_position: tuple[float, ...]
    time_shares: dict[str, float]
    """Shares of prefill, draft (its reading of the prompt included), verify, rest; {}: unavailable."""
    joules_per_token: float | None
    """Gross: all joules over all tokens."""
    net_joules_per_token: float | None
    joule_shares: dict[str, float]
    """Shares of the joules, with the keys of time_shares."""
    joule_seconds: float | None
    """Median over runs of joules times seconds, in J s."""
    energy_source: str
    """ "" if there is none; ends in "(estimated)" for an estimate."""
    exact: bool = True
    """Whether its texts are distributed as the target's own."""
    target_share: float = 1.0
    """Share of all tokens that the target wrote or judged."""
    agreement: float | None = None
    """Share of all tokens that are the target's likeliest at their place; None: exact, or unavailable."""
    kl: float | None = None
    """Mean KL divergence of a token's writer from the target, nats a token; None: exact, or unavailable."""


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """Speed and energy of a variant over those of plain decoding, in one category."""

    variant: str
    speedup: Interval | None
    """Plain's seconds a token over the variant's, for whole runs; above 1 is faster."""
    decode_speedup: Interval | None
    """The same for decoding alone."""
    joules: Interval | None
    """The variant's joules a token over plain's; below 1 is better."""
    n_identical: int
    n_compared: int
    """Runs whose tokens were compared with plain's of the same prompt and round."""


@dataclass(frozen=True, slots=True)
class CategorySummary:
    """One category of a cell, or all categories together (OVERALL)."""

    category: str
    n_prompts: int
    variants: tuple[VariantSummary, ...]
    """Plain first."""
    comparisons: tuple[VariantComparison, ...]
    """Each variant but plain."""

    def comparison(self, variant: str) -> VariantComparison | None:
        """Return a variant compared with plain decoding; None for plain."""
        return next((one for one in self.comparisons if one.variant == variant), None)


def summarise_cell(cell: Cell) -> tuple[CategorySummary, ...]:
    """Return OVERALL first, then each category in the order of the runs; () for a cell without runs."""
    if not cell.runs:
        return ()
    names = dict.fromkeys(run.category for run in cell.runs)
    parts = [(name, [run for run in cell.runs if run.category == name]) for name in names]
    return tuple(_category(name, runs) for name, runs in [(OVERALL, cell.runs), *parts])


def compare(runs: Iterable[Run], variant: str, base: str = PLAIN) -> VariantComparison:
    """Return `variant` compared with `base` over the prompts and rounds of `runs` that have both."""
    variants = _by_variant(runs)
    return _comparison(variant, variants.get(variant, {}), variants.get(base, {}))


def paired_interval(ratios: Sequence[Sequence[float]], *, over_prompts: bool = True) -> Interval | None:
    """Return the median of all ratios with its 95 % interval; element i holds the ratios of prompt i.

    `over_prompts`: each resampling draws prompts and rounds; otherwise, and if there is only one prompt, it
    draws rounds only. None without ratios; low and high are None if nothing was repeated, or with fewer
    than three ratios. The order of the ratios does not matter.

    The percentile bootstrap of Efron and Tibshirani 1993 (chapter 13), hierarchical as in Davison and
    Hinkley 1997 (section 3.8): prompts are drawn with replacement, then rounds within each drawn prompt.
    """
    groups = sorted(sorted(rounds) for rounds in ratios if rounds)
    if not groups:
        return None
    every = [ratio for group in groups for ratio in group]
    low = high = None
    medians = _resampled(groups, over_prompts=over_prompts and len(groups) > 1)
    if medians is not None and len(every) >= _FEWEST_RATIOS:
        low, high = np.percentile(medians, _INTERVAL).tolist()
    return Interval(statistics.median(every), low, high, len(every), len(groups))


def noise(runs: Sequence[Run]) -> float | None:
    """Return the width of the overall speed-up's interval over rounds alone, as a share of its median.

    The widest of all variants counts; None while no prompt was repeated three times.
    """
    variants = _by_variant(runs)
    plain = variants.pop(PLAIN, {})
    widths = []
    for places in variants.values():
        ratios = _ratios(_speedup, places, plain)
        if max(map(len, ratios), default=0) >= _FEWEST_ROUNDS:
            found = paired_interval(ratios, over_prompts=False)
            if found and found.low is not None and found.high is not None:
                widths.append((found.high - found.low) / found.median)
    return max(widths, default=None)


def _category(name: str, runs: Sequence[Run]) -> CategorySummary:
    variants = _by_variant(runs)
    plain = variants.get(PLAIN, {})
    return CategorySummary(
        category=name,
        n_prompts=len({run.prompt for run in runs}),
        variants=tuple(_variant(variant, list(places.values())) for variant, places in variants.items()),
        comparisons=tuple(
            _comparison(variant, places, plain) for variant, places in variants.items() if variant != PLAIN
        ),
    )


def _by_variant(runs: Iterable[Run]) -> dict[str, _Places]:
    variants: dict[str, _Places] = {PLAIN: {}}
    for run in runs:
        variants.setdefault(run.variant, {})[run.prompt, run.round] = run
    return {variant: places for variant, places in variants.items() if places}


# ---- a variant compared with plain ----


def _comparison(variant: str, places: _Places, plain: _Places) -> VariantComparison:
    pairs = [(run.text_sha256, plain[place].text_sha256) for place, run in places.items() if place in plain]
    compared = [(own, other) for own, other in pairs if own is not None and other is not None]
    return VariantComparison(
        variant=variant,
        speedup=paired_interval(_ratios(_speedup, places, plain)),
        decode_speedup=paired_interval(_ratios(_decode_speedup, places, plain)),
        joules=paired_interval(_ratios(_joules, places, plain)),
        n_identical=sum(own == other for own, other in compared),
        n_compared=len(compared),
    )


def _ratios(ratio: _Ratio, places: _Places, plain: _Places) -> list[list[float]]:
    found: dict[str, list[float]] = {}
    for place, run in places.items():
        value = ratio(run, plain[place]) if place in plain else None
        if value is not None:
            found.setdefault(run.prompt, []).append(value)
    return list(found.values())


def _speedup(run: Run, plain: Run) -> float | None:
    return _over(run.whole_tokens_per_s, plain.whole_tokens_per_s)


def _decode_speedup(run: Run, plain: Run) -> float | None:
    return _over(run.decode_tokens_per_s, plain.decode_tokens_per_s)


def _joules(run: Run, plain: Run) -> float | None:
    """Return the ratio if one source measured both; from assumed watts it would only repeat the times'."""
    own, other = run.energy, plain.energy
    if own is None or other is None or own.estimated or other.estimated or own.source != other.source:
        return None
    return _over(own.per_token(run.tokens), other.per_token(plain.tokens))


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base and value > 0 and base > 0 else None


def _resampled(groups: Sequence[Sequence[float]], *, over_prompts: bool) -> npt.NDArray[np.float64] | None:
    """Return the medians of `_RESAMPLES` resamplings; None if each would equal the original."""
    counts = np.array([len(group) for group in groups])
    if counts.max() == 1 and not over_prompts:
        return None
    places = np.arange(counts.max())
    # A row for each prompt, padded with infinity, which is sorted to the end and never used.
    table = np.full((len(groups), len(places)), np.inf)
    for row, group in zip(table, groups, strict=True):
        row[: len(group)] = group
    coins = np.random.Generator(np.random.PCG64(0))
    medians = []
    most = max(1, _DRAWN_AT_ONCE // table.size)
    for start in range(0, _RESAMPLES, most):
        shape = n, _ = min(most, _RESAMPLES - start), len(groups)
        rows = coins.integers(len(groups), size=shape) if over_prompts else np.arange(len(groups))
        rows = np.broadcast_to(rows, shape)[:, :, None]
        own = counts[rows]
        columns = np.where(places < own, coins.integers(own, size=(*shape, len(places))), places)
        drawn = np.sort(table[rows, columns].reshape(n, -1), axis=1)
        n_drawn = own.sum(axis=(1, 2))
        each = np.arange(n)
        medians.append((drawn[each, (n_drawn - 1) // 2] + drawn[each, n_drawn // 2]) / 2)
    return np.concatenate(medians)


# ---- one variant ----


def _variant(variant: str, runs: Sequence[Run]) -> VariantSummary:
    counted = [run for run in runs if run.histogram is not None and run.n_emitted is not None]
    steps: Counter[tuple[int, int]] = Counter()
    for run in counted:
        for drafted, accepted, count in run.histogram or ():
            steps[drafted, accepted] += count
    found = rates(steps)
    energies = _energies(runs)
    n_tokens = sum(run.tokens for run in runs)
    return VariantSummary(
        variant=variant,
        n_runs=len(runs),
        decode_tokens_per_s=_median(run.decode_tokens_per_s for run in runs),
        whole_tokens_per_s=_median(run.whole_tokens_per_s for run in runs),
        ttft_s=_median(run.ttft_s for run in runs),
        tau=sum(run.n_emitted or 0 for run in counted) / found.steps if found.steps else None,
        alpha=found.alpha,
        acceptance_by_position=found.acceptance_by_position,
        time_shares=_time_shares(runs),
        joules_per_token=_a_token([energy.joules for energy in energies], n_tokens),
        net_joules_per_token=_a_token([energy.net_joules for energy in energies], n_tokens),
        joule_shares=_shares([energy.phases for energy in energies]),
        joule_seconds=_median(energy.joule_seconds for energy in energies),
        energy_source=_source(energies),
        exact=all(run.exact for run in runs),
        target_share=_by_token((run.target_share for run in runs), runs, 1.0),
        agreement=_by_token((run.agreement for run in runs), runs, None),
        kl=_by_token((run.kl for run in runs), runs, None),
    )


def _by_token(figures: Iterable[float | None], runs: Sequence[Run], missing: _T) -> float | _T:
    """Return the mean over all tokens of the runs' figures per token; `missing` if no run has one."""
    known = [(figure, run.tokens) for figure, run in zip(figures, runs, strict=True) if figure is not None]
    n_tokens = sum(tokens for _, tokens in known)
    return sum(figure * tokens for figure, tokens in known) / n_tokens if n_tokens else missing


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def _time_shares(runs: Sequence[Run]) -> dict[str, float]:
    """Return the shares of the parts that every run has times for; {} if that is only one part."""
    every = []
    for run in runs:
        drafting = None if run.draft_s is None else run.draft_s + (run.draft_prefill_s or 0.0)
        times = {"prefill": run.prefill_s, "draft": drafting, "verify": run.verify_s, "rest": run.rest_s}
        every.append({part: seconds for part, seconds in times.items() if seconds is not None})
    known = set.intersection(*map(set, every))
    return _shares([{part: times[part] for part in known} for times in every]) if len(known) > 1 else {}


def _shares(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each part's share of the sum; {} if one element is empty."""
    sums: Counter[str] = Counter()
    for one in parts:
        if not one:
            return {}
        sums.update(one)  # Counter.update adds
    total = sums.total()
    return {part: sums[part] / total for part in _PARTS if part in sums} if total > 0 else {}


def _energies(runs: Sequence[Run]) -> list[Measurement]:
    """Return the energy of every run; [] if one run has none, since joules and tokens must match."""
    energies = [run.energy for run in runs if run.energy is not None and run.energy.joules is not None]
    return energies if len(energies) == len(runs) else []


def _a_token(joules: Sequence[float | None], n_tokens: int) -> float | None:
    known = [figure for figure in joules if figure is not None]
    return sum(known) / n_tokens if known and len(known) == len(joules) and n_tokens else None


def _source(energies: Sequence[Measurement]) -> str:
    sources = list(dict.fromkeys(energy.source for energy in energies))
    named = f"mixed: {', '.join(sources)}" if len(sources) > 1 else "".join(sources)
    return f"{named} (estimated)" if any(energy.estimated for energy in energies) else named


# ---- concurrent requests ----
