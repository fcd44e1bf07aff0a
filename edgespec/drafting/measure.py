"""Timing the passes of a pair of models: the curves of a profile, within a budget of time.

    read     128 tokens into one session of each model, 2048 into another
    sweep    each n, in each session: n tokens with all their logits, timed, and removed
sweep    ... again, as often as the budget allows: a machine that drifts does so for all n alike
    energy   where the processor counts it: the watts of passes of each model, over many of its ticks

What is too slow for that is measured less closely: fewer n, a shorter long context, and at least one sweep.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

from edgespec._core import Interrupt
from edgespec.drafting.draft import Draft
from edgespec.drafting.draft_model import TimedSession
from edgespec.drafting.profile import CONTEXTS, N_MAX, CostCurve, interpolated
from edgespec.errors import EdgespecError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory, target_rollback
from edgespec.platform.machine import MOST_OTHER_LOAD, OtherLoad
from edgespec.platform.metering import Meter
from edgespec.platform.processes import Cancellation

_BUDGET_S = 80.0  # with loading the models it should end within 90
_MOST_SPREAD = 0.15  # of the repeats, above which a measurement is not relied on
_SIZES = (
    tuple(range(1, N_MAX + 1)),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, N_MAX),
    (1, 2, 4, 8, 16, N_MAX),
)  # the n that are timed: the first that the budget allows
_FEWEST, _MOST = 3, 9  # sweeps: for quartiles, and as many as make medians steady
_READ_SHARE = 0.4  # of the budget, for reading the long context
_WARM_UP_SHARE = 0.1  # of the budget, for reading the short context twice
_READ_AT_ONCE = 512  # tokens, as a session reads a prompt
_SHORTEST_FAR = 2 * CONTEXTS[0]  # a slope over less would be noise
_NOTHING = 1e-9  # seconds of reading with a head that reads no text
_ENERGY_S, _ENERGY_N = 0.25, 4  # of passes over so many tokens; the counters tick about every millisecond

ProgressFn = Callable[[str, float, float], None]
"""Told of each step: what it is, and the seconds done, of all that are expected now."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured costs of a pair's passes."""

    target: CostCurve
    draft: CostCurve | None
    """Seconds; None without a draft."""
    target_watts: float | None
    """Watts of the processor packages and their memory in its passes; None if they cannot be counted."""
    draft_watts: float | None
    spread: float
    """Interquartile range over median of a pass's repeats, the median over all passes; 0 if not repeated."""
    warnings: tuple[str, ...]
    """One line for each reason not to rely on it."""
    n_sizes: int
    """How many n were timed; between them the curves are interpolated."""
    sweeps: int
    """Repeats of each."""

    @property
    def reliable(self) -> bool:
        """Whether nothing disturbed the measurement: it has no warnings."""
        return not self.warnings


@dataclass
class _Filled:
    """A session that was filled to `n_past` tokens, and the times of its passes."""

    session: TimedSession
    n_past: int
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by n, of each sweep
    read: float = _NOTHING  # seconds of a token in prefill

    def timed(self, n: int) -> float:
        """Return the seconds of one pass over `n` tokens, which are removed afterwards."""
        tokens = [(11 + 13 * i) % self.session.model.n_vocab for i in range(n)]
        self.session.checkpoint()
        began = perf_counter()
        self.session.eval(tokens, n_logits=n)
        spent = max(perf_counter() - began, 1e-9)
        self.session.rewind(self.n_past)
        return spent

    def first_timed(self, n: int) -> float:
        """Return the best of three calls of `timed`, since the first warms up; slow ones are not repeated."""
        seconds = [self.timed(n)]
        while len(seconds) < 3 and sum(seconds) < 1.0:
            seconds.append(self.timed(n))
        return min(seconds)


def measure(
    target: Model,
    draft: Draft | None,
    *,
    n_threads: int,
    budget_s: float = _BUDGET_S,
    on_progress: ProgressFn = lambda _what, _done_s, _total_s: None,
    signals: Cancellation | None = None,
    meter: Meter | None = None,
) -> Measured:
    """Time the passes of `target`, and of the model of `draft` if it has one, with `n_threads` threads.

    It takes about `budget_s` seconds.

    The budget is only exceeded where reading the short context and a single sweep take longer. `signals`
    lets Ctrl-C end a pass under way. `meter`: only counters of energy are
    used, since sensors of power are too slow for a window of a quarter of a second.
    Raises EdgespecError for a model that cannot be rewound or has too short a context, and if memory
    is short.
    """
    models = [target, draft.model] if draft and draft.model else [target]
    for model in models:
        if not model.can_rewind:
            raise EdgespecError(
                f"{model.name} cannot take tokens back (architecture {model.header.architecture}): it is "
                "decoded plainly, which needs no profile"
            )
        if model.n_ctx_train <= 2 * N_MAX:
            raise EdgespecError(
                f"{model.name} was trained for {model.n_ctx_train} tokens: too few for a profile"
            )
    with ExitStack() as sessions:
        return _Measurement(
            models,
            draft,
            sessions,
            n_threads,
            budget_s,
            on_progress,
            signals.interrupt if signals else None,
            meter if meter and meter.counts else None,
        ).run()


