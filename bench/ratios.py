"""Compares the variants of a benchmark: by prompt, by category, over all.

Ratios are taken within a round (`summary.compare`). A prompt's ratio is the median over its rounds, a
category's the geometric mean over its prompts, and the overall one the geometric mean over the categories.
The package's own summaries are printed too, with the interval of docs/measuring.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

from edgespec.apps.bench.runs import PLAIN, Cell, Run
from edgespec.apps.bench.suites import OVERALL
from edgespec.apps.bench.summary import CategorySummary, Interval, VariantComparison, compare, summarise_cell


class Ratios:
    """Some runs, and the ratios between their variants."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        summaries = summarise_cell(Cell("", None, "", tuple(runs)))
        self.summaries: dict[str, CategorySummary] = {found.category: found for found in summaries}
        self.categories = [name for name in self.summaries if name != OVERALL]
        self.variants = [variant.variant for variant in summaries[0].variants] if summaries else []
        self._compared = cache(self._compare)

    def beside(self, name: str, base: str = PLAIN, category: str = OVERALL) -> VariantComparison:
        """Return a variant beside another one in a category."""
        return compare((run for run in self._runs if category in (run.category, OVERALL)), name, base)

    def prompts(self, category: str) -> list[str]:
        """Return the ids of a category's prompts."""
        return list(dict.fromkeys(run.prompt for run in self._runs if run.category == category))

    def of_prompt(self, prompt: str, name: str, base: str = PLAIN, *, decoding: bool = False) -> float | None:
        """Return the ratio of a prompt, of whole generations or of `decoding` alone, or None."""
        found = self._compared(prompt, name, base)
        interval = found.decode_speedup if decoding else found.speedup
        return interval.median if interval else None

    def ratio(
        self, name: str, base: str = PLAIN, category: str = OVERALL, *, decoding: bool = False
    ) -> float | None:
        """Return the ratio of a category, or over all; None where there is none."""
        if category == OVERALL:
            found = [self.ratio(name, base, one, decoding=decoding) for one in self.categories]
        else:
            prompts = self.prompts(category)
            found = [self.of_prompt(prompt, name, base, decoding=decoding) for prompt in prompts]
        known = [ratio for ratio in found if ratio is not None]
        return statistics.geometric_mean(known) if known else None

    def _compare(self, prompt: str, name: str, base: str) -> VariantComparison:
        return compare((run for run in self._runs if run.prompt == prompt), name, base)


def worst(ratios: Ratios, name: str, n: int) -> list[tuple[float, str, str]]:
    """Return ratio, category and prompt where a variant was slowest beside plain, the slowest first."""
    found = [
        (ratio, category, prompt)
        for category in ratios.categories
        for prompt in ratios.prompts(category)
        if (ratio := ratios.of_prompt(prompt, name)) is not None
    ]
    return sorted(found)[:n]


def interval(ratios: Ratios, name: str, base: str, category: str) -> str:
    """Return the 95 % interval of a category's median for a column."""
    found = ratios.beside(name, base, category).speedup
    return f"{found.low:.2f}-{found.high:.2f}" if found and found.low and found.high else "-"


def plain_speed(ratios: Ratios, category: str) -> float | None:
    """Return plain decoding's tokens a second of whole generations."""
    return ratios.summaries[category].variants[0].whole_tokens_per_s


def shown_interval(found: Interval | None) -> str:
    """Return a median, with its interval where there is one."""
    if found is None:
        return "-"
    known = found.low is not None and found.high is not None
    return f"{found.median:.3f}" + (f" ({found.low:.3f} - {found.high:.3f})" if known else "")


def shown(value: float | None, width: int = 8) -> str:
    """Return a ratio or a speed for a column."""
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"
