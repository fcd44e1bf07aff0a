"""The guard of an installed head: a new one replaces it only if more of its drafts are right.

Both heads draft from every place of held-out texts, which neither was trained on: the user's latest ones, and
answers to built-in prompts. The files are compared, so what quantization costs counts. No time is measured:
the heads are of one size, and a machine at night has other things to do.

What a training gains on the user's texts it may lose on others. So where all of it loses too much, a part of
it is taken: the mean of the old weights and the new (WiSE-FT, arXiv 2109.01903, section 3). On the built-in
texts the head that learning began with is the measure, so that small losses of many nights do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.forge.dataset import BUILT_IN, Dataset, TrainingText
from edgespec.apps.forge.training.batches import MOST, N_DRAFTED, BatchSize
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import read_head

if TYPE_CHECKING:
    from edgespec.apps.forge.training.head import HeadFamily
    from edgespec.apps.forge.training.loop import Acceptance
    from edgespec.apps.forge.training.weights import ModelWeights

TOLERATED = 0.02
"""Share that may be lost on the built-in texts: more than the choice of kept tokens and quantization cost."""

SHARES = (0.75, 0.5, 0.25)
"""Parts of a training that are tried where all of it loses too much, until one passes."""


GuardTexts = tuple[Sequence[TrainingText], Sequence[TrainingText]]
"""The held-out texts that heads are compared on: the user's, the latest first, and built-in ones."""


def guard_texts(dataset: Dataset) -> GuardTexts:
    """Return those of a dataset. Raises EdgespecError where texts of a kind are missing."""
    held_out = list(dataset.texts(held_out=True))
    own = _some(text for text in reversed(held_out) if text.source != BUILT_IN)
    built_in = _some(text for text in held_out if text.source == BUILT_IN)
    if not (own and built_in):
        raise EdgespecError(
            "the current head is kept: of the held-out texts for evaluating a new one, "
            f"{'the built-in ones' if own else 'yours'} are missing (deleted, or none was held out yet; "
            "one in 20 is); use the model for a while"
        )
    return own, built_in


def _some(texts: Iterable[TrainingText]) -> tuple[TrainingText, ...]:
    """Return the first texts that have MOST tokens to draft, without those that are too short to."""
    chosen: list[TrainingText] = []
    n_most = MOST
    for text in texts:
        n = len(text.tokens) - max(text.n_prompt, text.first + 2)
        if n > N_DRAFTED and n_most > 0:
            chosen.append(text)
            n_most -= n
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Mean accepted tokens of a draft of N_DRAFTED: of an older head, and of the new one."""

    own: tuple[float, float]
    """The older one is the current head."""
    built_in: tuple[float, float]
    """The older one is the head that learning began with."""
    n_own: int
    n_built_in: int
    """Drafts that were compared."""

    @property
    def passes(self) -> bool:
        """Whether the new head is better on the user's texts, and hardly worse on the built-in ones."""
        return self.gains and self.built_in[1] >= (1.0 - TOLERATED) * self.built_in[0]

    @property
    def gains(self) -> bool:
        """Whether the new head is better on the user's texts."""
        return self.own[1] > self.own[0]

    def __str__(self) -> str:
        (a, b), (c, d) = self.own, self.built_in
        return (
            f"accepted of a draft of {N_DRAFTED}: {a:.3f} before, {b:.3f} now on your latest texts "
            f"({self.n_own:,} drafts); {c:.3f} at first, {d:.3f} now on built-in ones ({self.n_built_in:,})"
        )


class Guard:
    """Compares heads with the one that is installed."""

    def __init__(
        self, target: ModelWeights, texts: GuardTexts, installed: Path, first: Path | None = None
    ) -> None:
        """Measure the head in the file `installed`, of `target`. Raises UsageError if it is none.

        `first`: the head that learning began with; None: this one.
        """
        self._target, self._texts, self._installed = target, texts, installed
        own, built_in = accepted(installed, target, texts)
        if first:
            (built_in,) = accepted(first, target, texts[1:])
        self._before = own, built_in

    def choose(self, path: Path, type_: str) -> tuple[Path, float, GuardFigures]:
        """Return the file to keep of the head in `path`, of `type_`; its part of the training; its figures.

        All of it, or the first of SHARES that passes, its file beside `path`; all of it if none does.
        """
        whole = self.judge(path)
        if whole.passes or not whole.gains:
            return path, 1.0, whole
        family = _family(path, self._target)
        before, after = family.read(self._installed), family.read(path)
        for share in SHARES:
            part = path.with_name(f"{path.stem}-{share:.0%}.gguf")
            mean = {name: (1.0 - share) * before[name] + share * after[name] for name in after}
            family.export(mean, part, type_)
            figures = self.judge(part)
            if figures.passes:
                return part, share, figures
        return path, 1.0, whole

    def judge(self, path: Path) -> GuardFigures:
        """Return the figures of the head in `path` beside those of the installed one."""
        own, built_in = accepted(path, self._target, self._texts)
        own_before, built_in_before = self._before
        return GuardFigures(
            (own_before.mean_accepted, own.mean_accepted),
            (built_in_before.mean_accepted, built_in.mean_accepted),
            own.n_drafts,
            built_in.n_drafts,
        )


def accepted(path: Path, target: ModelWeights, parts: Sequence[Sequence[TrainingText]]) -> list[Acceptance]:
    """Return what is accepted of drafts of the head in `path`, in each of the `parts`.

    Drafts begin at all places of the texts. Raises UsageError for a file without a head of `target`.
    """
    from edgespec.apps.forge.training.loop import AcceptanceEvaluation

    family = _family(path, target)
    params, rows = family.read(path), BatchSize()
    return [AcceptanceEvaluation(family, texts, rows)(params) for texts in parts]


def _family(path: Path, target: ModelWeights) -> HeadFamily:
    from edgespec.apps.forge.training.head import HeadFamily

    header = check_model_file(path)
    head = read_head(header)
    if head is None:
        raise UsageError(f"{path}: no draft head")
    return HeadFamily(target, head.target_sha256, head.token_ids, header.n_ff)
