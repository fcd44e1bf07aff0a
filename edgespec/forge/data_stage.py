"""The first stage of `edgespec draft make`: the target writes what drafts are trained on and judged by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.forge.builder import TrainingRequest
from edgespec.forge.dataset import BUILT_IN, Dataset, is_held_out
from edgespec.forge.evaluation_process import EvaluationPrompt
from edgespec.forge.progress import StageContext, StageProgress
from edgespec.forge.prompts import TextPrompt, TokenPrompt, built_in
from edgespec.forge.user_texts import asked_of, check_file
from edgespec.forge.writing import TargetWriter, WritingProgress, WritingSettings
from edgespec.llama.weights import Model
from edgespec.models.sources import format_size
from edgespec.models.suites import evenly

BUDGET = 2_000_000_000
"""Bytes of a dataset by default."""

TOKENS_PER_HOUR = 200_000
"""Tokens that are written for an hour of training, which reads them about nine times, all families together.
A head still learnt from the fourth time. They take 40 minutes where a laptop writes 80 a second."""

LEAST_BUDGET = 16_000_000
"""Bytes that hold a few texts of a small target."""

_N_TOLD = 100  # tokens after which the time that is left is told: the first passes read prompts only

_N_HELD_OUT = 4  # texts to judge by while a draft is trained, however few are written

LEAST_TOKENS, MOST_TOKENS = 20_000, 1_000_000
"""Tokens that are written in any case; and where nobody asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """What the target is to write."""

    tokens: int
    """That the target is to have written, those of earlier runs included; of the user's own: to write now."""
    n_predict: int = WritingSettings().n_predict
    """Most tokens of an answer."""
    budget: int = BUDGET
    """Most bytes that the texts and their hidden states take on disk."""
    prompts: tuple[Path, ...] = ()
    """Files of prompts, asked before the built-in ones."""
    from_history: bool = False
    """Whether the prompts of the history are asked too."""

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be."""
        if self.tokens < 1:
            raise UsageError("must be 1 or more", field="data_tokens", value=self.tokens)
        if self.budget < LEAST_BUDGET:
            problem = f"at least {format_size(LEAST_BUDGET)}: a text takes about a megabyte"
            raise UsageError(problem, field="budget", value=self.budget)
        for path in self.prompts:
            check_file(path)

    def until(self, dataset: Dataset) -> int:
        """Return how many tokens the dataset is to have, at the beginning of a run."""
        own = bool(self.prompts) or self.from_history
        return self.tokens + (dataset.size().n_answer_tokens if own else 0)


def default_tokens(training: TrainingRequest) -> int:
    """Return how many tokens the target writes for a training, if the user does not say."""
    if not training.trains:
        return LEAST_TOKENS
    wanted = training.tokens // 3 if training.tokens else round((training.hours or 0.0) * TOKENS_PER_HOUR)
    return min(max(wanted, LEAST_TOKENS), MOST_TOKENS)


def write_texts(
    model: Model, dataset: Dataset, request: DataRequest, until: int, n_threads: int, around: StageContext
) -> None:
    """Let `model` write until the dataset has `until` tokens, or its budget is used up.

    Raises EdgespecError, and KeyboardInterrupt when it is stopped; what was written by then is stored.
    """

    def show(now: WritingProgress) -> None:
        left = until * (1.0 - now.share) / now.tokens_per_s if now.n_tokens >= _N_TOLD else None
        detail = f"{now.tokens_per_s:.0f} tokens/s, {now.share * until:,.0f} tokens"
        around.on_progress(StageProgress("writing", now.share, detail, left))

    prompts = _prompts(model, request)
    writing = TargetWriter(
        model,
        WritingSettings(n_predict=request.n_predict),
        n_threads=n_threads,
        interrupt=around.signals.interrupt if around.signals else None,
        on_message=around.on_message,
    )
    with writing, dataset.writer(request.budget) as writer:
        written = writing.fill(writer, prompts, until=until, on_progress=show)
        if written.full:
            around.on_message(writer.full())


def _prompts(model: Model, request: DataRequest) -> Iterator[TextPrompt | TokenPrompt]:
    """Return what is asked: some held-out prompts, so that each dataset has some, then all."""
    own = asked_of(model, request.prompts, from_history=request.from_history)
    return chain(islice(_held_out(), _N_HELD_OUT), own)


def _held_out() -> Iterator[TextPrompt]:
    """Yield the built-in prompts that nothing is trained on."""
    return (prompt for prompt in built_in() if is_held_out(prompt.key))


def questions_for(dataset: Dataset, n: int) -> tuple[EvaluationPrompt, ...]:
    """Return `n` prompts that no draft was trained on: up to half of the user's own, then built-in ones."""
    own = [text for text in dataset.texts(held_out=True) if text.source != BUILT_IN and text.n_prompt > 1]
    found = [
        EvaluationPrompt(
            f"{text.key:016x}", text.source, tokens=tuple(map(int, text.tokens[: text.n_prompt]))
        )
        for text in evenly(own, n // 2)
    ]
    for prompt in islice(_held_out(), n - len(found)):
        found.append(EvaluationPrompt(f"{prompt.key:016x}", BUILT_IN, text=prompt.turns[-1]))
    return tuple(found)
