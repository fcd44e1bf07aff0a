"""The lossy mode: the small model answers alone, and the target is woken where the small one is unsure.

    small      token, token, ...       each from its own distribution, as long as it is sure
    unsure     the mean of entropy or margin (Signal) over the last tokens is past a threshold
    target     prefills what it has not read and writes a span of tokens, or the rest of the answer

The small model's tokens are never judged, so the text is not distributed as the target's own. `edgespec
calibrate` (calibration.py) measures what a threshold costs. A seed decides the text: each token takes one
coin, and the target's spans are `Generation`s of the match rule, whose text does not depend on drafts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.decoding.choices import Signal
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.generate import Generation
from edgespec.decoding.loop import DraftPrefill, Prefill, Task, unmarked
from edgespec.decoding.options import Waking
from edgespec.decoding.records import Logprobs, Origin, Step, StopReason, Tally
from edgespec.decoding.session import Rows
from edgespec.decoding.token_sequence import TokenSequence, TokenView
from edgespec.drafting.draft_model import DraftModel
from edgespec.llama.session import Session
from edgespec.platform.metering import Phase

_READ = 128  # tokens of the prompt that the small model reads between two looks at how far it is

_FARTHEST = np.float32(-1e4)
"""Least difference of a logit from the best one: its exp is 0, like that of -inf, but 0 * -inf is NaN."""


def signal_of(row: Rows, signal: Signal) -> float:
    """Return the margin or the entropy (nats) of raw logits, shape (n_vocab,); a token at -inf has none."""
    top = int(row.argmax())
    with np.errstate(invalid="ignore"):  # NaN among the logits: the sampler will report it
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
        """Add the signal of a position; return whether the target should write from there on."""
        threshold = self._waking.threshold
        assert threshold is not None  # noqa: S101 - for the type checker: resolved before
        self._last.append(value)
        mean = sum(self._last) / len(self._last)
        if self._waking.signal == "entropy":
            return mean >= threshold
        return threshold > 0.0 and mean <= threshold

    def forget(self) -> None:
        """Forget the tokens so far: the target has written others since."""
        self._last.clear()


class SmallModel(DraftModel):
    """The small model of a cascade: it writes, and drafts for the target's spans.

    It has read the sequence before a span begins.
    """

    def start(self) -> None:
        """Forget everything: nothing of the sequence is read yet."""
        super().begin()

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Keep what was read: the drafter begins, the sequence does not."""


@dataclass(frozen=True, slots=True)
class SoloStep:
    """The small model ran: it wrote a token that the target has not seen, or None, being unsure."""

    token: int | None
    seconds: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token, if it wrote one."""
        return () if self.token is None else (self.token,)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin "alone" of its token; empty without one."""
        return () if self.token is None else ("alone",)

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        """No logprobs: the target said nothing."""
        return ()

    def add_to(self, tally: Tally) -> None:
        """Add the time of the small model."""
        tally.draft_s += self.seconds


