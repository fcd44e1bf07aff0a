"""Measures throughput: every prompt answered once, with 1, 2, 4, ... requests at a time in one engine.

    round 0   1 at once: T(1), plain, auto    2 at once: T(2), auto, plain    ...
    round 1   2 at once: T(2), plain, auto    4 at once: ...

All numbers have the same prompts, as many as the largest: those of smaller numbers follow when a text has
ended. In each round another number begins, and with each number another variant, so that a machine that
becomes slower slows all alike. T(n), the target's pass over n tokens, is timed too: n / T(n) is what n
texts would get in a second if each pass gave each its next token and nothing else took time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from edgespec.apps.bench.bench import (
    FEWEST_ROUNDS,
    BenchLimits,
    BenchProgress,
    BenchSettings,
    leaving_no_trace,
)
from edgespec.apps.bench.runs import PassTime, Throughput, rotated, text_hash
from edgespec.apps.bench.variants import PLAIN_VARIANT, Variant
from edgespec.decoding.options import Options
from edgespec.drafting.timings import TimedSession
from edgespec.engine.engine import Engine
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.session import Session
from edgespec.models.suites import Prompt
from edgespec.platform.closing import Closing

MOST_CLIENTS = 256
"""Most concurrent requests that may be asked for."""

_TIMED = 5  # passes a round whose median is T(n)

Measured = Throughput | PassTime


def parse_clients(text: str) -> tuple[int, ...]:
    """Return the numbers of concurrent requests in `text`, which commas separate, sorted.

    Raises UsageError.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    numbers = {int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 9}
    if not names or len(numbers) < len(names) or not all(1 <= n <= MOST_CLIENTS for n in numbers):
        problem = f"must be different numbers from 1 to {MOST_CLIENTS}, such as 1,2,4,8,16"
        raise UsageError(problem, field="clients", value=text)
    return tuple(sorted(numbers))


def prompts_for(prompts: Sequence[Prompt], clients: Sequence[int]) -> list[Prompt]:
    """Return as many of `prompts` as the largest of `clients`. Raises UsageError if there are too few."""
    n = max(clients)
    if len(prompts) < n:
        problem = f"only {len(prompts)} prompts are there, and each text needs its own; take a larger suite"
        raise UsageError(problem, field="clients", value=n)
    return [*prompts[:n]]


class Passes(Closing):
    """Times the target's passes over n tokens, after as many as the requests have on average."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], settings: BenchSettings) -> None:
        """Prefill that many tokens. Raises EdgespecError when memory is short."""
        most = max(settings.clients)
        n_read = statistics.median_low(len(engine.prompt_tokens(prompt.text)) for prompt in prompts)
        n_past = max(1, min(n_read + settings.n_predict // 2, engine.target.n_ctx_train - most))
        session = Session(engine.target, n_ctx=n_past + most, n_threads=engine.n_threads, n_logits_max=most)
        session.eval([(101 + 7 * i) % engine.target.n_vocab for i in range(n_past)], n_logits=0)
        self._context = TimedSession(session, n_past)

    def time(self, n: int, round_: int) -> PassTime:
        """Return T(n): the median of some passes, after one that is not counted."""
        self._context.timed(n)
        seconds = statistics.median(self._context.timed(n) for _ in range(_TIMED))
        return PassTime(n, round_, seconds)

    def close(self) -> None:
        """Free the session's cache."""
        self._context.session.close()


@dataclass(slots=True)
class _ClientRun:
    """A request under way."""

    prompt: Prompt
    stream: Stream
    began: float
    ttft_s: float | None = None


