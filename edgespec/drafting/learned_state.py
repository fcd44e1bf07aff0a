"""The learned state of an engine: costs of passes, acceptance, lengths of answers.

It begins with the stored profile, else with guesses, and is stored there again (profile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.decoding.choices import NamedDrafter, Objective
from edgespec.drafting.answer_lengths import ANSWER_TOKENS, AnswerLengths
from edgespec.drafting.draft import Draft
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.online_curve import OnlineCurve, PassCurves
from edgespec.drafting.plugin import DrafterCosts
from edgespec.drafting.policy import Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.profile import (
    CostCurve,
    Profile,
    ProfileKey,
    TimedCurve,
    guessed_curve,
    load,
    store_learned,
)
from edgespec.drafting.scheduler import FixedLength, Scheduler
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

_NAMES = {True: "greedy", False: "sampled"}


class LearnedState:
    """Curves and tables of a pair of models; greedy and sampled generations have their own tables."""

    def __init__(
        self,
        target: Model,
        draft: Draft,
        *,
        kernels: str,
        n_threads: int,
        objective: Objective,
        kept: bool,
        on_message: Callable[[str], None],
    ) -> None:
        """Begin with the stored profile if there is one (and `kept` is true), else with guesses.

        Raises UsageError when energy is the objective and no joules were measured.
        """
        self._target, self._draft = target, draft
        header = draft.model.header if draft.model else None
        self._key = ProfileKey.of(target.header, header, kernels=kernels, threads=n_threads) if kept else None
        self._profile = load(self._key, on_message=on_message) if self._key else None
        self._objective = objective
        self._begin()

    def _begin(self) -> None:
        profile = self._profile
        self._lengths = AnswerLengths(ANSWER_TOKENS)
        reliable = profile is not None and profile.reliable
        self.clocks = PassCurves(
            self._clock(self._target, profile.target if profile else None, reliable),
            self._clock(self._draft.model, profile.draft if profile else None, reliable)
            if self._draft.model
            else None,
        )
        costs = self._costs(profile)
        self._records: dict[tuple[str, int], DrafterCosts] = {}
        self._running: dict[Scheduler, tuple[bool, LearnedCosts]] = {}  # greedy, and what it began with
        self._learned: dict[bool, LearnedCosts] = {}
        for greedy, name in _NAMES.items():
            predictor = Predictor()
            if profile and isinstance(stored := profile.acceptance.get(name), dict):
                predictor.restore(stored)
            self._learned[greedy] = LearnedCosts(
                costs.target, costs.draft, predictor, in_joules=self._objective == "energy"
            )

    def _clock(self, model: Model, stored: CostCurve | None, reliable: bool) -> OnlineCurve:
        curve = stored or guessed_curve(model.header.file_bytes, own_kernels=model.uses_kernels)
        if model is self._draft.model:
            curve = self._draft.costs(curve)
        return OnlineCurve(curve, guessed=stored is None, unsure=not reliable)

    def _costs(self, profile: Profile | None) -> PassCurves:
        if self._objective == "latency":
            return self.clocks
        if not profile or not profile.target_joules or (self._draft.model and not profile.draft_joules):
            problem = (
                "no joules are known of these models on this machine; run `edgespec profile` where an energy "
                "counter can be read, or leave it at latency"
            )
            raise UsageError(problem, field="objective", value="energy")
        return PassCurves(
            OnlineCurve(profile.target_joules),
            OnlineCurve(profile.draft_joules) if profile.draft_joules else None,
        )

    def scheduler(
        self, policy: Policy, prompt: str | Sequence[int], *, greedy: bool, gamma: int | None = None
    ) -> Scheduler:
        """Return a scheduler for one generation, greedy or sampled, of the answer to `prompt`; until `ended`.

        `gamma`: tokens drafted in every step; None: as many as pay. Each of several schedulers at once learns
        in its own tables; the next text begins with what all that have ended learned.
        """
        known = self._learned[greedy]
        learned = known.fork()
        learned.probe_budget, known.probe_budget = known.probe_budget, 0.0
        lengths = self._lengths.of(prompt)
        scheduler = (
            Scheduler(learned, policy, lengths)
            if gamma is None
            else FixedLength(gamma, learned, policy, lengths)
        )
        self._running[scheduler] = greedy, known
        return scheduler

    def record(self, drafter: NamedDrafter) -> DrafterCosts:
        """Return what is known of a user's drafter, which learns on."""
        return self._records.setdefault((drafter.name, id(drafter.make)), DrafterCosts())

    def ended(self, scheduler: Scheduler) -> None:
        """Take back what was learned with `scheduler`, beside what others learned meanwhile."""
        if scheduler not in self._running:
            return
        greedy, known = self._running.pop(scheduler)
        if self._learned[greedy] is known:
            scheduler.learned.probe_budget += known.probe_budget
            self._learned[greedy] = scheduler.learned
        else:
            self._learned[greedy].learn_of(scheduler.learned)
            self._learned[greedy].probe_budget += scheduler.learned.probe_budget

    def forget(self) -> None:
        """Begin again with the stored profile."""
        self._begin()

    def answered(self, prompt: str | Sequence[int], n_tokens: int, *, unfinished: bool) -> None:
        """Learn the length of the answer to `prompt`; `unfinished`: a limit ended it."""
        self._lengths.learn(prompt, n_tokens, unfinished=unfinished)

    def store(self, on_message: Callable[[str], None]) -> None:
        """Store what was learned, if passes were timed."""
        target, draft = self.clocks.target, self.clocks.draft
        if self._key is None or target.n_observed == 0:
            return
        store_learned(
            self._key,
            TimedCurve(target.curve(), target.n_observed),
            TimedCurve(draft.curve(), draft.n_observed) if draft else None,
            {name: self._learned[greedy].predictor.as_dict() for greedy, name in _NAMES.items()},
            on_message=on_message,
        )
