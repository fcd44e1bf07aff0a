"""`edgespec calibrate`: chooses the confidence threshold of `run --mode cascade`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.bench.commands.bench_options import (
    ACCURACY,
    HumanEvalFileOption,
    SuiteChoice,
    TokensOption,
)
from edgespec.cli.console import message, out
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import LOSSY, Compute, ModelChoice, refuse_contradictions
from edgespec.cli.progress import WorkDisplay
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.suites import DEFAULT, HUMAN_EVAL, evenly

if TYPE_CHECKING:
    from edgespec.apps.bench.commands.calibrate_choices import CalibrationQuestions
    from edgespec.decoding.options import Span
    from edgespec.engine.lossy.calibration import ThresholdChoice

_PROBLEMS = 20


@option_group()
class CalibrationGoal:
    """The loss that a cascade may have, and how long its target writes."""

    loss: Annotated[
        float,
        typer.Option(
            help="Loss that is allowed: of tokens, or with --humaneval of problems.",
            rich_help_panel=ACCURACY,
        ),
    ] = 0.02
    """Default loss: two of a hundred tokens may differ from the target's."""
    span: Annotated[
        str | None,
        typer.Option(
            metavar="N|rest",
            help="Tokens that the target writes in a cascade when it is woken, or all that are left.",
            show_default="16",
            rich_help_panel=LOSSY,
        ),
    ] = None


@option_group()
class CalibrationPrompts:
    """The prompts that the target answers."""

    suite: SuiteChoice
    n_predict: TokensOption = 128


@option_group(ACCURACY)
class HumanEvalOptions:
    """Problems of HumanEval in place of the suite."""

    humaneval: Annotated[
        bool,
        typer.Option(
            "--humaneval",
            help="Count problems of HumanEval that are solved no more (in a sandbox, slow), not tokens.",
        ),
    ] = False
    problems: Annotated[
        int | None, typer.Option(min=1, help="Problems of it.", show_default=str(_PROBLEMS))
    ] = None
    humaneval_file: HumanEvalFileOption = None


@shown("Measure", "edgespec calibrate --loss 0.05 --per-category 2")
@grouped
def calibrate_command(
    *,
    models: ModelChoice,
    aim: CalibrationGoal,
    prompts: CalibrationPrompts,
    humaneval: HumanEvalOptions,
    compute: Compute,
    json: Annotated[bool, typer.Option("--json", help="Print the curves as JSON instead of tables.")] = False,
) -> int:
    """Find and keep the threshold below which a cascade wakes the target (`edgespec run --mode cascade`).

    The target answers the prompts alone, and the small model reads its answers: where it would have
    written something else, and how sure it was, gives the loss and the target's share for every threshold.
    """
    from edgespec.apps.bench.commands.calibrate_choices import Calibrator, as_json, print_choice
    from edgespec.apps.bench.tradeoff import SIGNALS, read_answers
    from edgespec.decoding.options import SPAN
    from edgespec.engine.lossy.calibration import check_storable, store
    from edgespec.platform.signals import SignalPipe

    _check(models, aim, prompts, humaneval)
    span = SPAN if aim.span is None else parse_span(aim.span)
    questions = _questions(prompts, humaneval)
    names = models.pull("model", compute, writes=True)
    with (
        SignalPipe() as signals,
        compute.load_engine(names, signals=signals) as engine,
        WorkDisplay() as display,
    ):
        headers = engine.target.header, engine.check_cascade().header
        check_storable(*headers)
        texts = read_answers(
            engine,
            questions.prompts,
            n_predict=questions.n_predict,
            signals=signals,
            on_progress=display.show,
        )
        calibration = Calibrator(engine, display, texts, questions, span=span, loss=aim.loss)
        choices = [calibration.choice(signal) for signal in SIGNALS]
    file, reason = None, ""
    try:
        file = store(*headers, choices)
    except OSError as error:  # what was measured is shown before
        reason = describe_os_error(error)
    if json:
        out.print(as_json(file, choices))
    else:
        for choice in choices:
            print_choice(choice)
        if file:
            out.print(str(file))
    _warn(choices, aim.loss)
    if file is None:
        raise EdgespecError(f"the calibration could not be kept: {reason}")
    return 0


def _check(
    models: ModelChoice, aim: CalibrationGoal, prompts: CalibrationPrompts, humaneval: HumanEvalOptions
) -> None:
    """Raise UsageError for options that contradict each other or are outside their range."""
    suite = prompts.suite
    own_prompts = suite.suite != DEFAULT or bool(suite.category or suite.per_category)
    refuse_contradictions(models.contradictions())
    if not 0.0 <= aim.loss < 1.0:  # nan too
        raise UsageError("must be 0 or more and below 1, such as 0.02", field="loss", value=f"{aim.loss:g}")
    if not humaneval.humaneval and (humaneval.problems or humaneval.humaneval_file):
        raise UsageError("--problems and --humaneval-file need --humaneval: add it, or leave them out")
    if humaneval.humaneval and own_prompts:
        raise UsageError("--humaneval has its own prompts: leave out --suite, --category, --per-category")


def parse_span(text: str) -> Span:
    """Return a span as users write it. Raises UsageError."""
    if text == "rest":
        return "rest"
    if not (text.isascii() and text.isdecimal()) or not 1 <= len(text) <= 9 or int(text) < 1:
        raise UsageError("must be 1 or more, or rest", field="span", value=text)
    return int(text)


def _questions(prompts: CalibrationPrompts, humaneval: HumanEvalOptions) -> CalibrationQuestions:
    from edgespec.apps.bench.commands.calibrate_choices import CalibrationQuestions
    from edgespec.apps.bench.humaneval import N_PREDICT, instruction, load_problems

    if humaneval.humaneval:
        problems = evenly(load_problems(humaneval.humaneval_file), humaneval.problems or _PROBLEMS)
        return CalibrationQuestions(HUMAN_EVAL, [instruction(one) for one in problems], N_PREDICT, problems)
    suite = prompts.suite.load()
    return CalibrationQuestions(suite.name, [one.text for one in suite.prompts], prompts.n_predict, [])


def _warn(choices: list[ThresholdChoice], loss: float) -> None:
    for choice in choices:
        if choice.point.target_share == 1.0:
            message(
                f"warning: with {choice.signal} only the target alone keeps the loss within {loss:.1%}: "
                "allow more with --loss, or give more prompts"
            )