@dataclass(slots=True)
class _ConcurrentAnswers:
    """The requests of one measurement, `at_once` of them at a time."""

    engine: Engine
    variant: Variant
    settings: BenchSettings
    at_once: int
    round: int
    running: list[_ClientRun] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    n_tokens: int = 0

    def begin(self, prompt: Prompt) -> None:
        """Begin to answer a prompt together with the running requests."""
        began = time.perf_counter()
        engine, settings, variant = self.engine, self.settings, self.variant
        tokens = engine.prompt_tokens(prompt.text)
        if not engine.has_room(len(tokens), settings.n_predict):
            raise EdgespecError(
                f"no room for {self.at_once} texts at once (only {len(self.running)} of such prompts with "
                f"{settings.n_predict} tokens of answer); ask for fewer (--clients) or shorter ones (-n)"
            )
        options = Options(
            params=settings.params,
            seed=settings.seed + self.round,
            n_predict=settings.n_predict,
            drafter=variant.chosen,
            gamma=variant.gamma,
            rule=settings.rule,
        )
        stream = engine.stream(tokens, options)
        self.running.append(_ClientRun(prompt, stream, began))

    def step(self) -> None:
        self.engine.step()
        now = time.perf_counter()
        for one in [*self.running]:
            if one.stream.made() and one.ttft_s is None:
                one.ttft_s = now - one.began
            if one.stream.finished:
                self.running.remove(one)
                self._end(one, now)

    def _end(self, one: _ClientRun, now: float) -> None:
        ids = one.stream.result.token_ids
        self.n_tokens += len(ids)
        self.ttft_s.append(now - one.began if one.ttft_s is None else one.ttft_s)
        self.texts[one.prompt.id] = text_hash(ids)

    def close(self) -> None:
        for one in self.running:
            one.stream.close()


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    variant: Variant,
    settings: BenchSettings,
    *,
    at_once: int,
    round_: int = 0,
) -> Throughput:
    """Answer every prompt once in one variant, `at_once` at a time, as a new engine would.

    Raises EdgespecError if the engine has no room for that many.
    """
    engine.forget(tables=True)
    waiting = deque(prompts)
    answers = _ConcurrentAnswers(engine, variant, settings, at_once, round_)
    began = time.perf_counter()
    try:
        while waiting or answers.running:
            while waiting and len(answers.running) < at_once:
                answers.begin(waiting.popleft())
            answers.step()
        total_s = time.perf_counter() - began
    finally:
        answers.close()
    return Throughput(
        variant.name, at_once, round_, answers.n_tokens, total_s, tuple(answers.ttft_s), answers.texts
    )


def one_round(
    engine: Engine, prompts: Sequence[Prompt], settings: BenchSettings, passes: Passes, round_: int
) -> Iterator[Measured]:
    """Yield T(n) and a Throughput of every variant for each number of concurrent requests."""
    for place, n in enumerate(rotated(settings.clients, round_)):
        yield passes.time(n, round_)
        for variant in rotated((PLAIN_VARIANT, *settings.variants), round_ + place):
            yield answer(engine, prompts, variant, settings, at_once=n, round_=round_)


def warm_up(engine: Engine, prompts: Sequence[Prompt], settings: BenchSettings) -> None:
    """Begin to answer all prompts at once in every variant: this makes the buffers and reads the weights."""
    for variant in (PLAIN_VARIANT, *settings.variants):
        answers = _ConcurrentAnswers(engine, variant, settings, max(settings.clients), 0)
        try:
            for prompt in prompts:
                answers.begin(prompt)
            while any(one.ttft_s is None for one in answers.running):
                answers.step()
        finally:
            answers.close()


def measure_clients(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    *,
    limits: BenchLimits,
    on_measured: Callable[[Measured], None],
    on_progress: Callable[[BenchProgress], None] = lambda _progress: None,
) -> str:
    """Measure `limits.rounds` rounds, by default three, or until the budget is spent; return which, in words.

    `on_measured` gets each figure at once. Raises what the engine raises.
    """
    rounds = limits.rounds or FEWEST_ROUNDS
    n_all = len(settings.clients) * (1 + len(settings.variants))
    with leaving_no_trace(engine), Passes(engine, prompts, settings) as passes:
        began = last = time.monotonic()
        warm_up(engine, prompts, settings)
        longest = 0.0
        for round_ in range(rounds):
            done = 0
            for measured in one_round(engine, prompts, settings, passes, round_):
                on_measured(measured)
                if isinstance(measured, PassTime):
                    continue
                done += 1
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                on_progress(BenchProgress(round_, done, n_all, now - began))
                if now - began + longest > limits.budget_s and (round_, done) != (rounds - 1, n_all):
                    part = f"{done} of {n_all} figures of round {round_ + 1}"
                    return f"{part}; the budget of {limits.budget_s:g} s was spent"
    return f"{rounds} round{'s' if rounds > 1 else ''}"
