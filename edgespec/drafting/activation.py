"""When the draft model catches up with the sequence: it stays idle as long as that would not pay."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edgespec import _core
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.expected_gain import MAX_UNREAD
from edgespec.drafting.online_curve import OnlineCurve
from edgespec.drafting.predictor import bucket_of
from edgespec.drafting.scheduler import Scheduler

_FEWEST_PROBED, _PROBED = 8, 24  # tokens of the answer that an idle draft model is probed on
_FIRST_STEPS = 6  # before an idle draft model is considered
_STEPS_BETWEEN = 3  # two considerations


class Activation:
    """Activates one draft model during one generation."""

    def __init__(self, scheduler: Scheduler, model: DraftModel, clock: OnlineCurve | None) -> None:
        """Activate `model` when `scheduler` says so; `clock` is told of every pass that is timed."""
        self._scheduler = scheduler
        self._model = model
        self._clock = clock
        self._steps_left = 0  # before it is considered
        self._n_prompt = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Start on a sequence: a prompt and the token after it."""
        self._n_prompt = len(tokens) - 1
        starts_idle = self._model.starts_idle and not self._scheduler.needs_model
        self._steps_left = _FIRST_STEPS if starts_idle else 0
        self._model.begin(tokens)

    def activate(self, tokens: Sequence[int], sampler: _core.Sampler | None = None) -> int:
        """Let an idle model read what it has not, if that pays or a probe is due; return how many tokens."""
        model, scheduler = self._model, self._scheduler
        if not model.follows(len(tokens)):
            return 0
        n_unread = model.n_unread(len(tokens))
        n_read = 0
        self._steps_left -= 1
        if self._steps_left <= 0 and n_unread > MAX_UNREAD:
            self._steps_left = _STEPS_BETWEEN
            n_read = scheduler.n_to_prefill(n_unread)
        is_probe = not n_read and sampler is not None and len(tokens) - self._n_prompt > _FEWEST_PROBED
        if is_probe:
            n_read = scheduler.n_to_probe(n_unread)
            if n_read:
                scheduler.pay_for_probe(n_read)
        n_read = min(n_read, n_unread, model.n_ctx // 2)
        if not n_read:
            return 0
        if not is_probe and n_unread <= min(n_read + model.n_past, model.n_ctx // 2):
            n_read = n_unread  # rather than forget what was read
        started = time.perf_counter()
        model.skip(len(tokens), n_read)
        n_probed = min(n_read - 2, len(tokens) - self._n_prompt, _PROBED)
        if sampler and n_probed > 0:
            self._probe(tokens, n_probed, sampler)
        else:
            model.read(tokens)
        if self._clock:
            self._clock.observe_read(n_read, time.perf_counter() - started)
        if is_probe:
            self._time_pass(tokens)
        return n_read

    def _probe(self, tokens: Sequence[int], n_probed: int, sampler: _core.Sampler) -> None:
        """Read all but the last token, and learn which of the last ones the model would have drafted."""
        first = len(tokens) - n_probed
        predictor = self._scheduler.learned.predictor
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