class Cascade:
    """One run of the lossy loop; iterate over `events()`. A Loop."""

    n_known = 0  # every prompt is read from its beginning

    def __init__(
        self,
        target: Session,
        small: SmallModel,
        prompt: Sequence[int],
        task: Task,
        *,
        drafter: Drafter | None = None,
        n_ctx: int | None = None,
    ) -> None:
        """Prepare to continue `prompt` with `small`, and with `target` where the task's `cascade` says so.

        `drafter` helps the target's spans (None: plainly), and may do so with `small`.
        `n_ctx` is where the context counts as full, by default the end of `target`'s.
        """
        waking, params = task.options.cascade, task.options.params
        assert waking is not None  # noqa: S101 - for the type checker
        self.stop_reason: StopReason = "interrupted"
        self.prompt_logprobs: tuple[Logprobs, ...] = ()  # not with a cascade
        self.mark: Callable[[Phase], None] = unmarked
        self.n_woken = 0
        """Times that the target was woken."""
        self.n_read = 0
        """Tokens that it prefilled then; none of them twice."""
        self.n_prompt_read = 0
        """Tokens of the prompt that the small model, which writes, has read."""
        self._target = target
        self._small = small
        self._drafter = drafter
        self._task = task
        self._sequence = TokenSequence(
            prompt, task.options, n_ctx=n_ctx or target.n_ctx, is_eog=target.model.is_eog
        )
        self._span: Generation | None = None
        """The target's generation under way; None: the small model writes."""
        self._waking = waking
        self._confidence = Confidence(waking)
        self._to_the_end = False
        self._sampler = params.sampler(target.model.n_vocab, 0, seed=task.coins.seed, vocabulary=target.model)
        # Drafted tokens in the small model's context, after the sequence.
        self._reserve = 1 + (drafter.n_max if drafter else 0)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was emitted."""
        return self._span.tokens if self._span else self._sequence.tokens

    @property
    def n_left(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        return self._sequence.n_left

    def events(self) -> Generator[Prefill | DraftPrefill | SoloStep | Step]:
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

    def _run(self) -> Generator[Prefill | DraftPrefill | SoloStep | Step]:
        self.mark("rest")
        started = time.perf_counter()
        if self._small_can_hold():
            tokens = self.tokens
            for n in range(_READ, len(tokens) + _READ, _READ):
                self._small.read(TokenView(tokens, n=min(n + 1, len(tokens))))
                self.n_prompt_read = min(n, len(tokens))
        self.mark("draft")
        yield DraftPrefill(time.perf_counter() - started)
        while not (end := self._sequence.end()):
            if self._small_can_hold() and not self._to_the_end:
                alone = self._alone()
                yield alone
                if alone.token is not None:
                    continue
            else:  # it would have to forget the prompt
                self._to_the_end = True
            yield from self._wake()
        self.stop_reason = end

    def _small_can_hold(self) -> bool:
        return len(self._sequence.tokens) + self._reserve <= self._small.n_ctx

    def _alone(self) -> SoloStep:
        self.mark("rest")
        started = time.perf_counter()
        row = self._small.run(self._sequence.tokens)[0]
        token = None
        if not self._confidence.lost(signal_of(row, self._waking.signal)):
            (coin,) = self._task.coins.take(1)
            token = self._sampler.sample(row, self._sequence.recent(), coin, -1)
            self._sequence.tokens.append(token)
        self.mark("draft")
        return SoloStep(token, time.perf_counter() - started)

    def _wake(self) -> Generator[Prefill | DraftPrefill | Step]:
        n = self._sequence.n_left
        if self._waking.span == "rest":
            self._to_the_end = True
        elif not self._to_the_end:
            n = self._waking.span if n is None else min(n, self._waking.span)
        options = replace(self._task.options, n_predict=n, cascade=None, n_logprobs=None)
        self._span = Generation(
            self._target,
            self._drafter,
            self._sequence.tokens,
            Task(options=options, rule="match", coins=self._task.coins),
            n_ctx=self._sequence.n_ctx,
            n_known=self._target.n_past,
        )
        self.n_woken += 1
        self.n_read += self._span.n_read
        self._span.mark = self.mark
        yield from self._span.events()
        self._sequence.tokens = self._span.tokens
        self._span = None
        self._confidence.forget()

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted of each source of drafts."""
        return self._drafter.sources() if self._drafter else {}

    def plain_rate(self) -> None:
        """Return None: the target's own speed is not known where the small model writes."""

    def note(self) -> str:
        """Say in one sentence how often the target was woken, why, and what it read."""
        if not self.n_woken:
            return f"the small model wrote alone: the target was never woken ({self._waking})"
        times = "once" if self.n_woken == 1 else f"{self.n_woken} times"
        return f"the target was woken {times} ({self._waking}) and read {self.n_read} tokens then"
