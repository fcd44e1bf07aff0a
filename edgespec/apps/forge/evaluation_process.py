"""What is measured of one draft: prompts are answered with the draft and without, in turns.

timing     plain, and 4 tokens drafted at each step; greedy. The pair's profile learns from it
round n    plain, and "auto" as users get it; greedy, then at 0.8
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.apps.bench.measure import BenchSettings, CellTask
from edgespec.apps.bench.runs import PLAIN, Run
from edgespec.apps.bench.variants import Variant
from edgespec.decoding.choices import DrafterName
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.models.suites import Prompt

GREEDY, SAMPLED = 0.0, 0.8

DRAFTING = "auto"
"""The variant that is compared with plain decoding: the default."""

N_PROMPTS = 6

_TIMED = Variant("model", "model", 4)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Length and conditions of an evaluation."""

    n_predict: int = 64
    rounds: int = 3
    n_prompts: int = N_PROMPTS
    n_threads: int | None = None
    kernels: KernelsChoice = "auto"


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """Part of an evaluation, run in one process."""

    target: str
    draft: str | None
    """None: no draft model, only text seen before."""
    prompts: tuple[Prompt, ...]
    settings: EvaluationSettings
    round: int | None
    """None: the timing. Runs at SAMPLED are numbered after all greedy rounds."""

    @property
    def n_runs(self) -> int:
        """Most runs that this takes."""
        return (2 if self.round is None else 4) * len(self.prompts)

    def runs(self, on_run: Callable[[Run], None]) -> tuple[Run, ...]:
        """Measure in a new process, and call `on_run` with each run at once. Raises EdgespecError."""
        settings = self.settings
        drafter: DrafterName = "auto" if self.draft else "suffix"
        greedy = BenchSettings((_TIMED,), settings.n_predict, GREEDY, learns=True)
        sittings = [(greedy, 0)]
        if self.round is not None:
            drafting = replace(greedy, variants=(Variant(DRAFTING, drafter),), learns=False)
            sampled = replace(drafting, temperature=SAMPLED)
            sittings = [(drafting, self.round), (sampled, self.round + settings.rounds)]
        task = CellTask(
            self.target,
            self.draft,
            drafter,
            settings.kernels,
            settings.n_threads,
            self.prompts,
            tuple(sittings),
            leaves_out=True,
        )
        return task.measure(on_run).runs


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Cost and acceptance of a draft that drafts 4 tokens at each step, greedily."""

    cost_ratio: float
    """c: seconds of a drafted token, catching up included, over seconds of a plain token."""
    acceptance: tuple[float, ...]
    """Share accepted at position 1, at position 2 given that the first was, ..."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> DraftTiming:
        """Compute the timing from its runs. Raises EdgespecError if nothing was drafted."""
        plain = [
            run.verify_s / run.n_emitted
            for run in runs
            if run.variant == PLAIN and run.verify_s and run.n_emitted
        ]
        drafted = [run for run in runs if run.variant != PLAIN]
        steps: Counter[tuple[int, int]] = Counter()
        for run in drafted:
            for length, accepted, count in run.histogram or ():
                steps[length, accepted] += count
        n_drafted = sum(length * count for (length, _), count in steps.items())
        if not plain or not n_drafted:
            raise EdgespecError("it drafted nothing, so its pass cannot be timed")
        draft_s = sum(run.draft_s or 0.0 for run in drafted)
        return cls(max(draft_s / n_drafted / statistics.median(plain), 1e-6), _acceptance(steps))


def _acceptance(steps: Counter[tuple[int, int]]) -> tuple[float, ...]:
    found = []
    for i in range(max(length for length, _ in steps)):
        tested = sum(n for (length, accepted), n in steps.items() if length > i and accepted >= i)
        if not tested:
            break
        found.append(sum(n for (length, accepted), n in steps.items() if length > i < accepted) / tested)
    return tuple(found)
