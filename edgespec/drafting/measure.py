"""Timing the passes of a pair of models: the curves of a profile, within a budget of time.

    read     128 tokens into one session of each model, 2048 into another
    sweep    each n, in each session: n tokens with all their logits, timed, and taken back
    sweep    ... again, as often as the budget allows: a machine that drifts does so for all n alike
    energy   where the processor counts it: passes of one n, one after another, over many of its ticks

What is too slow for that is measured less closely: fewer n, a shorter long context, and at least one sweep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from edgespec.drafting.costs import CONTEXTS, N_MAX, CostCurve
from edgespec.drafting.timings import ENERGY_SIZES, ModelTimings, TimedSession, spread_of
from edgespec.errors import EdgespecError
from edgespec.llama.batch import EmbeddingsFn
from edgespec.llama.lent_cache import LentCache, LentSession
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import draft_rollback, fits_in_memory, target_rollback
from edgespec.platform.metering import Meter
from edgespec.platform.other_load import MOST_OTHER_LOAD, OtherLoad
from edgespec.platform.signals import Cancellation

BUDGET_S = 80.0
"""Seconds that measuring may take; with loading the models it should end within 90."""

MOST_SPREAD = 0.15
"""Interquartile range over median of the repeats, above which a measurement is not relied on."""

_SIZES = (
    tuple(range(1, N_MAX + 1)),
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, N_MAX),
    ENERGY_SIZES,
)  # the n that are timed: the first that the budget allows
_FEWEST, _MOST = 3, 9  # sweeps: for quartiles, and as many as make medians steady
_READ_SHARE = 0.4  # of the budget, for reading the long context
_WARM_UP_SHARE = 0.1  # of the budget, for reading the short context twice
_READ_AT_ONCE = 512  # tokens, as a session reads a prompt
_SHORTEST_FAR = 2 * CONTEXTS[0]  # a slope over less would be noise
_NOTHING = 1e-9  # seconds, and joules, of reading with a head that reads no text
_ENERGY_S = 0.25  # the counters tick about every millisecond


@dataclass(frozen=True, slots=True)
class MeasureProgress:
    """How far a measurement is: the step under way, and seconds done of all."""

    what: str
    """The step under way, in words."""
    done_s: float
    total_s: float
    """Seconds, as it is expected now."""


MeasureProgressFn = Callable[[MeasureProgress], None]


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Measured costs of a pair's passes."""

    target: CostCurve
    """Seconds."""
    draft: CostCurve | None
    """Seconds; None without a draft."""
    target_joules: CostCurve | None
    """Joules of the processor packages and their memory; None where they cannot be counted."""
    draft_joules: CostCurve | None
    spread: float
    """Interquartile range over median of a pass's repeats, the median over all passes; 0 if not repeated."""
    reliable: bool
    warnings: tuple[str, ...]
    """One line for each reason not to rely on it."""
    sizes: tuple[int, ...]
    """The n that were timed; between them the curves are interpolated."""
    sweeps: int
    """Repeats of each."""


def measure(  # noqa: PLR0913 - the models, and how their passes are timed
    target: Model,
    draft: Model | None,
    *,
    n_threads: int,
    budget_s: float = BUDGET_S,
    on_progress: MeasureProgressFn = lambda _progress: None,
    signals: Cancellation | None = None,
    meter: Meter | None = None,
    draft_inputs: EmbeddingsFn | None = None,
) -> PairCosts:
    """Time the passes of `target` and `draft` with `n_threads` threads, in about `budget_s` seconds.

    The budget is only exceeded where reading the short context and a single sweep take longer. `signals`
    lets Ctrl-C end a pass under way. `meter`: only counters of energy are
    used, since sensors of power are too slow for a window of a quarter of a second. `draft_inputs` makes what
    the draft reads in place of tokens (`Engine.timed_inputs`).
    Raises EdgespecError for a model that cannot take tokens back or has too short a context, and when
    memory is short.
    """
    models = [target] if draft is None else [target, draft]
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
    with ExitStack() as stack:
        measurement = _Measurement(
            models,
            n_threads=n_threads,
            budget_s=budget_s,
            on_progress=on_progress,
            signals=signals,
            meter=meter if meter and meter.counts else None,
            draft_inputs=draft_inputs,
        )
        stack.callback(measurement.close)
        return measurement.run()


