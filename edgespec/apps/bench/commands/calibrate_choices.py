"""Chooses the thresholds of `edgespec calibrate`, and prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from edgespec.apps.bench.humaneval import Problem, ProblemResult
from edgespec.apps.bench.tradeoff import best_curve, candidates, choose, problem_point, solved
from edgespec.cli.console import out, print_table
from edgespec.cli.progress import WorkDisplay
from edgespec.decoding.choices import Signal
from edgespec.decoding.options import Span, Waking
from edgespec.engine.engine import Engine
from edgespec.engine.lossy.calibration import LossMeasure, ThresholdChoice, ThresholdPoint
from edgespec.engine.lossy.teacher import TeacherScores
from edgespec.models.suites import evenly

_MOST_ROWS = 12


@dataclass(frozen=True, slots=True)
class CalibrationQuestions:
    """The questions that the target answers."""

    suite: str
    """Name of the suite that the prompts are from."""
    prompts: list[str]
    n_predict: int
    problems: list[Problem]
    """HumanEval's problems, if the prompts are theirs: the loss is then a share of problems, not tokens."""


class Calibrator:
    """Chooses thresholds by comparing the small model with the target's answers."""

    def __init__(
        self,
        engine: Engine,
        display: WorkDisplay,
        texts: Sequence[TeacherScores],
        questions: CalibrationQuestions,
        *,
        span: Span,
        loss: float,
    ) -> None:
        self._engine, self._display, self._texts, self._questions = engine, display, texts, questions
        self._problems, self._span, self._loss = questions.problems, span, loss
        self._solved: dict[Waking | None, list[ProblemResult]] = {}

    def choice(self, signal: Signal) -> ThresholdChoice:
        """Return the threshold of a signal, and its curve."""
        best, points = best_curve(self._texts, signal, self._span, self._loss)
        measure: LossMeasure = "tokens"
        if self._problems:
            measure = "pass@1"
            points = tuple(self._by_problems(signal, one) for one in candidates(points))
            best = choose(points, self._loss, surely=False)
        return ThresholdChoice(
            signal=signal,
            span=self._span,
            measure=measure,
            asked=self._loss,
            point=best,
            curve=points,
            suite=self._questions.suite,
            n_prompts=len(self._texts),
            n_tokens=sum(len(marks.agrees) for marks in self._texts),
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
        )

    def _by_problems(self, signal: Signal, tokens: ThresholdPoint) -> ThresholdPoint:
        """Return a point of the curve of tokens as measured by HumanEval."""
        alone = self._judge(None, "HumanEval by the target alone")
        waking = Waking(signal, tokens.threshold, tokens.window, self._span)
        if tokens.target_share == 1.0:
            return problem_point(alone, alone, waking)
        judged = self._judge(waking, f"HumanEval, {waking}")
        return problem_point(alone, judged, waking)

    def _judge(self, waking: Waking | None, what: str) -> list[ProblemResult]:
        if waking not in self._solved:
            n = len(self._problems)
            self._display.show(what, 0, n)
            self._solved[waking] = solved(
                self._engine,
                self._problems,
                waking,
                on_progress=lambda done: self._display.show(what, done, n),
            )
        return self._solved[waking]


def as_json(file: Path | None, choices: Sequence[ThresholdChoice]) -> str:
    """Return the curves as one JSON object; `file` is where they are kept, if they are."""
    return msgspec.json.encode({"file": str(file) if file else None, "choices": choices}).decode()


def print_choice(choice: ThresholdChoice) -> None:
    """Print a choice, and some points of its curve."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    per = "tokens" if choice.measure == "tokens" else "problems"
    headings = (
        f"{choice.signal}",
        "over\ntokens",
        "the target\nwrites",
        f"loss of\n{per}",
        "KL, nats\na token",
        "",
    )
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if i == 5 else "right")
    for point in _spread(choice.curve, choice.point):
        table.add_row(
            f"{point.threshold:.3g}",
            str(point.window),
            f"{point.target_share:.0%}",
            f"{point.loss:.1%} ± {point.error:.1%}",
            "-" if point.kl is None else f"{point.kl:.4f}",
            "<- chosen" if point == choice.point else "",
        )
    print_table(table)
    out.print(
        f"{choice.waking}: the target writes {choice.point.target_share:.0%} of the tokens, "
        f"loss {choice.point.loss:.1%} of the {per}, {choice.asked:.1%} allowed "
        f"({choice.n_prompts} prompts, {choice.n_tokens} tokens; span {choice.span})"
    )
    out.print()


def _spread(curve: Sequence[ThresholdPoint], chosen: ThresholdPoint) -> list[ThresholdPoint]:
    """Return some points, evenly, the ends and the chosen one among them."""
    shown = {*evenly(curve, _MOST_ROWS - 1), curve[-1], chosen}
    return [point for point in curve if point in shown]
