"""What an engine knows of a pair when it begins, and keeps in the profile when it ends (profile_store.py).

That is what passes cost, what is accepted and how long answers are. Without a profile there are guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.decoding.choices import Objective
from edgespec.drafting.costs import Clocks, Curve, OnlineCurve, guessed_curve, of_blocks
from edgespec.drafting.fixed_length import FixedLength
from edgespec.drafting.learnt import Learnt
from edgespec.drafting.lengths import ANSWER_TOKENS, AnswerLengths
from edgespec.drafting.policy import Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.profile import Key, Profile
from edgespec.drafting.profile_store import TimedCurve, load, merge_learnt
from edgespec.drafting.scheduler import Scheduler
from edgespec.errors import UsageError
from edgespec.llama.published_heads import BlockHead
from edgespec.llama.weights import Model

_NAMES = {True: "greedy", False: "sampled"}
_STARTS = "starts"  # beside them in a profile: lengths of answers by how the prompt began


class Knowledge:
    """What is known of a pair: its curves and tables, these apart for greedy and for sampled generations."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        *,
        kernels: str,
        n_threads: int,
        objective: Objective,
        kept: bool,
        on_message: Callable[[str], None],
    ) -> None:
        """Begin with the stored profile if there is one (and `kept`), else with guesses.

        Raises UsageError when energy is the objective and no joules were measured.
        """
        self._models = target, draft
        self._key = (
            Key.of(target.header, draft.header if draft else None, kernels=kernels, threads=n_threads)
            if kept
            else None
        )
        self._profile = load(self._key, on_message=on_message) if self._key else None
        self._objective = objective
        self._begin()

    def _begin(self) -> None:
        profile = self._profile
        self._answers: list[int] = []
        self._lengths = AnswerLengths(profile.answer_tokens if profile else ANSWER_TOKENS)
        self._lengths.restore(profile.acceptance.get(_STARTS) if profile else None)
        target, draft = self._models
        reliable = profile is not None and profile.reliable
        self.clocks = Clocks(
            _clock(target, profile.target if profile else None, reliable),
            _clock(draft, profile.draft if profile else None, reliable) if draft else None,
        )
        costs = self._costs(profile)
        self._running: list[tuple[Scheduler, bool]] = []
        self._learnt: dict[bool, Learnt] = {}
        for greedy, name in _NAMES.items():
            predictor = Predictor()
            if profile and isinstance(stored := profile.acceptance.get(name), dict):
                predictor.restore(stored)
            self._learnt[greedy] = Learnt(
                costs.target, costs.draft, predictor, in_joules=self._objective == "energy"
            )

    def _costs(self, profile: Profile | None) -> Clocks:
        if self._objective == "latency":
            return self.clocks
        if not profile or not profile.target_joules or (self._models[1] and not profile.draft_joules):
            problem = (
                "no joules are known of these models on this machine; run `edgespec profile` where an energy "
                "counter can be read, or leave it at latency"
            )
            raise UsageError(problem, field="objective", value="energy")
        return Clocks(
            OnlineCurve(profile.target_joules),
            OnlineCurve(profile.draft_joules) if profile.draft_joules else None,
        )

    def scheduler(
        self, policy: Policy, prompt: str | Sequence[int], *, greedy: bool, gamma: int | None = None
    ) -> Scheduler:
        """Return a scheduler for one generation, greedy or sampled, of the answer to `prompt`; until `ended`.

        `gamma`: tokens drafted in every step; None: as many as pay. Each of several schedulers at once learns
        in its own tables; the next text begins with those of the one that ended last.
        """
        learnt = self._learnt[greedy]
        if self._running:
            learnt = learnt.fork()
        lengths = self._lengths.of(prompt)
        scheduler = (
            Scheduler(learnt, policy, lengths)
            if gamma is None
            else FixedLength(gamma, learnt, policy, lengths)
        )
        self._running.append((scheduler, greedy))
        return scheduler

    def ended(self, scheduler: Scheduler) -> None:
        """Keep what was learnt with `scheduler`."""
        for i, (running, greedy) in enumerate(self._running):
            if running is scheduler:
                del self._running[i]
                self._learnt[greedy] = scheduler.learnt
                return

    def forget(self) -> None:
        """Begin again with what was stored."""
        self._begin()

    def answered(self, prompt: str | Sequence[int], n_tokens: int, *, unfinished: bool) -> None:
        """Learn the length of the answer to `prompt`; `unfinished`: a limit ended it."""
        self._lengths.learn(prompt, n_tokens, unfinished=unfinished)
        if not unfinished:
            self._answers.append(n_tokens)

    def store(self, on_message: Callable[[str], None]) -> None:
        """Keep what was learnt, if passes were timed."""
        target, draft = self.clocks.target, self.clocks.draft
        if self._key is None or target.n_observed == 0:
            return
        merge_learnt(
            self._key,
            target=TimedCurve(target.curve(), target.n_observed),
            draft=TimedCurve(draft.curve(), draft.n_observed) if draft else None,
            acceptance={
                **{name: self._learnt[greedy].predictor.as_dict() for greedy, name in _NAMES.items()},
                _STARTS: self._lengths.as_dict(),
            },
            answers=self._answers,
            on_message=on_message,
        )


def _clock(model: Model, stored: Curve | None, reliable: bool) -> OnlineCurve:
    curve = stored or guessed_curve(model.header.file_bytes, own_kernels=model.uses_kernels)
    if isinstance(model, BlockHead):
        curve = of_blocks(curve, model.n_block)
    return OnlineCurve(curve, guessed=stored is None, unsure=not reliable)
