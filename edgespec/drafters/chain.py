"""The drafter: one chain of tokens a step, from the suffix store, the draft model, or one after the other.

    suffix   what the store offers goes to the target as it is: point masses, for free
    model    the draft model's own tokens, a pass each
    staged   the draft model checks what the store offers in one pass and adds a token of its own: its
             tokens at a fraction of the passes (staged speculative decoding, arXiv 2308.04623)

The scheduler says at each point of the chain what comes next. A guess that the draft model checks changes
nothing in what it proposes: each of its tokens is drawn from its own distribution, and a guess only
decides whether the distribution after it is already there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from edgespec import _core
from edgespec.costs import OnlineCurve
from edgespec.drafters.base import Draft, Outcome, Tokens
from edgespec.drafters.model import DraftModel
from edgespec.drafters.suffix import SuffixDrafts
from edgespec.predictor import bucket_of
from edgespec.scheduler import ASLEEP, MAX_GAMMA, RunModel, Scheduler, TakeSuffix

_OFFERED = 16  # tokens asked of the suffix store at once
_FEWEST_TESTED, _TESTED = 8, 24  # tokens of the answer that an idle draft model is tested on
_WAKE_AFTER = 6  # steps
_WAKE_EVERY = 3  # steps between two looks at whether a sleeping draft model is worth waking

Source = Literal["suffix", "sampled", "argmax"]


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the suffix store offered after `at` drafted tokens."""

    at: int
    tokens: list[int]
    buckets: list[int]
    chances: list[float]


@dataclass(frozen=True, slots=True)
class _Proposed:
    """A token of the draft."""

    token: int
    source: Source
    chance: float
    """Estimated acceptance, given that all before it are accepted."""
    bucket: int = 0
    next_bucket: int = 0
    is_top: bool = True
    """Whether it is the likeliest token of its distribution."""


@dataclass(slots=True)
class ChainStep:
    """What a step knew, chose and got; `--explain` prints it."""

    rate: float = 0.0
    """Tokens a second (or a joule) that the decision was made with."""
    unit: str = "tokens/s"
    offered: list[float] = field(default_factory=list)
    """Estimated acceptances of what the suffix store offered first."""
    n_unread: int | None = None
    """Tokens the draft model had not read; None without one."""
    n_woken: int = 0
    """Tokens the draft model read to wake up."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(tokens read, guesses among them) of each pass of the draft model."""
    proposed: list[_Proposed] = field(default_factory=list)
    n_accepted: int = 0
    n_emitted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0


