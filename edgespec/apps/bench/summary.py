"""Computes the tables' numbers from raw runs: paired ratios with intervals, speeds, acceptance, joules.

Formulas and sources are in docs/measuring.md.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.runs import PLAIN, Cell, Run
from edgespec.apps.bench.suites import OVERALL
from edgespec.decoding.records import rates
from edgespec.platform.metering import Measurement, Phase

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles of the resampled medians
_DRAWN_AT_ONCE = 1 << 20  # ratios: arrays stay at 8 MiB even for hundreds of prompts
_FEWEST_ROUNDS = 3  # with fewer, a prompt's runs say nothing about noise
_FEWEST_RATIOS = 3  # the interval of two ratios would end at these two

ESTIMATED = "(estimated)"
"""The end of `VariantSummary.energy_source` if the joules are estimated."""

_Places = dict[tuple[Any, ...], Run]
"""The runs of one variant, by prompt and round."""


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
    """ "" if there is none; ends in ESTIMATED for an estimate."""
    exact: bool = True
    """Whether its texts are distributed as the target's own."""
    target_share: float = 1.0
    """Share of all tokens that the target wrote or verified."""
    agreement: float | None = None
    """Share of all tokens that are the target's likeliest at their place; None: exact, or unavailable."""
    kl: float | None = None
    """Mean KL divergence of a token's writer from the target, nats a token; None: exact, or unavailable."""

    @property
    def is_estimated(self) -> bool:
        """Whether the joules are estimated from assumed watts."""
        return self.energy_source.endswith(ESTIMATED)


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
    found = []
    for name in dict.fromkeys([*(OVERALL for _ in cell.runs[:1]), *(run.category for run in cell.runs)]):
        runs = [run for run in cell.runs if name in (OVERALL, run.category)]
        variants = _by_variant(runs)
        plain = variants.get(PLAIN, {})
        summaries = tuple(_variant(variant, list(places.values())) for variant, places in variants.items())
        compared = [_comparison(*one, plain) for one in variants.items() if one[0] != PLAIN]
        found.append(CategorySummary(name, len({run.prompt for run in runs}), summaries, tuple(compared)))
    return tuple(found)


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
        ratios = _ratios(lambda run: run.whole_tokens_per_s, places, plain)
        found = paired_interval(ratios, over_prompts=False)
        repeated = max(map(len, ratios), default=0) >= _FEWEST_ROUNDS
        if repeated and found and found.low is not None and found.high is not None:
            widths.append((found.high - found.low) / found.median)
    return max(widths, default=None)


def _by_variant(runs: Iterable[Run]) -> dict[str, _Places]:
    variants: dict[str, _Places] = {PLAIN: {}}
    for run in runs:
        variants.setdefault(run.variant, {})[run.prompt, run.round] = run
    return {variant: places for variant, places in variants.items() if places}


def _comparison(variant: str, places: _Places, plain: _Places) -> VariantComparison:
    pairs = [(run.text_sha256, plain[place].text_sha256) for place, run in places.items() if place in plain]
    compared = [(own, other) for own, other in pairs if own is not None and other is not None]
    return VariantComparison(
        variant=variant,
        speedup=paired_interval(_ratios(lambda run: run.whole_tokens_per_s, places, plain)),
        decode_speedup=paired_interval(_ratios(lambda run: run.decode_tokens_per_s, places, plain)),
        joules=paired_interval(_ratios(_joules_per_token, _measured(places), _measured(plain))),
        n_identical=sum(own == other for own, other in compared),
        n_compared=len(compared),
    )


def _ratios(figure: Callable[[Run], float | None], places: _Places, plain: _Places) -> list[list[float]]:
    """Return for each prompt the ratios of a figure to that of plain decoding's run of the same round."""
    ratios: dict[str, list[float]] = {}
    for place, run in places.items():
        value, base = (figure(run), figure(plain[place])) if place in plain else (None, None)
        if value and base and min(value, base) > 0:
            ratios.setdefault(run.prompt, []).append(value / base)
    return list(ratios.values())


def _joules_per_token(run: Run) -> float | None:
    return run.energy.per_token(run.tokens) if run.energy else None


def _measured(places: _Places) -> _Places:
    """Return the runs by their source of joules too, without assumed watts: these repeat the times' ratio."""
    known = ((place, run, run.energy) for place, run in places.items())
    return {(*place, one.source): run for place, run, one in known if one and not one.estimated}


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
    share = _by_token([run.target_share for run in runs], runs)
    energies = [run.energy for run in runs if run.energy and run.energy.joules is not None]
    if len(energies) < len(runs):
        energies = []  # joules and tokens must be of the same runs
    return VariantSummary(
        variant=variant,
        n_runs=len(runs),
        decode_tokens_per_s=_median(run.decode_tokens_per_s for run in runs),
        whole_tokens_per_s=_median(run.whole_tokens_per_s for run in runs),
        ttft_s=_median(run.ttft_s for run in runs),
        tau=sum(run.n_emitted or 0 for run in counted) / found.steps if found.steps else None,
        alpha=found.alpha,
        acceptance_by_position=found.acceptance_by_position,
        time_shares=_shares([_times(run) for run in runs]),
        joules_per_token=_per_token([energy.joules for energy in energies], runs),
        net_joules_per_token=_per_token([energy.net_joules for energy in energies], runs),
        joule_shares=_shares([energy.phases for energy in energies]),
        joule_seconds=_median(energy.joule_seconds for energy in energies),
        energy_source=_source(energies),
        exact=all(run.exact for run in runs),
        target_share=1.0 if share is None else share,
        agreement=_by_token([run.agreement for run in runs], runs),
        kl=_by_token([run.kl for run in runs], runs),
    )


def _per_token(figures: Sequence[float | None], runs: Sequence[Run]) -> float | None:
    """Return the sum of the runs' figures over their tokens; None if a run has none."""
    known, n_tokens = [figure for figure in figures if figure is not None], sum(run.tokens for run in runs)
    return sum(known) / n_tokens if len(known) == len(runs) and n_tokens else None


def _by_token(figures: Sequence[float | None], runs: Sequence[Run]) -> float | None:
    """Return the mean over all tokens of the figures that runs have."""
    pairs = [(figure, run) for figure, run in zip(figures, runs, strict=True) if figure is not None]
    return _per_token([figure * run.tokens for figure, run in pairs], [run for _, run in pairs])


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def _times(run: Run) -> dict[str, float | None]:
    drafting = None if run.draft_s is None else run.draft_s + (run.draft_prefill_s or 0.0)
    return {"prefill": run.prefill_s, "draft": drafting, "verify": run.verify_s, "rest": run.rest_s}


def _shares(parts: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the shares of the phases that all runs report; {} if that is a single one, or a run has none."""
    sums: dict[str, float] = {}
    for phase in get_args(Phase):
        found = [part.get(phase, 0.0) for part in parts]
        if all(parts) and any(phase in part for part in parts) and None not in found:
            sums[phase] = sum(figure or 0.0 for figure in found)
    total = sum(sums.values())
    return {phase: one / total for phase, one in sums.items()} if len(sums) > 1 and total > 0 else {}


def _source(energies: Sequence[Measurement]) -> str:
    sources = list(dict.fromkeys(energy.source for energy in energies))
    named = f"mixed: {', '.join(sources)}" if len(sources) > 1 else "".join(sources)
    return f"{named} {ESTIMATED}" if any(energy.estimated for energy in energies) else named
