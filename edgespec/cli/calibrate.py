"""`edgespec calibrate`: which confidence of the small model is worth what, for `run --mode cascade`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from edgespec.benchmark.humaneval import N_PREDICT, Judged, Problem, instruction, load_problems
from edgespec.benchmark.tradeoff import (
    LOSS,
    SIGNALS,
    best_curve,
    candidates,
    choose,
    problem_point,
    read_answers,
    solved,
)
from edgespec.choices import Signal
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.options import (
    CategoryOption,
    DraftOption,
    KernelsOption,
    PairOption,
    PerCategoryOption,
    SpanOption,
    SuiteOption,
    TargetOption,
    ThreadsOption,
    TokensOption,
    parse_span,
)
from edgespec.cli.progress import WorkDisplay, pull_chosen
from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.lossy.calibration import Choice, Measure, Point, calibration_path, store
from edgespec.lossy.teacher import Marks
from edgespec.options import SPAN, Span, Waking
from edgespec.platform.signals import SignalPipe
from edgespec.suites import DEFAULT, HUMAN_EVAL, evenly, load_suite

_ACCURACY = "Accuracy"
_PROBLEMS = 20
_MOST_ROWS = 12


def calibrate_command(
    *,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    loss: Annotated[
        float,
        typer.Option(
            help="Loss that is allowed: of tokens, or with --humaneval of problems.",
            rich_help_panel=_ACCURACY,
        ),
    ] = LOSS,
    span: SpanOption = None,
    suite: SuiteOption = DEFAULT,
    category: CategoryOption = None,
    per_category: PerCategoryOption = None,
    n_predict: TokensOption = 128,
    humaneval: Annotated[
        bool,
        typer.Option(
            "--humaneval",
            help="Count problems of HumanEval that are solved no more (in a sandbox, slow), not tokens.",
            rich_help_panel=_ACCURACY,
        ),
    ] = False,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Problems of it.", show_default=str(_PROBLEMS), rich_help_panel=_ACCURACY),
    ] = None,
    humaneval_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HumanEval.jsonl.gz.",
            show_default="the installed package's",
            rich_help_panel=_ACCURACY,
        ),
    ] = None,
    threads: ThreadsOption = None,
    kernels: KernelsOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the curves as JSON instead of tables.")] = False,
) -> int:
    """Find and keep the threshold below which a cascade wakes the target (`edgespec run --mode cascade`).

    The target answers the prompts alone, and the small model reads its answers: where it would have
    written something else, and how sure it was, gives the loss and the target's share for every threshold.
    """
    own_prompts = suite != DEFAULT or bool(category or per_category)
    _refuse(
        {
            "--pair and --target or --draft contradict each other: choose one": pair is not None
            and bool(target or draft),
            f"--loss {loss:g}: must be 0 or more and below 1, such as 0.02": not 0.0 <= loss < 1.0,
            "--problems and --humaneval-file need --humaneval: add it, or leave them out": not humaneval
            and bool(problems or humaneval_file),
            "--humaneval has its own prompts: leave out --suite, --category, --per-category": humaneval
            and own_prompts,
        }
    )
    wanted = SPAN if span is None else parse_span(span)
    questions: list[Problem] = []
    if humaneval:
        questions = evenly(load_problems(humaneval_file), problems or _PROBLEMS)
        prompts, name, n_predict = [instruction(one) for one in questions], HUMAN_EVAL, N_PREDICT
    else:
        chosen = load_suite(suite).select(category, per_category)
        prompts, name = [one.text for one in chosen.prompts], chosen.name
    target, draft = pull_chosen(pair, target, draft, "model")
    with SignalPipe() as signals:
        with err.status("loading the models"):
            engine = Engine(
                target,
                draft,
                n_threads=threads,
                kernels=kernels,
                signals=signals,
                on_message=message,
            )
        with engine, WorkDisplay() as display:
            small = engine.check_cascade()
            headers = engine.target.header, small.header
            calibration_path(*headers)  # raises now rather than in the end
            texts = read_answers(
                engine, prompts, n_predict=n_predict, signals=signals, on_progress=display.show
            )
            work = _Work(engine, display, texts, questions, span=wanted, suite=name, loss=loss)
            choices = [work.choice(signal) for signal in SIGNALS]
    try:
        file = store(*headers, choices)
    except OSError as error:
        raise EdgespecError(f"the calibration could not be kept: {describe_os_error(error)}") from None
    if json:
        facts = {"file": str(file), "choices": choices}
        out.print(msgspec.json.encode(facts).decode(), markup=False, soft_wrap=True, highlight=False)
    else:
        for choice in choices:
            _print(choice)
        out.print(str(file), markup=False)
    for choice in choices:
        if choice.point.target_share == 1.0:
            message(
                f"warning: with {choice.signal} only the target alone keeps the loss within {loss:.1%}: "
                "allow more with --loss, or give more prompts"
            )
    return 0


def _refuse(found: dict[str, bool]) -> None:
    for line, wrong in found.items():
        if wrong:
            raise UsageError(line)


class _Work:
    """What choices are made from."""

    def __init__(
        self,
        engine: Engine,
        display: WorkDisplay,
        texts: Sequence[Marks],
        problems: Sequence[Problem],
        *,
        span: Span,
        suite: str,
        loss: float,
    ) -> None:
        self._engine, self._display, self._texts, self._problems = engine, display, texts, problems
        self._span, self._suite, self._loss = span, suite, loss
        self._solved: dict[Waking | None, list[Judged]] = {}

    def choice(self, signal: Signal) -> Choice:
        """Return the threshold of a signal, and its curve."""
        best, points = best_curve(self._texts, signal, self._span, self._loss)
        measure: Measure = "tokens"
        if self._problems:
            measure = "pass@1"
            points = tuple(self._by_problems(signal, one) for one in candidates(points))
            best = choose(points, self._loss, surely=False)
        return Choice(
            signal=signal,
            span=self._span,
            measure=measure,
            asked=self._loss,
            point=best,
            curve=points,
            suite=self._suite,
            n_prompts=len(self._texts),
            n_tokens=sum(len(marks.agrees) for marks in self._texts),
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
        )

    def _by_problems(self, signal: Signal, tokens: Point) -> Point:
        """Return what HumanEval says of a point of the curve of tokens."""
        alone = self._judge(None, "HumanEval by the target alone")
        waking = Waking(signal, tokens.threshold, tokens.window, self._span)
        if tokens.target_share == 1.0:
            return problem_point(alone, alone, waking)
        judged = self._judge(waking, f"HumanEval, {waking}")
        return problem_point(alone, judged, waking)

    def _judge(self, waking: Waking | None, what: str) -> list[Judged]:
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


# ---- what it prints ----


def _print(choice: Choice) -> None:
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
        f"({choice.n_prompts} prompts, {choice.n_tokens} tokens; span {choice.span})",
        markup=False,
        highlight=False,
    )
    out.print()


def _spread(curve: Sequence[Point], chosen: Point) -> list[Point]:
    """Return some points, evenly, the ends and the chosen one among them."""
    shown = {*evenly(curve, _MOST_ROWS - 1), curve[-1], chosen}
    return [point for point in curve if point in shown]
