"""How much faster a draft makes its target: how often it says the same, what its passes cost, what follows.

answers      the target's own, a token at a time, with its likeliest tokens at each position
acceptance   the draft over these texts, all of an answer in one pass
passes       of both models in turn (measure.py), so that a machine that drifts does so for both
speed-up     tau * T(1) / (gamma * T_draft(1) + T(gamma + 1)) at the best gamma; gamma 0 is plain decoding
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.drafting.costs import CONTEXTS, Curve
from edgespec.drafting.measure import ProgressFn, measure
from edgespec.drafting.model import DraftModel
from edgespec.energy import EnergyMeter
from edgespec.llama.embeddings import CutVocabulary, Embeddings, Scatter
from edgespec.llama.session import Rows, Session
from edgespec.llama.weights import Model
from edgespec.platform.signals import Cancellation

MOST_TOKENS = 64
"""Most tokens of an answer: as many rows as a session returns at once."""

LONGEST_DRAFT = 16
"""Tokens of the longest draft whose speed-up is looked at."""

_TIMED = (1, 2, 4)  # passes whose seconds are stated

_LIKELIEST = (
    1024  # tokens of a position that are kept: of the rest the probabilities add up to next to nothing
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target wrote after a prompt at temperature 0."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    likeliest: tuple[npt.NDArray[np.int64], ...]
    """At each position its likeliest tokens; the one it wrote is among them."""
    probabilities: tuple[npt.NDArray[np.float64], ...]
    """Their probabilities at temperature 1 without filters."""


class Acceptance(NamedTuple):
    """How far a draft agrees with its target over the target's answers."""

    agreement: float
    """Share of positions where both like the same token best: alpha at temperature 0."""
    overlap: float
    """Mean sum of min(p, q): alpha at temperature 1 without filters."""


class SpeedUp(NamedTuple):
    """What drafting is expected to give."""

    gamma: int
    """The best length of a draft; 0: better none."""
    factor: float
    """Over plain decoding."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of passes after a context of 128 tokens."""

    target: tuple[float, ...]
    """T(1), T(2), ..."""
    draft: tuple[float, ...]
    spread: float
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A model as a draft, and what was measured of it."""

    name: str
    n_kept: int | None
    """Tokens of its output vocabulary; None: all."""
    path: Path
    size: int
    """Bytes of the file."""
    pass_bytes: int
    """Bytes of weights that a pass reads."""
    passes: Passes
    acceptance: Acceptance

    @property
    def greedy(self) -> SpeedUp:
        """What is expected at temperature 0."""
        return speed_up(self.acceptance.agreement, self.passes)

    @property
    def sampled(self) -> SpeedUp:
        """What is expected at temperature 1."""
        return speed_up(self.acceptance.overlap, self.passes)

    @property
    def value(self) -> float:
        """What decides: the geometric mean of both speed-ups."""
        return math.sqrt(self.greedy.factor * self.sampled.factor)

    def seconds(self) -> dict[int, float]:
        """Return T(n) of the n that are stated."""
        return {n: self.passes.draft[n - 1] for n in _TIMED}


def answer(session: Session, prompt: Sequence[int], n_predict: int) -> Answer:
    """Return what the session's model writes after `prompt`: up to `n_predict` tokens, to its end."""
    model = session.model
    tokens: list[int] = []
    likeliest, probabilities = [], []
    session.clear()
    row = session.eval(prompt)[0]
    while True:
        p = softmax(row)
        n = min(_LIKELIEST, len(p))
        ids = np.argpartition(-p, n - 1)[:n].astype(np.int64)
        likeliest.append(ids)
        probabilities.append(p[ids])
        tokens.append(int(row.argmax()))
        if len(tokens) == n_predict or model.is_eog(tokens[-1]):
            return Answer(tuple(prompt), tuple(tokens), tuple(likeliest), tuple(probabilities))
        row = session.eval(tokens[-1:])[0]


def acceptance(draft: DraftModel, answers: Sequence[Answer]) -> Acceptance:
    """Return how far `draft` agrees with the answers' model, over all their tokens."""
    agreed, overlap, n = 0, 0.0, 0
    for one in answers:
        draft.begin()
        rows = draft.run(one.prompt, one.tokens[:-1])
        for row, token, ids, p in zip(rows, one.tokens, one.likeliest, one.probabilities, strict=True):
            known = ids < len(row)
            agreed += int(row.argmax()) == token
            overlap += float(np.minimum(p[known], softmax(row)[ids[known]]).sum())
            n += 1
    return Acceptance(agreed / n, overlap / n)


def softmax(row: Rows) -> npt.NDArray[np.float64]:
    """Return the probabilities of a row of logits at temperature 1; 0 where a logit is -inf."""
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    p: npt.NDArray[np.float64] = weights / weights.sum()
    return p


def time_passes(
    target: Model,
    draft: Model,
    cut: CutVocabulary | None,
    *,
    n_threads: int,
    budget_s: float,
    on_progress: ProgressFn = lambda _progress: None,
    signals: Cancellation | None = None,
) -> Passes:
    """Time passes of both models for about `budget_s` seconds; raises as `measure.measure`.

    To a cut draft's passes is added what its embeddings and its rows take outside the library.
    """
    costs = measure(
        target,
        draft,
        n_threads=n_threads,
        budget_s=budget_s,
        on_progress=on_progress,
        signals=signals,
        meter=EnergyMeter(None, reason="not wanted here"),
    )
    assert costs.draft is not None  # noqa: S101 - for the type checker: there is a draft
    handling = handling_s(cut, target.n_vocab) if cut else 0.0
    return Passes(
        tuple(_near(costs.target)),
        tuple(seconds + n * handling for n, seconds in enumerate(_near(costs.draft), start=1)),
        costs.spread,
        costs.warnings,
    )


def handling_s(cut: CutVocabulary, n_vocab: int, repeats: int = 99) -> float:
    """Return the seconds that a cut draft takes for a token beside the library's pass."""
    embeddings, scatter = Embeddings(cut), Scatter(cut.token_ids, n_vocab)
    rows = np.zeros((1, len(cut.token_ids)), np.float32)
    seconds = []
    for i in range(repeats):
        began = time.perf_counter()
        embeddings([(11 + 13 * i) % cut.n_vocab])
        scatter(rows)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def speed_up(alpha: float, passes: Passes) -> SpeedUp:
    """Return the best length of a draft, and what it gives over plain decoding.

    `alpha`: the chance that a drafted token is accepted.
    """
    target, draft_s = passes.target, passes.draft[0]

    def factor(gamma: int) -> float:
        tau = sum(alpha**i for i in range(gamma + 1))
        return tau * target[0] / (gamma * draft_s + target[gamma])

    best = max(range(LONGEST_DRAFT + 1), key=factor)
    return SpeedUp(best, factor(best))


def levelled(measured: Sequence[Passes]) -> list[Passes]:
    """Return the passes as if the machine had been as fast each time.

    The target was timed with each draft: its medians become the target of all, and each draft's times are
    moved as those of the target beside it were.
    """
    target = [statistics.median(seconds) for seconds in zip(*(one.target for one in measured), strict=True)]
    found = []
    for one in measured:
        factor = statistics.median(a / b for a, b in zip(target, one.target, strict=True))
        draft = tuple(seconds * factor for seconds in one.draft)
        found.append(replace(one, target=tuple(target), draft=draft))
    return found


def _near(curve: Curve) -> list[float]:
    return curve.at(CONTEXTS[0])[1:]
