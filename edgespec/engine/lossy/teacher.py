"""Two models read a finished text (teacher forcing), to find where the small one would do as well.

A pass reads several tokens, so this takes a fraction of the time that writing took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.session import Rows
from edgespec.engine.lossy.cascade import signal_of
from edgespec.errors import EdgespecError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import CTX_STEP, fits_in_memory
from edgespec.platform.closing import Closing
from edgespec.platform.signals import Cancellation

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
    """Both models in contexts of their own; their logits are computed like the engine's."""

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

        Raises EdgespecError where they do not fit in memory.
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

    def marks(self, prompt: Sequence[int], answer: Sequence[int]) -> TeacherScores:
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


def _add(marks: TeacherScores, target: Rows, small: Rows) -> None:
    """Compare the small model with the target at one token of the answer."""
    divergence = _kl(target, small)
    if math.isnan(divergence):
        raise EdgespecError("logits are not finite: is a model's file damaged? (`edgespec models verify`)")
    marks.margin.append(signal_of(small, "margin"))
    marks.entropy.append(signal_of(small, "entropy"))
    marks.agrees.append(int(target.argmax()) == int(small.argmax()))
    marks.kl.append(divergence)


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
