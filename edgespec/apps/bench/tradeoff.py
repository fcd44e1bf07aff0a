"""Measures what a cascade's threshold costs and saves, by the target's own answers or by HumanEval's tests.

    tokens    both models read the target's greedy answers (teacher.py): one pass gives every threshold
    pass@1    the cascade itself writes answers with some thresholds, and the sandbox runs them

The first is quick. It counts the tokens that the small model writes and that the target, after the same
tokens, would not have written. It cannot tell how the text continues after such a token: docs/cascade.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np

from edgespec.apps.bench.humaneval import Problem, ProblemResult, pass_at_1
from edgespec.apps.bench.runs import WorkProgressFn
from edgespec.decoding.choices import Signal
from edgespec.decoding.options import Span, Waking
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.lossy.calibration import ThresholdPoint
from edgespec.engine.lossy.cascade import Confidence
from edgespec.engine.lossy.teacher import TeacherForcing, TeacherScores
from edgespec.platform.signals import Cancellation

SIGNALS: tuple[Signal, ...] = get_args(Signal)

WINDOWS = (1, 2, 4, 8)
"""Numbers of tokens to average a signal over; each is tried."""

NEVER: dict[Signal, float] = {"margin": 0.0, "entropy": 100.0}
"""Thresholds with which the target is never woken."""
ALWAYS: dict[Signal, float] = {"margin": 1.0, "entropy": 0.0}
"""Thresholds with which the target writes everything."""

SHARES = (0.1, 0.25, 0.5, 0.75)
"""The target's shares of the tokens at which HumanEval is run, between small model alone and target alone."""

_N_THRESHOLDS = 32


# ---- of tokens ----


def read_answers(
    engine: Engine,
    prompts: Sequence[str],
    *,
    n_predict: int,
    signals: Cancellation | None = None,
    on_progress: WorkProgressFn = lambda _what, _done, _total: None,
) -> list[TeacherScores]:
    """Let the target answer `prompts` greedily and both models read the answers. `engine` has a draft."""
    assert engine.draft is not None  # noqa: S101 - for the type checker
    texts = []
    for i, prompt in enumerate(prompts):
        on_progress("the target answers", i, len(prompts))
        stream = engine.stream(prompt, params=SamplingParams(temperature=0.0), n_predict=n_predict)
        for _ in stream:
            pass
        n_prompt = stream.result.prompt_tokens
        texts.append((stream.tokens[:n_prompt], stream.tokens[n_prompt:]))
    found = []
    with TeacherForcing(
        engine.target,
        engine.draft,
        n_ctx=max(len(prompt) + len(answer) for prompt, answer in texts),
        n_threads=engine.n_threads,
        signals=signals,
    ) as teacher:
        for i, (tokens, answer) in enumerate(texts):
            on_progress("both models read the answers", i, len(texts))
            found.append(teacher.marks(tokens, answer))
    on_progress("both models read the answers", len(texts), len(texts))
    return found


def simulate(marks: TeacherScores, waking: Waking) -> tuple[int, int, float]:
    """Return the tokens that the small model gets wrong, those that the target writes, and the sum of the KL.

    The cascade's rule is applied along the target's answer in `marks`: while the target is awake it writes a
    span of tokens, and each token of the small model is judged as if the target had written all before it.
    """
    values = marks.margin if waking.signal == "margin" else marks.entropy
    confidence = Confidence(waking)
    n_wrong = n_target = at = 0
    kl = 0.0
    while at < len(values):
        if confidence.lost(values[at]):
            n = len(values) - at if waking.span == "rest" else min(waking.span, len(values) - at)
            n_target += n
            at += n
            confidence.forget()
        else:
            n_wrong += not marks.agrees[at]
            kl += marks.kl[at]
            at += 1
    return n_wrong, n_target, kl


