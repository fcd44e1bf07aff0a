"""Two models read a finished text (teacher forcing), to find where the small one would do as well.

A pass reads several tokens, so this takes a fraction of the time that writing took. One reading gives the
loss of every threshold of a cascade: the tokens that the small model writes and that the target, after the
same tokens, would not have written. How the text continues after such a token is unknown (docs/scheduler.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from edgespec.decoding.choices import Signal
from edgespec.decoding.options import Span, WakePolicy
from edgespec.decoding.session import Rows
from edgespec.engine.cascade import ThresholdPoint, signal_of
from edgespec.errors import EdgespecError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import CTX_STEP, fits_in_memory
from edgespec.platform.closing import Closing
from edgespec.platform.processes import Cancellation

SIGNALS: tuple[Signal, ...] = get_args(Signal)

NEVER: dict[Signal, float] = {"margin": 0.0, "entropy": 100.0}
"""Thresholds with which the target is never woken."""
ALWAYS: dict[Signal, float] = {"margin": 1.0, "entropy": 0.0}
"""Thresholds with which the target writes everything."""

_N_THRESHOLDS = 32
_AT_ONCE = 16  # tokens of a pass: two models' logits of them are 19 MB with 152k tokens


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Scores of an answer by target and small model: an entry for each of its tokens."""

    margin: list[float] = field(default_factory=list)
    """The small model's margin before the token (`cascade.signal_of`)."""
    entropy: list[float] = field(default_factory=list)
    """The small model's entropy there, in nats."""
    agrees: list[bool] = field(default_factory=list)
    """Whether both models like the same token best."""
    best: list[bool] = field(default_factory=list)
    """Whether the answer has the token that the target likes best."""
    kl: list[float] = field(default_factory=list)
    """Kullback-Leibler divergence of the small model from the target, of the raw logits, in nats."""