class Chain:
    """Proposes a chain of tokens a step; a Drafter. One for a generation."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        suffix: SuffixDrafts | None,
        model: DraftModel | None,
        is_eog: Callable[[int], bool],
        clocks: tuple[OnlineCurve, OnlineCurve | None],
        on_step: Callable[[ChainStep], None] | None = None,
    ) -> None:
        """Propose from `suffix` and `model` what `scheduler` chooses.

        `clocks` are the curves of target and draft model in seconds, told of every pass that is timed.
        `on_step` is told of every step.
        """
        self._scheduler = scheduler
        policy = scheduler.policy
        self._suffix = suffix if policy.suffix or policy.staged else None
        self._model = model if policy.model else None
        self._is_eog = lru_cache(maxsize=4096)(is_eog)
        self._target_clock, self._draft_clock = clocks
        self._on_step = on_step
        self.n_max = MAX_GAMMA if policy.gamma is None else policy.gamma
        self._sampled = False
        self._steps_to_wake = 0
        self._n_timeline = self._n_prompt = 0
        self._draft_s = 0.0
        self._now = ChainStep()
        self._offers: list[_Offer] = []
        self._totals: dict[Source, tuple[int, int]] = {}
        self._n_passes = 0

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Start on a new timeline."""
        self._sampled = sampled
        self._n_prompt = len(tokens) - 1
        self._scheduler.begin(len(tokens), n_predict)
        if self._suffix:
            self._suffix.begin(tokens)
        if self._model:
            self._model.begin()
        # Whether the draft model is worth waking shows in the first steps; asked for, it is woken at once.
        policy = self._scheduler.policy
        self._steps_to_wake = _WAKE_AFTER if policy.suffix and policy.gamma is None else 0
        self._now = ChainStep()
        self._wake(tokens)

    def draft(
        self,
        tokens: Sequence[int],
        room: int,
        sampler: _core.Sampler,
        recent: Callable[[Sequence[int]], Tokens],
        coins: Callable[[int], list[float]],
    ) -> Draft:
        """Propose up to `room` tokens, none after an end-of-generation token."""
        started = time.perf_counter()
        scheduler, model = self._scheduler, self._model
        self._n_timeline = len(tokens)
        self._now = now = ChainStep(unit=scheduler.unit)
        self._offers = []
        room = min(room, self.n_max)
        if model:
            room = min(room, model.n_ctx // 2 - 1)
        drafted: list[int] = []
        offer = self._offer(drafted, room)
        now.offered = offer.chances
        if model:
            model.make_room(len(tokens) + max(room, 0))
            self._wake(tokens, sampler)
            now.n_unread = model.n_unread(len(tokens))
        scheduler.start_step(len(tokens), offer.chances, n_draft=model.n_past if model else 0)
        now.rate = scheduler.rate
        path = 1.0
        bucket = 0
        after_model = False
        while len(drafted) < room:
            n_unread = model.n_unread(len(tokens) + len(drafted)) if model else 0
            choice = scheduler.next(
                path, len(drafted), n_unread, offer.chances, bucket, after_model=after_model
            )
            after_model = False
            n_before = len(drafted)
            if isinstance(choice, TakeSuffix):
                path = self._take(offer, choice.n, drafted, path, sampler)
                offer = _Offer(len(drafted), [], [], [])  # what more there is was offered and not taken
            elif isinstance(choice, RunModel) and model and n_unread:
                guesses = offer.tokens[: min(choice.n_guesses, room - len(drafted) - 1)]
                path = self._run(
                    model,
                    tokens,
                    drafted,
                    guesses=guesses,
                    path=path,
                    next_bucket=bucket,
                    room=room,
                    sampler=sampler,
                    recent=recent,
                    coins=coins,
                )
                offer = self._offer(drafted, room - len(drafted))
                after_model = True
            if len(drafted) == n_before or self._is_eog(drafted[-1]):
                break
            bucket = now.proposed[-1].bucket
        self._draft_s = time.perf_counter() - started
        return Draft(drafted)

    def _offer(self, drafted: Sequence[int], room: int) -> _Offer:
        """Ask the suffix store what may follow `drafted`."""
        if self._suffix is None or room < 1:
            return _Offer(len(drafted), [], [], [])
        tokens, probabilities = self._suffix.offer(drafted, min(room, _OFFERED))
        buckets = [bucket_of(p) for p in probabilities]
        chance = self._scheduler.predictor.suffix.chance
        chances = [chance(depth, bucket) for depth, bucket in enumerate(buckets, len(drafted))]
        offer = _Offer(len(drafted), tokens, buckets, chances)
        self._offers.append(offer)
        return offer

    def _take(self, offer: _Offer, n: int, drafted: list[int], path: float, sampler: _core.Sampler) -> float:
        """Propose the first `n` offered tokens to the target; return P that the draft is accepted."""
        for token, bucket, chance in zip(offer.tokens[:n], offer.buckets, offer.chances, strict=False):
            if self._sampled:
                sampler.set_point(len(drafted), token)
            drafted.append(token)
            self._now.proposed.append(_Proposed(token, "suffix", chance, bucket))
            path *= chance
            if self._is_eog(token):
                break
        return path

    def _run(
        self,
        model: DraftModel,
        tokens: Sequence[int],
        drafted: list[int],
        *,
        guesses: Sequence[int],
        path: float,
        next_bucket: int,
        room: int,
        sampler: _core.Sampler,
        recent: Callable[[Sequence[int]], Tokens],
        coins: Callable[[int], list[float]],
    ) -> float:
        """Run the draft model once and propose its tokens; return P that the draft is accepted.

        Each token is drawn from the model's own distribution at its position. As long as it is the one
        that was guessed there, the distribution at the next position is at hand too. A position may be
        left out because of its distribution, before a token is drawn: never because of the token.
        """
        started = time.perf_counter()
        predictor = self._scheduler.predictor
        timeline = [*tokens, *drafted] if drafted else tokens
        n_read = model.n_unread(len(timeline)) + len(guesses)
        n_past = model.n_past
        rows = model.run(timeline, guesses)
        n_right = 0
        for i, row in enumerate(rows):
            depth = len(drafted)
            bucket = bucket_of(sampler.confidence(row))
            as_sampled = predictor.sampled.chance(depth, bucket)
            as_argmax = predictor.argmax.chance(depth, bucket)
            sampled = self._sampled and as_sampled > as_argmax
            chance = as_sampled if sampled else as_argmax
            if depth >= room or not self._scheduler.keeps(path * chance, depth, bucket):
                break
            coin = coins(1)[0] if sampled else 0.0
            token = sampler.sample(row, recent(drafted), coin, depth)
            top = sampler.top(depth)
            if not sampled:
                token = top
                sampler.set_point(depth, token)
            drafted.append(token)
            path *= chance
            source: Source = "sampled" if sampled else "argmax"
            self._now.proposed.append(_Proposed(token, source, chance, bucket, next_bucket, token == top))
            next_bucket = bucket
            if i == len(guesses):
                break
            if token != guesses[i] or self._is_eog(token):
                break
            n_right += 1
        model.trim(len(timeline) + n_right)
        self._now.passes.append((n_read, len(guesses)))
        if self._draft_clock:
            self._draft_clock.observe(n_read, n_past, time.perf_counter() - started)
        return path

    def accept(self, tokens: Sequence[int], outcome: Outcome) -> None:
        """Learn what became of the draft, and follow the timeline."""
        started = time.perf_counter()
        now = self._now
        n_drafted = len(now.proposed)
        if self._model:
            self._model.trim(len(tokens) - 1)
        if self._suffix:
            self._suffix.extend(outcome.emitted)
        self._learn(outcome)
        self._target_clock.observe(n_drafted + 1, self._n_timeline, outcome.verify_s)
        for depth, proposed in enumerate(now.proposed):
            drafted, accepted = self._totals.get(proposed.source, (0, 0))
            self._totals[proposed.source] = (drafted + 1, accepted + (depth < outcome.n_accepted))
        self._n_passes += len(now.passes)
        now.n_accepted, now.n_emitted = outcome.n_accepted, len(outcome.emitted)
        now.verify_s = outcome.verify_s
        now.draft_s = self._draft_s + time.perf_counter() - started
        self._scheduler.learn(len(outcome.emitted), now.draft_s + now.verify_s, n_drafted, now.passes)
        if self._on_step:
            self._on_step(now)

    def _learn(self, outcome: Outcome) -> None:
        predictor, emitted, n_accepted = self._scheduler.predictor, outcome.emitted, outcome.n_accepted
        for offer in self._offers:
            if n_accepted < offer.at:
                break
            # What was emitted tells of every offer, also of those that were not taken.
            for depth, token, bucket in zip(
                range(offer.at, len(emitted)), offer.tokens, offer.buckets, strict=False
            ):
                right = emitted[depth] == token
                predictor.suffix.learn(depth, bucket, right)
                if not right:
                    break
        for depth, proposed in enumerate(self._now.proposed[: n_accepted + 1]):
            if proposed.source == "suffix":
                continue
            label = float(depth < n_accepted)
            if depth < len(outcome.judged):
                p, q = outcome.judged[depth]
                label = min(1.0, p / q)
                if proposed.is_top and proposed.source == "sampled":  # what the point mass would have got
                    predictor.argmax.learn(depth, proposed.bucket, p)
            table = predictor.sampled if proposed.source == "sampled" else predictor.argmax
            table.learn(depth, proposed.bucket, label)
            predictor.next.learn(depth, proposed.next_bucket, label)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source, over the generation."""
        names: dict[Source, str] = {"suffix": "suffix", "sampled": "model", "argmax": "model"}
        found = dict.fromkeys(names.values(), (0, 0))
        for source, (drafted, accepted) in self._totals.items():
            so_far = found[names[source]]
            found[names[source]] = (so_far[0] + drafted, so_far[1] + accepted)
        return {name: counts for name, counts in found.items() if counts[0]}

    def note(self) -> str:
        """Say in one sentence why drafting was on or off."""
        return self._scheduler.explain(self.sources(), asleep=self._model is not None and not self._n_passes)

    def _wake(self, tokens: Sequence[int], sampler: _core.Sampler | None = None) -> None:
        """Let a draft model that has much unread catch up, if that will pay or is due as a test."""
        model, scheduler = self._model, self._scheduler
        if model is None:
            return
        n_unread = model.n_unread(len(tokens))
        n_read = 0
        self._steps_to_wake -= 1
        if self._steps_to_wake <= 0 and n_unread > ASLEEP:
            self._steps_to_wake = _WAKE_EVERY
            n_read = scheduler.worth_reading(n_unread)
        tested = not n_read and sampler is not None and len(tokens) - self._n_prompt > _FEWEST_TESTED
        if tested:
            n_read = scheduler.may_explore(n_unread)
        n_read = min(n_read, n_unread, model.n_ctx // 2)
        if not n_read:
            return
        if not tested and n_unread <= min(n_read + model.n_past, model.n_ctx // 2):
            n_read = n_unread  # rather than to forget what was read
        started = time.perf_counter()
        model.skip(len(tokens), n_read)
        n_tested = min(n_read - 2, len(tokens) - self._n_prompt, _TESTED)
        if sampler and n_tested > 0:
            self._test(model, tokens, n_tested, sampler)
        else:
            model.read(tokens)
        if self._draft_clock:
            self._draft_clock.observe_read(n_read, time.perf_counter() - started)
        self._now.n_woken = n_read
        if tested:
            self._time_pass(model, tokens)

    def _time_pass(self, model: DraftModel, tokens: Sequence[int]) -> None:
        """Time one pass: a cost that became too high would keep the model from ever running again."""
        n_past = model.n_past
        started = time.perf_counter()
        model.run(tokens)
        if self._draft_clock:
            self._draft_clock.observe(1, n_past, time.perf_counter() - started, rare=True)
        model.trim(len(tokens) - 1)

    def _test(self, model: DraftModel, tokens: Sequence[int], n_tested: int, sampler: _core.Sampler) -> None:
        """Read what is unread but for the last token, and see which of the last it would have drafted."""
        first = len(tokens) - n_tested
        predictor = self._scheduler.predictor
        for row, token in zip(model.run(tokens[:first], tokens[first:-1]), tokens[first:], strict=True):
            right = int(row.argmax()) == token
            predictor.argmax.learn(0, bucket_of(sampler.confidence(row)), right)
            predictor.next.learn(0, 0, right)
