"""The lossy mode: the small model answers alone, and the target is woken where the small one is unsure.

    small      token, token, ...       each from its own distribution, as long as it is sure
    unsure     a mean over the last tokens of entropy or margin (Signal) is past a threshold
    target     reads what it has not, writes a span of tokens, and gives back; or goes on to the end

What the small model wrote is never judged. So the text is not distributed as the target's own: `edgespec
calibrate` (calibration.py) measures what a threshold costs. For a seed the text is always the same: one coin
a token, and the target's spans are `Generation`s of the match rule, whose text does not depend on what was
drafted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.choices import Signal
from edgespec.decoding.drafter import Drafter, Tokens
from edgespec.decoding.generate import DraftPrefill, Generation, Prefill, unmarked
from edgespec.drafting.model import DraftModel
from edgespec.energy import Phase
from edgespec.llama.session import Rows, Session
from edgespec.options import Waking
from edgespec.records import Step, StopReason
from edgespec.sampling import Coins, SamplingParams

_FARTHEST = np.float32(-1e4)
"""Of a logit below the best one: its exp is 0, and 0 times it is no NaN, as it would be of -inf."""


def signal_of(row: Rows, signal: Signal) -> float:
    """Return the margin or the entropy (nats) of raw logits, shape (n_vocab,). -inf is no token at all."""
    top = int(row.argmax())
    with np.errstate(invalid="ignore"):  # of logits that are no numbers: the sampler says so
        shifted = np.maximum(row - row[top], _FARTHEST)
        weights = np.exp(shifted)
    total = float(weights.sum())
    if signal == "entropy":
        return math.log(total) - float((weights * shifted).sum()) / total
    weights[top] = 0.0
    return (1.0 - float(weights.max())) / total


class Confidence:
    """The mean of a signal over the last tokens, and whether it says to wake the target."""

    def __init__(self, waking: Waking) -> None:
        """Begin with no token; `waking` has a threshold."""
        self._waking = waking
        self._last: deque[float] = deque(maxlen=waking.window)

    def lost(self, value: float) -> bool:
        """Return whether the target is to write from the position on whose signal is `value`."""
        threshold = self._waking.threshold
        assert threshold is not None  # noqa: S101 - for the type checker: resolved before
        self._last.append(value)
        mean = sum(self._last) / len(self._last)
        if self._waking.signal == "entropy":
            return mean >= threshold
        return threshold > 0.0 and mean <= threshold

    def forget(self) -> None:
        """Begin anew: the target has written meanwhile."""
        self._last.clear()


class Ongoing(DraftModel):
    """The small model of a cascade: it goes on with the timeline when a span begins that it drafts for."""

    def start(self) -> None:
        """Forget everything: nothing of the timeline is read yet."""
        super().begin()

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Keep what was read: the drafter begins, the timeline does not."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The small model ran: it wrote a token that the target has not seen, or None, being unsure."""

    token: int | None
    seconds: float


