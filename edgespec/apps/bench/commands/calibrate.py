"""`edgespec calibrate`: chooses the confidence threshold of `run --mode cascade`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edgespec.apps.bench.commands.bench_options import ACCURACY, SuiteChoice, TokensOption
from edgespec.cli.console import message, out, print_table
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import LOSSY, Compute, ModelChoice, refuse_contradictions
from edgespec.cli.progress import WorkDisplay
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.suites import Suite, evenly

if TYPE_CHECKING:
    from edgespec.decoding.choices import Signal
    from edgespec.decoding.options import Span
    from edgespec.engine.lossy.calibration import ThresholdChoice, ThresholdPoint
    from edgespec.engine.lossy.teacher import TeacherScores

_MOST_ROWS = 12


@option_group()
class CalibrationGoal:
    """The loss that a cascade may have, and how long its target writes."""

    loss: Annotated[
        float,
        typer.Option(
            help="Share of the tokens that may differ from the target's.",
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
    """The prompts that the target answers, and the tokens it writes to each."""

    suite: SuiteChoice
    n_predict: TokensOption = 128


@shown("Measure", "edgespec calibrate --loss 0.05 --per-category 2")
@grouped
def calibrate_command(
    *,
    models: ModelChoice,
    aim: CalibrationGoal,
    prompts: CalibrationPrompts,
    compute: Compute,
    json: Annotated[bool, typer.Option("--json", help="Print the curves as JSON instead of tables.")] = False,
) -> int:
    """Find and keep the threshold below which a cascade wakes the target (`edgespec run --mode cascade`).

    The target answers the prompts alone, and the small model reads its answers: where it would have
    written something else, and how sure it was, gives the loss and the target's share for every threshold.
    """
    from edgespec.apps.bench.measure import read_answers
    from edgespec.decoding.options import SPAN
    from edgespec.engine.lossy.calibration import check_storable, store
    from edgespec.engine.lossy.teacher import SIGNALS
    from edgespec.platform.signals import SignalPipe

    refuse_contradictions(models.contradictions())
    if not 0.0 <= aim.loss < 1.0:  # nan too
        raise UsageError("must be 0 or more and below 1, such as 0.02", field="loss", value=f"{aim.loss:g}")
    span = SPAN if aim.span is None else parse_span(aim.span)
    suite = prompts.suite.load()
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
            [prompt.text for prompt in suite.prompts],
            n_predict=prompts.n_predict,
            signals=signals,
            on_progress=display.show,
        )
        choices = [_choice(texts, signal, span, aim.loss, suite) for signal in SIGNALS]
    file, reason = None, ""
    try:
        file = store(*headers, choices)
    except OSError as error:  # what was measured is shown before
        reason = describe_os_error(error)
    if json:
        found = {"file": str(file) if file else None, "choices": choices}
        out.print(msgspec.json.encode(found).decode())
    else:
        for choice in choices:
            _print_choice(choice)
        if file:
            out.print(str(file))
    _warn(choices, aim.loss)
    if file is None:
        raise EdgespecError(f"the calibration could not be kept: {reason}")
    return 0


def parse_span(text: str) -> Span:
    """Return a span as users write it. Raises UsageError."""
    if text == "rest":
        return "rest"
    if not (text.isascii() and text.isdecimal()) or not 1 <= len(text) <= 9 or int(text) < 1:
        raise UsageError("must be 1 or more, or rest", field="span", value=text)
    return int(text)


def _choice(
    texts: Sequence[TeacherScores], signal: Signal, span: Span, loss: float, suite: Suite
) -> ThresholdChoice:
    from edgespec.engine.lossy.calibration import ThresholdChoice
    from edgespec.engine.lossy.teacher import best_curve

    best, points = best_curve(texts, signal, span, loss)
    return ThresholdChoice(
        signal=signal,
        span=span,
        measure="tokens",
        asked=loss,
        point=best,
        curve=points,
        suite=suite.name,
        n_prompts=len(texts),
        n_tokens=sum(len(marks.agrees) for marks in texts),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def _print_choice(choice: ThresholdChoice) -> None:
    from edgespec.apps.bench.commands.tables import figures_table

    names = ("over\ntokens", "the target\nwrites", "loss of\ntokens", "KL, nats\na token", "")
    table = figures_table(choice.signal, *names, texts=0)
    table.columns[-1].justify = "left"
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
        f"loss {choice.point.loss:.1%} of the tokens, {choice.asked:.1%} allowed "
        f"({choice.n_prompts} prompts, {choice.n_tokens} tokens; span {choice.span})"
    )
    out.print()


def _spread(curve: Sequence[ThresholdPoint], chosen: ThresholdPoint) -> list[ThresholdPoint]:
    shown = {*evenly(curve, _MOST_ROWS - 1), curve[-1], chosen}
    return [point for point in curve if point in shown]


def _warn(choices: list[ThresholdChoice], loss: float) -> None:
    for choice in choices:
        if choice.point.target_share == 1.0:
            message(
                f"warning: with {choice.signal} only the target alone keeps the loss within {loss:.1%}: "
                "allow more with --loss, or give more prompts"
            )