def point(texts: Sequence[TeacherScores], waking: Waking) -> ThresholdPoint:
    """Return the loss and the savings of a threshold on these texts."""
    found = [simulate(marks, waking) for marks in texts]
    wrong = [n_wrong for n_wrong, _, _ in found]
    lengths = [len(marks.agrees) for marks in texts]
    n = sum(lengths)
    assert waking.threshold is not None  # noqa: S101 - for the type checker
    return ThresholdPoint(
        threshold=waking.threshold,
        window=waking.window,
        loss=sum(wrong) / n,
        error=ratio_error(wrong, lengths),
        target_share=sum(n_target for _, n_target, _ in found) / n,
        kl=math.fsum(kl for _, _, kl in found) / n,
    )


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float:
    """Return the standard error of sum(parts) / sum(wholes), with prompts, not tokens, as the sample.

    It is the linearised variance of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3). For
    one prompt, where it cannot be estimated, it is 0.
    """
    n, total = len(parts), sum(wholes)
    if n < 2:
        return 0.0
    ratio = sum(parts) / total
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    return math.sqrt(squares * n / (n - 1)) / total


def curve(
    texts: Sequence[TeacherScores], signal: Signal, span: Span, window: int
) -> tuple[ThresholdPoint, ...]:
    """Return points from the small model alone to the target alone, in order of the target's share."""
    values = [value for marks in texts for value in _means(getattr(marks, signal), window)]
    quantiles = np.quantile(values, np.linspace(0.0, 1.0, _N_THRESHOLDS + 2)[1:-1]).tolist()
    thresholds = {NEVER[signal], ALWAYS[signal], *(float(f"{value:.3g}") for value in quantiles)}
    points = (
        point(texts, Waking(signal, threshold, window, span))
        for threshold in sorted(thresholds, reverse=signal == "entropy")
        if threshold <= (1.0 if signal == "margin" else NEVER[signal])
    )
    return tuple(points)


def _means(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of the last `window` values up to it."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def choose(points: Sequence[ThresholdPoint], loss: float, *, surely: bool = True) -> ThresholdPoint:
    """Return the point with the fewest target tokens among those that lose no more than `loss`.

    `surely`: the standard error counts as lost too, so that no point is chosen by luck. `points` should
    contain the target alone, which loses nothing, so that there is always such a point.
    """
    good = [one for one in points if one.loss + (one.error if surely else 0.0) <= loss]
    return min(good, key=lambda one: (one.target_share, one.loss, one.window))


def best_curve(
    texts: Sequence[TeacherScores], signal: Signal, span: Span, loss: float
) -> tuple[ThresholdPoint, tuple[ThresholdPoint, ...]]:
    """Return the best point of all windows, and the curve of its window."""
    curves = [curve(texts, signal, span, window) for window in WINDOWS]
    best = choose([one for points in curves for one in points], loss)
    return best, next(points for points in curves if best in points)


# ---- of problems ----


def solved(
    engine: Engine,
    problems: Sequence[Problem],
    waking: Waking | None,
    on_progress: Callable[[int], None] = lambda _done: None,
) -> list[ProblemResult]:
    """Return which problems a cascade solves; with None, which the target alone solves."""
    found = []
    for judged in pass_at_1(engine, problems, cascade=waking):
        found.append(judged)
        on_progress(len(found))
    return found


def problem_point(
    alone: Sequence[ProblemResult], cascade: Sequence[ProblemResult], waking: Waking
) -> ThresholdPoint:
    """Return the loss and the savings of a threshold on HumanEval, compared with the target alone."""
    lost = [float(own.passed) - float(other.passed) for own, other in zip(alone, cascade, strict=True)]
    n_tokens = sum(judged.tokens for judged in cascade)
    assert waking.threshold is not None  # noqa: S101 - for the type checker
    return ThresholdPoint(
        threshold=waking.threshold,
        window=waking.window,
        loss=sum(lost) / len(lost),
        error=ratio_error(lost, [1.0] * len(lost)),
        target_share=sum(j.target_share * j.tokens for j in cascade) / n_tokens if n_tokens else 1.0,
    )


def candidates(points: Sequence[ThresholdPoint]) -> list[ThresholdPoint]:
    """Return the two ends of a curve of tokens, and between them the points nearest to `SHARES`."""

    def nearest(share: float) -> ThresholdPoint:
        return min(points, key=lambda one: abs(one.target_share - share))

    kept = {points[0], *map(nearest, SHARES), points[-1]}
    return sorted(kept, key=lambda one: one.target_share)
