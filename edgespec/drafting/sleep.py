"""When the draft model reads the timeline: asleep while that would not pay, woken when it does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edgespec import _core
from edgespec.drafting.costs import OnlineCurve
from edgespec.drafting.gains import ASLEEP
from edgespec.drafting.model import DraftModel
from edgespec.drafting.predictor import bucket_of
from edgespec.drafting.scheduler import Scheduler

_FEWEST_TESTED, _TESTED = 8, 24  # tokens of the answer that an idle draft model is tested on
_WAKE_AFTER = 6  # steps
_WAKE_EVERY = 3  # steps between two looks at whether a sleeping draft model is worth waking


class Sleep:
    """The sleep of one draft model during one generation."""

    def __init__(self, scheduler: Scheduler, model: DraftModel, clock: OnlineCurve | None) -> None:
        """Wake `model` as `scheduler` says; `clock` is told of every pass that is timed."""
        self._scheduler = scheduler
        self._model = model
        self._clock = clock
        self._steps_to_wake = 0
        self._n_prompt = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Start on a timeline: a prompt and the token after it."""
        self._n_prompt = len(tokens) - 1
        # Whether the draft model is worth waking shows in the first steps; asked for, it is woken at once.
        waits = self._model.waits and not self._scheduler.needs_model
        self._steps_to_wake = _WAKE_AFTER if waits else 0
        self._model.begin(tokens)

    def wake(self, tokens: Sequence[int], sampler: _core.Sampler | None = None) -> int:
        """Let a model that has much unread catch up, if that will pay or is due as a test.

        Return how many tokens it read.
        """
        model, scheduler = self._model, self._scheduler
        if not model.follows(len(tokens)):
            return 0
        n_unread = model.n_unread(len(tokens))
        n_read = 0
        self._steps_to_wake -= 1
        if self._steps_to_wake <= 0 and n_unread > ASLEEP:
            self._steps_to_wake = _WAKE_EVERY
            n_read = scheduler.worth_reading(n_unread)
        tested = not n_read and sampler is not None and len(tokens) - self._n_prompt > _FEWEST_TESTED
        if tested:
            n_read = scheduler.may_test(n_unread)
            if n_read:
                scheduler.pay_for_test(n_read)
        n_read = min(n_read, n_unread, model.n_ctx // 2)
        if not n_read:
            return 0
        if not tested and n_unread <= min(n_read + model.n_past, model.n_ctx // 2):
            n_read = n_unread  # rather than forget what was read
        started = time.perf_counter()
        model.skip(len(tokens), n_read)
        n_tested = min(n_read - 2, len(tokens) - self._n_prompt, _TESTED)
        if sampler and n_tested > 0:
            self._test(tokens, n_tested, sampler)
        else:
            model.read(tokens)
        if self._clock:
            self._clock.observe_read(n_read, time.perf_counter() - started)
        if tested:
            self._time_pass(tokens)
        return n_read

    def _test(self, tokens: Sequence[int], n_tested: int, sampler: _core.Sampler) -> None:
        """Read what is unread but for the last token, and see which of the last it would have drafted."""
        first = len(tokens) - n_tested
        predictor = self._scheduler.learnt.predictor
        rows = self._model.run(tokens[:first], tokens[first:-1])
        for row, token in zip(rows, tokens[first:], strict=True):
            ((likeliest, probability),) = sampler.likeliest(row, 1, self._model.ids)
            predictor.argmax.learn(0, bucket_of(probability), likeliest == token)
            predictor.next.learn(0, 0, likeliest == token)

    def _time_pass(self, tokens: Sequence[int]) -> None:
        """Time one pass: a cost that became too high would keep the model from ever running again."""
        n_past = self._model.n_past
        started = time.perf_counter()
        self._model.run(tokens)
        if self._clock:
            self._clock.observe(1, n_past, time.perf_counter() - started, rare=True)
        self._model.trim(len(tokens) - 1)
