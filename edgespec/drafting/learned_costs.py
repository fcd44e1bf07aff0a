"""Costs and acceptance learned of a pair of models: stored by the engine, read by each scheduler."""

from __future__ import annotations

from collections import deque
from copy import copy

from edgespec.drafting.online_curve import OnlineCurve
from edgespec.drafting.predictor import Predictor

_FOLLOW_UP = 0.1  # weight of an outcome in the mean of what follows the draft model's tokens
_REMEMBERED = 64  # of these outcomes; those before count for nothing
_PROBE_SHARE = 0.0075  # of the time may go into probing whether an idle draft model has become useful
_PROBES_SAVED = 2.0  # probes that may be saved up for
_FADE_EVERY, _IDLE_FADE_EVERY = 32, 8  # steps; steps in which the draft model did not run
_KEEP = 0.9


class LearnedCosts:
    """Cost curves, acceptance tables and two running means, for greedy or for sampled generations."""

    def __init__(
        self,
        target: OnlineCurve,
        draft: OnlineCurve | None,
        predictor: Predictor,
        *,
        in_joules: bool = False,
    ) -> None:
        """Begin with the curves of the target and of the draft model (None: there is none).

        `in_joules`: the curves are of energy.
        """
        self.target = target
        self.draft = draft
        self.predictor = predictor
        self.in_joules = in_joules
        self.follow_up = 0.0
        """Tokens gained, on average, by what the suffix store offers after a token of the draft model."""
        self.probe_budget = 0.0
        """Seconds (or joules) saved up for probes of an idle draft model."""
        self._n_steps = self._n_idle = 0
        self._gains: deque[float] = deque(maxlen=_REMEMBERED)  # of follow-ups, since it was forked

    def fork(self) -> LearnedCosts:
        """Return a copy for a request, which others may run with: its own tables, and the same curves.

        What was saved up for probes stays here: all who run together would spend it again.
        """
        forked = copy(self)
        forked.predictor = self.predictor.copy()
        forked._gains = deque(maxlen=_REMEMBERED)
        forked.probe_budget = 0.0
        return forked

    def learn_of(self, forked: LearnedCosts) -> None:
        """Learn what a request learned that ran meanwhile, as if it had come after all that is known here."""
        self.predictor.learn_of(forked.predictor)
        for gain in forked._gains:
            self.learn_follow_up(gain)

    def learn_follow_up(self, gain: float) -> None:
        """Count what the suffix store's offer after a token of the draft model gains, in tokens."""
        self._gains.append(gain)
        self.follow_up += _FOLLOW_UP * (gain - self.follow_up)

    def affords_probe(self, cost: float) -> bool:
        """Whether a probe of the draft model at `cost` can be paid now."""
        return cost <= self.probe_budget

    def pay_for_probe(self, cost: float) -> None:
        """Take the cost of a probe from the budget, which keeps no more than a few probes cost."""
        self.probe_budget = min(self.probe_budget, _PROBES_SAVED * cost) - cost

    def count_step(self, cost: float, *, idle: bool) -> None:
        """Count a step, a share of whose cost is saved for probes; `idle`: the draft model did not run.

        What is known of an idle draft model fades, so that it is tried again from time to time: texts change.
        """
        self.probe_budget += _PROBE_SHARE * cost
        self._n_steps += 1
        self._n_idle = self._n_idle + 1 if idle else 0
        if idle and self._n_idle % _IDLE_FADE_EVERY == 0:
            self.predictor.next.fade(_KEEP, wholly=True)
        elif self._n_steps % _FADE_EVERY == 0:
            self.predictor.next.fade(_KEEP)