class TeacherForcing(Closing):
    """Both models in their own contexts; their logits are computed like the engine's."""

    def __init__(
        self,
        target: Model,
        small: Model | None,
        *,
        n_ctx: int,
        n_threads: int,
        signals: Cancellation | None = None,
    ) -> None:
        """Open contexts of `n_ctx` tokens; without `small` only `TeacherScores.best` is found.

        Raises EdgespecError if they do not fit in memory.
        """
        n_ctx = -(-n_ctx // CTX_STEP) * CTX_STEP
        models = [target, small] if small else [target]
        fits_in_memory([(model.header, n_ctx) for model in models], weights_loaded=True)
        interrupt = signals.interrupt if signals else None
        self._sessions: list[Session] = []
        try:
            for model in models:
                self._sessions.append(
                    Session(
                        model,
                        n_ctx=n_ctx,
                        n_threads=n_threads,
                        n_logits_max=_AT_ONCE,
                        interrupt=interrupt,
                    )
                )
        except BaseException:
            self.close()
            raise

    def scores(self, prompt: Sequence[int], answer: Sequence[int]) -> TeacherScores:
        """Return the scores of `answer` after `prompt`."""
        found = TeacherScores()
        n_vocab = min(session.model.n_vocab for session in self._sessions)
        for session in self._sessions:
            session.clear()
            session.eval(prompt[:-1], n_logits=0)
        read = [prompt[-1], *answer[:-1]]
        for at in range(0, len(answer), _AT_ONCE):
            batch = read[at : at + _AT_ONCE]
            rows = [session.eval(batch, n_logits=len(batch))[:, :n_vocab] for session in self._sessions]
            for i, token in enumerate(answer[at : at + _AT_ONCE]):
                found.best.append(int(rows[0][i].argmax()) == token)
                if len(rows) > 1:
                    _add(found, rows[0][i], rows[1][i])
        return found

    def close(self) -> None:
        """Free the contexts; a second call does nothing."""
        for session in self._sessions:
            session.close()


def _add(scores: TeacherScores, target: Rows, small: Rows) -> None:
    divergence = _kl(target, small)
    if math.isnan(divergence):
        raise EdgespecError("logits are not finite: is a model's file damaged? (`edgespec models verify`)")
    scores.margin.append(signal_of(small, "margin"))
    scores.entropy.append(signal_of(small, "entropy"))
    scores.agrees.append(int(target.argmax()) == int(small.argmax()))
    scores.kl.append(divergence)


def _kl(target: Rows, small: Rows) -> float:
    """Return sum p (log p - log q), p of the target's raw logits and q of the small model's."""
    logs = []
    for row in (target, small):
        with np.errstate(invalid="ignore"):
            shifted = row.astype(np.float64) - float(row.max())
        logs.append(shifted - math.log(float(np.exp(shifted).sum())))
    p = np.exp(logs[0])
    with np.errstate(invalid="ignore"):  # 0 times infinity, where the target knows no such token either
        return float(np.where(p > 0.0, p * (logs[0] - logs[1]), 0.0).sum())


# ---- what a threshold costs and saves ----


def simulate(scores: TeacherScores, wake_policy: WakePolicy) -> tuple[int, int, float]:
    """Return the tokens that the small model gets wrong, those that the target writes, and the sum of the KL.

    The cascade's rule is applied along the target's answer in `scores`: while the target is awake it writes a
    span of tokens, and each token of the small model is compared as if the target had written all before it.
    """
    values = scores.margin if wake_policy.signal == "margin" else scores.entropy
    n_wrong = n_target = at = 0
    kl = 0.0
    while at < len(values):
        if wake_policy.wakes(values[at]):
            n = len(values) - at if wake_policy.span == "rest" else min(wake_policy.span, len(values) - at)
            n_target += n
            at += n
        else:
            n_wrong += not scores.agrees[at]
            kl += scores.kl[at]
            at += 1
    return n_wrong, n_target, kl


def point(texts: Sequence[TeacherScores], wake_policy: WakePolicy) -> ThresholdPoint:
    """Return the loss and the savings of a threshold on these texts."""
    found = [simulate(scores, wake_policy) for scores in texts]
    wrong = [n_wrong for n_wrong, _, _ in found]
    lengths = [len(scores.agrees) for scores in texts]
    n = sum(lengths)
    assert wake_policy.threshold is not None  # noqa: S101 - for the type checker
    return ThresholdPoint(
        threshold=wake_policy.threshold,
        loss=sum(wrong) / n,
        error=ratio_error(wrong, lengths),
        target_share=sum(n_target for _, n_target, _ in found) / n,
        kl=math.fsum(kl for _, _, kl in found) / n,
    )


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float:
    """Return the standard error of sum(parts) / sum(wholes), with prompts as the sample.

    It is the linearised variance of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3). For
    one prompt, where it cannot be estimated, it is 0.
    """
    n, total = len(parts), sum(wholes)
    if n < 2:
        return 0.0
    ratio = sum(parts) / total
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    return math.sqrt(squares * n / (n - 1)) / total


def curve(texts: Sequence[TeacherScores], signal: Signal, span: Span) -> tuple[ThresholdPoint, ...]:
    """Return points from the small model alone to the target alone, in order of the target's share."""
    values = [value for scores in texts for value in getattr(scores, signal)]
    quantiles = np.quantile(values, np.linspace(0.0, 1.0, _N_THRESHOLDS + 2)[1:-1]).tolist()
    thresholds = {NEVER[signal], ALWAYS[signal], *(float(f"{value:.3g}") for value in quantiles)}
    points = (
        point(texts, WakePolicy(signal, threshold, span))
        for threshold in sorted(thresholds, reverse=signal == "entropy")
        if threshold <= (1.0 if signal == "margin" else NEVER[signal])
    )
    return tuple(points)


def choose(points: Sequence[ThresholdPoint], loss: float) -> ThresholdPoint:
    """Return the point with the fewest target tokens among those whose loss and error are within `loss`.

    The standard error counts as lost, so that no point is chosen by luck. `points` should contain the target
    alone, which loses nothing, so that there is always such a point.
    """
    good = [one for one in points if one.loss + one.error <= loss]
    return min(good, key=lambda one: (one.target_share, one.loss))