@dataclass
class _Measurement:
    """The state that the steps of one measurement share."""

    models: Sequence[Model]
    draft: Draft | None
    sessions: ExitStack
    n_threads: int
    budget_s: float
    on_progress: ProgressFn
    interrupt: Interrupt | None
    meter: Meter | None
    target_session: Session = field(init=False)  # the last that was opened
    draft_session: TimedSession | None = None  # in its cache, of a draft that works there
    energy_s: float = 0.0
    began: float = 0.0

    def run(self) -> Measured:
        load, self.began = OtherLoad(), perf_counter()
        filled = self._read_contexts()
        everything = [one for contexts in filled for one in contexts]
        sizes = self._plan(everything)
        n_swept = self._sweep(everything, sizes)
        watts = [self._watts(contexts[0]) for contexts in filled]
        self._report("done", ended=True)
        spread = _spread(everything)
        curves = [_curve(contexts) for contexts in filled]
        with_draft = len(filled) > 1
        return Measured(
            target=curves[0],
            draft=curves[1] if with_draft else None,
            target_watts=watts[0],
            draft_watts=watts[1] if with_draft else None,
            spread=spread,
            warnings=_warnings(spread, n_swept, load.processors(), self.n_threads, self.budget_s),
            n_sizes=len(sizes),
            sweeps=n_swept,
        )

    def _spent(self) -> float:
        return perf_counter() - self.began

    def _report(self, what: str, *, ended: bool = False) -> None:
        spent = self._spent()
        self.on_progress(what, spent, spent if ended else max(spent, self.budget_s))

    # ---- contexts ----

    def _read_contexts(self) -> list[list[_Filled]]:
        """Return each model's sessions, the one of the shorter context first."""
        found = []
        for model in self.models:
            near = self._open(model, min(CONTEXTS[0], model.n_ctx_train - N_MAX))
            if near.read > _NOTHING and near.read * near.n_past < _WARM_UP_SHARE * self.budget_s:
                # Read once more: the first time, buffers are made and pages of the file come in.
                near.session.clear()
                self._fill(near)
            found.append([near])
        longest = self._longest(sum(contexts[0].read for contexts in found))
        for model, contexts in zip(self.models, found, strict=True):
            length = min(longest, model.n_ctx_train - N_MAX)
            if length >= _SHORTEST_FAR:
                contexts.append(self._open(model, length))
        return found

    def _longest(self, read_s: float) -> int:
        """Return the long context, in tokens: all of it, or as much as time and memory allow."""
        length = min(CONTEXTS[1], int(_READ_SHARE * self.budget_s / read_s))
        while length >= _SHORTEST_FAR:
            try:
                needs = [(model.header, min(length + N_MAX, model.n_ctx_train)) for model in self.models]
                fits_in_memory(needs, weights_loaded=True)
                break
            except EdgespecError:
                length //= 2
        return length

    def _open(self, model: Model, n_past: int) -> _Filled:
        n_ctx = n_past + N_MAX
        session: TimedSession
        if model is self.models[0] or not self.draft:
            session = self.target_session = Session(
                model,
                n_ctx=n_ctx,
                n_batch=model.most_batch,
                n_threads=self.n_threads,
                n_logits_max=N_MAX,
                interrupt=self.interrupt,
                rollback=target_rollback(model.header),
            )
            if self.draft and self.draft.in_target_cache:  # now, with nothing in it yet
                self.draft_session = self.draft.timed_session(self.target_session, n_ctx, self.interrupt)
        elif self.draft_session:
            session = self.draft_session
        else:
            session = self.draft.timed_session(self.target_session, n_ctx, self.interrupt)
        self.sessions.callback(session.close)
        filled = _Filled(session, n_past)
        if not session.n_past:  # else it works in what the target's session has read
            self._fill(filled)
        return filled

    def _fill(self, filled: _Filled) -> None:
        tokens = [(101 + 7 * i) % filled.session.model.n_vocab for i in range(filled.n_past)]
        began = perf_counter()
        for start in range(0, len(tokens), _READ_AT_ONCE):
            self._report(f"reading {len(tokens)} tokens")
            filled.session.eval(tokens[start : start + _READ_AT_ONCE], n_logits=0)
        filled.read = max(perf_counter() - began, 1e-9) / len(tokens)

    # ---- passes ----

    def _plan(self, contexts: Sequence[_Filled]) -> tuple[int, ...]:
        """Return which n to time, from a first timing."""
        many = sum(context.first_timed(N_MAX) for context in contexts)
        one = sum(context.first_timed(1) for context in contexts)

        def sweep_s(sizes: Sequence[int]) -> float:
            passes = sum(one + max(0.0, many - one) * (n - 1) / (N_MAX - 1) for n in sizes)
            return passes + one  # for n = 1 there is an untimed pass

        if self.meter and self.meter.available:
            self.energy_s = 2 * len(self.models) * _ENERGY_S
        left = self.budget_s - self.energy_s - self._spent()
        return next((sizes for sizes in _SIZES if _FEWEST * sweep_s(sizes) <= left), _SIZES[-1])

    def _sweep(self, contexts: Sequence[_Filled], sizes: Sequence[int]) -> int:
        """Time all n in all contexts, again and again until the budget is spent; return how often."""
        longest = 0.0
        for turn in range(_MOST):
            began = self._spent()
            if turn and began + longest + self.energy_s > self.budget_s:
                return turn
            for i in range(len(sizes)):
                self._report("timing passes")
                n = sizes[(i + turn * len(sizes) // _MOST) % len(sizes)]
                for context in contexts:
                    if n == 1:  # passes of one follow one another in a draft, and use its graph again
                        context.timed(1)
                    context.seconds.setdefault(n, []).append(context.timed(n))
            longest = max(longest, self._spent() - began)
        return _MOST

    def _watts(self, filled: _Filled) -> float | None:
        if self.meter is None or not self.meter.available:
            return None
        self._report("counting energy")
        window, began, passes = self.meter.begin(), perf_counter(), 0
        while passes < 2 or perf_counter() - began < _ENERGY_S:
            filled.timed(_ENERGY_N)
            passes += 1
        seconds, joules = perf_counter() - began, window.end().joules
        return joules / seconds if joules else None


def _curve(contexts: Sequence[_Filled]) -> CostCurve:
    """Return a model's curve through what was timed at one or two contexts, extended to those of all curves.

    A pass at the longer context takes no less than one at the shorter, since attention reads more there: a
    negative slope would be noise, which extrapolation would magnify.
    """
    near_at, far_at = contexts[0].n_past, contexts[-1].n_past
    near, far = (
        interpolated({n: statistics.median(times) for n, times in one.seconds.items()})
        for one in (contexts[0], contexts[-1])
    )
    scale = (CONTEXTS[1] - near_at) / (far_at - near_at) if far_at > near_at else 0.0
    extended = [a + max(0.0, b - a) * scale for a, b in zip(near, far, strict=True)]
    return CostCurve((tuple(near), tuple(extended)), contexts[-1].read)


def _spread(contexts: Sequence[_Filled]) -> float:
    """Return the median over all passes of (interquartile range / median); 0 if nothing was repeated."""
    spreads = []
    for times in (times for one in contexts for times in one.seconds.values() if len(times) > 1):
        low, median, high = statistics.quantiles(times, n=4)
        spreads.append((high - low) / median)
    return statistics.median(spreads) if spreads else 0.0


def _warnings(
    spread: float, sweeps: int, other_load: float | None, n_threads: int, budget_s: float
) -> tuple[str, ...]:
    found = []
    reasons = []
    idle = max(0, len(os.sched_getaffinity(0)) - n_threads)
    if spread > _MOST_SPREAD:
        reasons.append(f"repeats of a pass differ by {spread:.0%}")
    if other_load is not None and other_load > MOST_OTHER_LOAD + idle / 2:  # two may share a core
        reasons.append(f"other programs kept {other_load:.1f} processors busy")
    if reasons:
        found.append(
            f"the machine was busy: {' and '.join(reasons)}; "
            "stop other programs and run edgespec profile again"
        )
    if sweeps < _FEWEST:
        found.append(
            f"these models are too slow here to be measured {_FEWEST} times in {budget_s:g} s: "
            "take the figures as rough, or choose a smaller quantization"
        )
    return tuple(found)