class _Measurement:
    """One measurement: what its steps share."""

    def __init__(
        self,
        models: Sequence[Model],
        *,
        n_threads: int,
        budget_s: float,
        on_progress: MeasureProgressFn,
        signals: Cancellation | None,
        meter: Meter | None,
        draft_inputs: EmbeddingsFn | None,
    ) -> None:
        self._models = models
        self._n_threads = n_threads
        self._budget_s = self._total_s = budget_s
        self._on_progress = on_progress
        self._signals = signals
        self._meter = meter
        self._draft_inputs = draft_inputs
        self._sessions = ExitStack()
        self._lent: LentSession | None = None  # of a draft in the target's cache
        self._energy_s = 0.0
        self._began = perf_counter()

    def run(self) -> PairCosts:
        load = OtherLoad()
        timings = self._read_contexts()
        contexts = [context for one in timings for context in one.contexts]
        sizes = self._plan(contexts)
        n_swept = self._sweep(contexts, sizes)
        self._count_energy(contexts)
        self._report("done", ended=True)

        spread = spread_of(contexts)
        warnings = _warnings(spread, n_swept, load.processors(), self._n_threads, self._budget_s)
        curves = [one.curve() for one in timings]
        joules = [one.joules_curve() for one in timings]
        with_draft = len(timings) > 1
        return PairCosts(
            target=curves[0],
            draft=curves[1] if with_draft else None,
            target_joules=joules[0],
            draft_joules=joules[1] if with_draft else None,
            spread=spread,
            reliable=not warnings,
            warnings=warnings,
            sizes=sizes,
            sweeps=n_swept,
        )

    def close(self) -> None:
        self._sessions.close()

    def _spent(self) -> float:
        return perf_counter() - self._began

    def _report(self, what: str, *, ended: bool = False) -> None:
        spent = self._spent()
        self._on_progress(MeasureProgress(what, spent, spent if ended else max(spent, self._total_s)))

    # ---- contexts ----

    def _read_contexts(self) -> list[ModelTimings]:
        near_lengths = [min(CONTEXTS[0], model.n_ctx_train - N_MAX) for model in self._models]
        timings = []
        for model, length in zip(self._models, near_lengths, strict=True):
            context, seconds, joules = self._open(model, length)
            if _NOTHING < seconds < _WARM_UP_SHARE * self._budget_s:
                # Read once more: the first time, buffers are made and pages of the file come in.
                context.session.clear()
                seconds, joules = self._fill(context)
            timings.append(ModelTimings([context], seconds / length, joules and joules / length))
        far = self._far_context(sum(one.read for one in timings))
        for model, one in zip(self._models, timings, strict=True):
            length = min(far, model.n_ctx_train - N_MAX)
            if length >= _SHORTEST_FAR:
                context, seconds, joules = self._open(model, length)
                one.contexts.append(context)
                one.read, one.read_joules = seconds / length, joules and joules / length
        return timings

    def _far_context(self, read_s: float) -> int:
        """Return the long context, in tokens: the whole, or what time and memory allow."""
        length = min(CONTEXTS[1], int(_READ_SHARE * self._budget_s / read_s))
        while length >= _SHORTEST_FAR:
            try:
                needs = [(model.header, min(length + N_MAX, model.n_ctx_train)) for model in self._models]
                fits_in_memory(needs, weights_loaded=True)
                break
            except EdgespecError:
                length //= 2
        return length

    def _open(self, model: Model, n_past: int) -> tuple[TimedSession, float, float | None]:
        """Return a context of `n_past` tokens, and the seconds and joules of reading them."""
        interrupt = self._signals.interrupt if self._signals else None
        is_target = model is self._models[0]
        if model.cells_of and self._lent:  # the target's session of this length was opened before
            return TimedSession(self._lent, n_past), _NOTHING, _NOTHING
        session = Session(
            model,
            n_ctx=n_past + N_MAX,
            n_batch=model.most_batch,
            n_threads=self._n_threads,
            n_logits_max=N_MAX,
            embeddings=None if is_target else self._draft_inputs,
            interrupt=interrupt,
            rollback=target_rollback(model.header) if is_target else draft_rollback(),
        )
        context, draft = TimedSession(self._sessions.enter_context(session), n_past), self._models[-1]
        if is_target and draft.cells_of:
            cache = LentCache(draft, session.cache, n_threads=self._n_threads, interrupt=interrupt)
            self._lent = LentSession(self._sessions.enter_context(cache), session)
        return context, *self._fill(context)

    def _fill(self, context: TimedSession) -> tuple[float, float | None]:
        tokens = [(101 + 7 * i) % context.session.model.n_vocab for i in range(context.n_past)]
        what = f"reading {len(tokens)} tokens"
        window, began = self._meter.begin() if self._meter else None, perf_counter()
        for start in range(0, len(tokens), _READ_AT_ONCE):
            self._report(what)
            context.session.eval(tokens[start : start + _READ_AT_ONCE], n_logits=0)
        return max(perf_counter() - began, 1e-9), window.end().joules if window else None

    # ---- passes ----

    def _plan(self, contexts: Sequence[TimedSession]) -> tuple[int, ...]:
        """Return which n to time, from a first timing."""
        many = sum(context.first_timed(N_MAX) for context in contexts)
        one = sum(context.first_timed(1) for context in contexts)

        def sweep_s(sizes: Sequence[int]) -> float:
            passes = sum(one + max(0.0, many - one) * (n - 1) / (N_MAX - 1) for n in sizes)
            return passes + one  # for n = 1 there is an untimed pass

        if self._meter and self._meter.available:
            self._energy_s = len(contexts) * len(ENERGY_SIZES) * _ENERGY_S + 2 * sweep_s(ENERGY_SIZES)
        left = self._left()
        sizes = next((s for s in _SIZES if _FEWEST * sweep_s(s) <= left), _SIZES[-1])
        self._expect(_MOST, sweep_s(sizes))
        return sizes

    def _left(self) -> float:
        return self._budget_s - self._energy_s - self._spent()

    def _expect(self, sweeps: int, sweep_s: float) -> bool:
        """Foresee up to `sweeps` more of `sweep_s` seconds; return whether there is time for one."""
        fit = min(sweeps, int(self._left() / sweep_s))
        self._total_s = self._spent() + max(1, fit) * sweep_s + self._energy_s
        return fit > 0

    def _sweep(self, contexts: Sequence[TimedSession], sizes: Sequence[int]) -> int:
        """Time all n in all contexts, again and again until the budget is spent; return how often."""
        longest = 0.0
        for turn in range(_MOST):
            if turn and not self._expect(_MOST - turn, longest):
                return turn
            began = self._spent()
            for i in range(len(sizes)):
                self._report("timing passes")
                n = sizes[(i + turn * len(sizes) // _MOST) % len(sizes)]
                for context in contexts:
                    if n == 1:  # passes of one follow one another in a draft, and use its graph again
                        context.timed(1)
                    context.seconds.setdefault(n, []).append(context.timed(n))
            longest = max(longest, self._spent() - began)
        return _MOST

    def _count_energy(self, contexts: Sequence[TimedSession]) -> None:
        for context in contexts:
            for n in ENERGY_SIZES:
                if self._meter is None or not self._meter.available:
                    return
                self._report("counting energy")
                window, passes, spent = self._meter.begin(), 0, 0.0
                while passes < 2 or spent < _ENERGY_S:
                    spent += context.timed(n)
                    passes += 1
                joules = window.end().joules
                if joules:
                    context.joules[n] = joules / passes


def _warnings(
    spread: float, sweeps: int, other_load: float | None, n_threads: int, budget_s: float
) -> tuple[str, ...]:
    found = []
    reasons = []
    idle = max(0, len(os.sched_getaffinity(0)) - n_threads)
    if spread > MOST_SPREAD:
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