class Cascade:
    """One run of the lossy loop; a Generation to its reader: iterate over `events()`."""

    def __init__(
        self,
        target: Session,
        small: Ongoing,
        prompt: Sequence[int],
        *,
        params: SamplingParams,
        coins: Coins,
        waking: Waking,
        drafter: Drafter | None = None,
        n_predict: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        """Prepare to continue `prompt` with `small`, and with `target` where `waking` says so.

        `drafter` helps the target's spans (None: plainly), and may do so with `small`.
        `n_ctx` is where the context counts as full, by default the end of `target`'s.
        """
        self._timeline = list(prompt)
        self._span: Generation | None = None
        """What writes now; None: the small model."""
        self.stop_reason: StopReason = "interrupted"
        self.waking = waking
        self.mark: Callable[[Phase], None] = unmarked
        """As of a Generation."""
        self.n_woken = 0
        """Times that the target was woken."""
        self.n_read = 0
        """Tokens that it read then: each of the timeline's once at most."""
        self._n_prompt = len(prompt)
        self._target = target
        self._is_eog = target.model.is_eog
        self._small = small
        self._drafter = drafter
        self._params = params
        self._coins = coins
        self._n_predict = n_predict
        self._n_ctx = n_ctx or target.n_ctx
        self._confidence = Confidence(waking)
        self._to_the_end = False
        self._sampler = params.sampler(target.model.n_vocab, 0)
        # What the drafter may put into the small model's context beside the timeline.
        self._reserve = 1 + (drafter.n_max if drafter else 0)

    @property
    def tokens(self) -> list[int]:
        """The timeline: the prompt and what was emitted."""
        return self._span.tokens if self._span else self._timeline

    def events(self) -> Generator[Prefill | DraftPrefill | Alone | Step]:
        """Run: a DraftPrefill, then an Alone for each pass of the small model, and the spans' own events."""
        self._target.clear()
        self._small.start()
        try:
            with self._small.blamed:
                yield from self._run()
        finally:
            n_known = len(self.tokens) - 1
            self._target.rewind(min(self._target.n_past, n_known))
            self._small.trim(n_known)

    def _run(self) -> Generator[Prefill | DraftPrefill | Alone | Step]:
        self.mark("rest")
        started = time.perf_counter()
        if self._small_can_hold():
            self._small.read(self._timeline)
        self.mark("draft")
        yield DraftPrefill(time.perf_counter() - started)
        while not self._finished():
            if self._small_can_hold() and not self._to_the_end:
                alone = self._alone()
                yield alone
                if alone.token is not None:
                    continue
            else:  # it would have to forget the prompt
                self._to_the_end = True
            yield from self._wake()

    def _small_can_hold(self) -> bool:
        return len(self._timeline) + self._reserve <= self._small.n_ctx

    def _alone(self) -> Alone:
        """Let the small model write a token, if it is sure of it."""
        self.mark("rest")
        started = time.perf_counter()
        row = self._small.run(self._timeline)[0]
        token = None
        if not self._confidence.lost(signal_of(row, self.waking.signal)):
            (coin,) = self._coins.take(1)
            token = self._sampler.sample(row, self._recent(), coin, -1)
            self._timeline.append(token)
        self.mark("draft")
        return Alone(token, time.perf_counter() - started)

    def _wake(self) -> Generator[Prefill | DraftPrefill | Step]:
        """Let the target read what it has not, and write."""
        n = None if self._n_predict is None else self._n_predict - self._n_emitted
        span = self.waking.span
        if span == "rest":
            self._to_the_end = True
        elif not self._to_the_end:
            n = span if n is None else min(n, span)
        n_known = self._target.n_past
        self.n_woken += 1
        self.n_read += len(self._timeline) - n_known
        self._span = Generation(
            self._target,
            self._drafter,
            self._timeline,
            params=self._params,
            coins=self._coins,
            rule="match",
            n_predict=n,
            n_ctx=self._n_ctx,
            n_known=n_known,
        )
        self._span.mark = self.mark
        yield from self._span.events()
        self._timeline = self._span.tokens
        self._span = None
        self._confidence.forget()

    def note(self) -> str:
        """Say in one sentence how often the target was woken, why, and what it read."""
        if not self.n_woken:
            return f"the small model wrote alone: the target was never woken ({self.waking})"
        times = "once" if self.n_woken == 1 else f"{self.n_woken} times"
        return f"the target was woken {times} ({self.waking}) and read {self.n_read} tokens then"

    @property
    def _n_emitted(self) -> int:
        return len(self.tokens) - self._n_prompt

    def _finished(self) -> bool:
        if self._n_emitted and self._is_eog(self.tokens[-1]):
            self.stop_reason = "eog"
        elif self._n_predict is not None and self._n_emitted >= self._n_predict:
            self.stop_reason = "length"
        elif len(self.tokens) >= self._n_ctx:
            self.stop_reason = "context"
        else:
            return False
        return True

    def _recent(self) -> Tokens:
        """Return what the penalties look back on."""
        if not self._params.uses_prefix:
            return np.empty(0, np.int32)
        last_n = self._params.penalty_last_n
        return np.asarray(self._timeline if last_n < 0 else self._timeline[-last_n:], np.int32)
