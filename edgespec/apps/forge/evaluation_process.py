"""The process that evaluates one draft: it answers prompts with the draft and without, in turns.

timing     plain, and 4 tokens drafted at each step; greedy. The pair's profile learns from it
round n    plain, and "auto" as users get it; greedy, then at 0.8
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from edgespec.apps.bench.bench import run_of, unfit
from edgespec.apps.bench.runs import PLAIN, Run, rotated
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.models.suites import Prompt
from edgespec.platform.child import REFUSED, ReportingChild, answer, say

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

    def runs(self) -> Iterator[Run]:
        """Start the process and yield its runs as they end. Raises EdgespecError if it fails."""
        child = ReportingChild("edgespec.apps.forge.evaluation_process", "_in_child", self)
        for kind, value in child:
            if kind == "run":
                yield msgspec.convert(value, Run)
        ended = child.ended
        if ended.code == REFUSED:
            raise EdgespecError(ended.complaint)
        if ended.code != 0:
            why = ended.complaint or "it may have run out of memory"
            raise EdgespecError(f"its process ended with code {ended.code}: {why}")


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


# ---- in the process ----


def _in_child() -> int:
    return answer(EvaluationTask, _run)


def _run(task: EvaluationTask) -> None:
    settings = task.settings
    with Engine(
        task.target,
        task.draft,
        drafter="auto" if task.draft else "suffix",
        n_threads=settings.n_threads,
        kernels=settings.kernels,
    ) as engine:
        if task.draft and engine.draft is None:
            raise EdgespecError("one of the models cannot take tokens back: nothing is drafted")
        if task.round is None:
            _answer_all(engine, task, _TIMED, GREEDY, 0)
            return
        drafting = Variant(DRAFTING, "auto" if task.draft else "suffix")
        _answer_all(engine, task, drafting, GREEDY, task.round)
        _answer_all(engine, task, drafting, SAMPLED, task.round + settings.rounds)
        engine.forget(tables=True)  # the profile must not learn these prompts


def _answer_all(
    engine: Engine, task: EvaluationTask, drafting: Variant, temperature: float, round_: int
) -> None:
    """Answer each prompt plainly and drafting, in turns, and report the runs."""
    n_predict, variants = task.settings.n_predict, (PLAIN_VARIANT, drafting)
    too_long = unfit(engine, task.prompts, n_predict)
    prompts = [prompt for prompt in task.prompts if prompt.id not in too_long]
    if not prompts:
        n_ctx = engine.target.n_ctx_train
        raise EdgespecError(f"no prompt with {n_predict} tokens of answer fits in a context of {n_ctx}")

    def generate(prompt: Prompt, variant: Variant) -> Run:
        engine.forget(tables=task.round is not None)
        result = engine.generate(
            prompt.tokens or prompt.text,
            params=SamplingParams(temperature=temperature),
            seed=round_,
            n_predict=n_predict,
            drafter=variant.chosen,
            gamma=variant.gamma,
        )
        return run_of(result, prompt, variant.name, round_)

    longest = max(prompts, key=lambda one: len(one.tokens) or len(one.text))
    for variant in variants:
        generate(longest, variant)  # warm-up: contexts grow, weights are read
    for place, prompt in enumerate(prompts):
        for variant in rotated(variants, round_ + place):
            say("run", generate(prompt, variant))
