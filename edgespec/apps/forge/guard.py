"""The guard of an installed head: a new one replaces it only if more of its drafts are right.

Both heads draft from every place of held-out texts, which neither was trained on: the user's latest ones, and
answers to built-in prompts. The files are compared, so what quantization costs counts. No time is measured:
the heads are of one size, and a machine at night has other things to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.forge.dataset import BUILT_IN, Dataset, TrainingText
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import read_head

if TYPE_CHECKING:
    from edgespec.apps.forge.training.acceptance import Acceptance
    from edgespec.apps.forge.training.weights import ModelWeights

N_DRAFTED = 5
"""Tokens of a draft."""

_MOST = 8192  # tokens of the texts of each kind


@dataclass(frozen=True, slots=True)
class GuardTexts:
    """The held-out texts that heads are compared on."""

    own: tuple[TrainingText, ...]
    """The user's, the latest first."""
    built_in: tuple[TrainingText, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> GuardTexts:
        """Return those of a dataset. Raises EdgespecError where texts of a kind are missing."""
        held_out = list(dataset.texts(held_out=True))
        own = _up_to(_MOST, (text for text in reversed(held_out) if text.source != BUILT_IN))
        built_in = _up_to(_MOST, (text for text in held_out if text.source == BUILT_IN))
        for texts, which in ((own, "yours"), (built_in, "the built-in ones")):
            if not texts:
                raise EdgespecError(
                    f"the head that is there stays: of the texts to judge a new one by, {which} are missing "
                    f"(deleted, or none was held out yet; one in 20 is); use the model for a while"
                )
        return cls(own, built_in)


def _up_to(n_most: int, texts: Iterable[TrainingText]) -> tuple[TrainingText, ...]:
    """Return the first texts that have `n_most` tokens to draft, without those that are too short to."""
    chosen: list[TrainingText] = []
    for text in texts:
        n = len(text.tokens) - max(text.n_prompt, text.first + 2)
        if n > N_DRAFTED and n_most > 0:
            chosen.append(text)
            n_most -= n
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Mean accepted tokens of a draft of N_DRAFTED: of the head that is there, and of the new one."""

    own: tuple[float, float]
    built_in: tuple[float, float]
    n_own: int
    n_built_in: int
    """Drafts that were compared."""

    @property
    def passes(self) -> bool:
        """Whether the new head is better on the user's texts, and no worse on the built-in ones."""
        return self.own[1] > self.own[0] and self.built_in[1] >= self.built_in[0]

    def __str__(self) -> str:
        (a, b), (c, d) = self.own, self.built_in
        return (
            f"accepted of a draft of {N_DRAFTED}: {a:.3f} before, {b:.3f} now on your latest texts "
            f"({self.n_own:,} drafts); {c:.3f} before, {d:.3f} now on the built-in ones ({self.n_built_in:,})"
        )


class Guard:
    """Compares heads with the one that is installed."""

    def __init__(self, target: ModelWeights, texts: GuardTexts, installed: Path) -> None:
        """Measure the head in the file `installed`, of `target`. Raises UsageError if it is none."""
        self._target, self._texts = target, texts
        self._before = self._measure(installed)

    def judge(self, path: Path) -> GuardFigures:
        """Return the figures of the head in `path` beside those of the installed one."""
        (own, built_in), (own_before, built_in_before) = self._measure(path), self._before
        return GuardFigures(
            (own_before.mean_accepted, own.mean_accepted),
            (built_in_before.mean_accepted, built_in.mean_accepted),
            own.n_drafts,
            built_in.n_drafts,
        )

    def _measure(self, path: Path) -> tuple[Acceptance, Acceptance]:
        own, built_in = accepted(path, self._target, (self._texts.own, self._texts.built_in))
        return own, built_in


def accepted(path: Path, target: ModelWeights, parts: Sequence[Sequence[TrainingText]]) -> list[Acceptance]:
    """Return what is accepted of drafts of the head in `path`, in each of the `parts`.

    Drafts begin at all places of the texts. Raises UsageError for a file without a head of `target`.
    """
    from edgespec.apps.forge.training.acceptance import AcceptanceEvaluation
    from edgespec.apps.forge.training.batches import BatchSize
    from edgespec.apps.forge.training.head import HeadFamily, HeadSettings

    header = check_model_file(path)
    head = read_head(header)
    if head is None:
        raise UsageError(f"{path}: no draft head")
    family = HeadFamily(target, head.target_sha256, head.token_ids, HeadSettings(n_ff=header.n_ff))
    params, rows = family.read(path), BatchSize(family.recipe.n_rows)
    return [
        AcceptanceEvaluation(family, texts, rows, n_positions=N_DRAFTED, n_most=_MOST)(params)
        for texts in parts
    ]
