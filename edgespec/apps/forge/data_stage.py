"""First stage of `edgespec draft make`: the target writes texts that drafts are trained and evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from edgespec.apps.forge.builder import TrainingRequest
from edgespec.apps.forge.dataset import BUILT_IN, Dataset, is_held_out
from edgespec.apps.forge.evaluation_process import EvaluationPrompt
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.prompts import TextPrompt, built_in
from edgespec.apps.forge.user_texts import all_prompts, check_file
from edgespec.apps.forge.writing import TargetWriter, WritingRun, WritingSettings
from edgespec.errors import UsageError
from edgespec.llama.weights import Model
from edgespec.models.sources import format_size
from edgespec.models.suites import evenly

BUDGET = 2_000_000_000

TOKENS_PER_HOUR = 200_000
"""Tokens to write for an hour of training, which reads them about nine times.

A head still learns from the fourth time. Writing takes 40 minutes where a laptop writes 80 tokens/s.
"""

LEAST_TOKENS, MOST_TOKENS = 20_000, 1_000_000

_LEAST_BUDGET = 16_000_000  # bytes: room for a few texts of a small target
_N_BEFORE_ESTIMATE = 100  # tokens; the first passes prefill only, so they say nothing of the speed
_N_HELD_OUT = 4  # texts to evaluate training on, however few are written


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Texts that the target is to write."""

    tokens: int
    """Tokens in all, earlier runs included; with prompts of the user, tokens to add."""
    n_predict: int = WritingSettings().n_predict
    budget: int = BUDGET
    """Most bytes of texts and hidden states on disk."""
    prompts: tuple[Path, ...] = ()
    """Files of prompts and texts."""
    from_history: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range and missing files."""
        if self.tokens < 1:
            raise UsageError("must be 1 or more", field="data_tokens", value=self.tokens)
        if self.budget < _LEAST_BUDGET:
            problem = f"at least {format_size(_LEAST_BUDGET)}: a text takes about a megabyte"
            raise UsageError(problem, field="budget", value=self.budget)
        for path in self.prompts:
            check_file(path)

    def until(self, dataset: Dataset) -> int:
        """Return how many tokens the dataset is to have, at the beginning of a run."""
        own = bool(self.prompts) or self.from_history
        return self.tokens + (dataset.n_answer_tokens() if own else 0)


def default_tokens(training: TrainingRequest) -> int:
    """Return how many tokens the target writes for a training by default."""
    wanted = training.tokens // 3 if training.tokens else round((training.hours or 0.0) * TOKENS_PER_HOUR)
    return min(max(wanted, LEAST_TOKENS), MOST_TOKENS)


def write_texts(
    model: Model, dataset: Dataset, request: DataRequest, until: int, n_threads: int, context: StageContext
) -> None:
    """Let `model` write until the dataset has `until` tokens, or its budget is used up.

    Raises EdgespecError, and KeyboardInterrupt when it is stopped; what was written by then is stored.
    """

    def show(run: WritingRun) -> None:
        left = until * (1.0 - run.share) / run.tokens_per_s if run.n_tokens >= _N_BEFORE_ESTIMATE else None
        detail = f"{run.tokens_per_s:.0f} tokens/s, {run.share * until:,.0f} tokens"
        context.on_progress(StageProgress("writing", run.share, detail, left))

    prompts = all_prompts(model, request.prompts, from_history=request.from_history)
    target_writer = TargetWriter(
        model,
        WritingSettings(n_predict=request.n_predict),
        n_threads=n_threads,
        interrupt=context.signals.interrupt if context.signals else None,
        on_message=context.on_message,
    )
    with target_writer, dataset.writer(request.budget) as writer:
        # Some held-out prompts come first, so that each dataset has texts to evaluate on.
        prompts = chain(islice(_held_out_prompts(), _N_HELD_OUT), prompts)
        run = target_writer.fill(writer, prompts, until=until, on_progress=show)
        if run.full:
            context.on_message(writer.full())


def _held_out_prompts() -> Iterator[TextPrompt]:
    return (prompt for prompt in built_in() if is_held_out(prompt.key))


def evaluation_prompts(dataset: Dataset, n: int) -> tuple[EvaluationPrompt, ...]:
    """Return `n` held-out prompts: up to half of them the user's own, then built-in ones."""
    own = [text for text in dataset.texts(held_out=True) if text.source != BUILT_IN and text.n_prompt > 1]
    found = [
        EvaluationPrompt(
            f"{text.key:016x}", text.source, tokens=tuple(map(int, text.tokens[: text.n_prompt]))
        )
        for text in evenly(own, n // 2)
    ]
    for prompt in islice(_held_out_prompts(), n - len(found)):
        found.append(EvaluationPrompt(f"{prompt.key:016x}", BUILT_IN, text=prompt.turns[-1]))
    return tuple(found)
