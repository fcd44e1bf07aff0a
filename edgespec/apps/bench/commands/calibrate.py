"""`edgespec calibrate`: chooses the confidence threshold of `run --mode cascade`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from edgespec.apps.bench.commands.bench_options import ACCURACY, SuiteChoice, TokensOption
from edgespec.apps.bench.suites import evenly
from edgespec.cli.console import message, out
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import LOSSY, Compute, ModelChoice
from edgespec.cli.progress import WorkDisplay
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError, describe_os_error

if TYPE_CHECKING:
    from edgespec.apps.bench.teacher import TeacherScores
    from edgespec.decoding.choices import Signal
    from edgespec.decoding.options import Span
    from edgespec.engine.cascade import ThresholdChoice

_MOST_ROWS = 12


@option_group()
class CalibrationGoal:
    """The prompts, the loss that a cascade may have, and how long a woken target writes."""

    suite: SuiteChoice
    n_predict: TokensOption = 128
    loss: Annotated[
        float,
        typer.Option(help="Share of the tokens that may differ from the target's.", rich_help_panel=ACCURACY),
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


@shown("Measure", "edgespec calibrate --loss 0.05 --per-category 2")
@grouped
def calibrate_command(
    *,
    models: ModelChoice,
    aim: CalibrationGoal,
    compute: Compute,
    json: Annotated[bool, typer.Option("--json", help="Print the curves as JSON instead of tables.")] = False,
) -> int:
    """Find and keep the threshold below which a cascade wakes the target (`edgespec run --mode cascade`).

    The target answers the prompts alone, and the small model reads its answers: where it would have
    written something else, and how sure it was, gives the loss and the target's share for every threshold.
    """
    from edgespec.apps.bench.measure import read_answers
    from edgespec.apps.bench.teacher import SIGNALS
    from edgespec.decoding.options import SPAN, WakePolicy
    from edgespec.engine.cascade import check_storable, store_calibration
    from edgespec.platform.processes import SignalPipe

    if not 0.0 <= aim.loss < 1.0:  # nan too
        raise UsageError("must be 0 or more and below 1, such as 0.02", field="loss", value=f"{aim.loss:g}")
    text: Any = SPAN if aim.span is None else aim.span
    span = WakePolicy(span=int(text) if re.fullmatch("[0-9]{1,9}", f"{text}") else text).span  # checks it
    suite = aim.suite.load()
    names = models.pull("model", compute, writes=True)
    with (
        SignalPipe() as signals,
        compute.load_engine(EngineOptions(names, signals=signals)) as engine,
        WorkDisplay() as display,
    ):
        headers = engine.target.header, engine.draft_in_use.writer().header
        check_storable(*headers)
        asked, n_predict = [prompt.text for prompt in suite.prompts], aim.n_predict
        texts = read_answers(engine, asked, n_predict=n_predict, signals=signals, on_progress=display.show)
    choices = [_choice(texts, signal, span, aim.loss, suite.name) for signal in SIGNALS]
    try:
        file, reason = f"{store_calibration(*headers, choices)}", ""
    except OSError as error:  # what was measured is shown before
        file, reason = "", describe_os_error(error)
    if json:
        out.print(msgspec.json.encode({"file": file or None, "choices": choices}).decode())
    else:
        for choice in choices:
            _print_choice(choice)
        if file:
            out.print(file)
    for choice in choices:
        if choice.point.target_share == 1.0:
            message(
                f"warning: with {choice.signal} only the target alone keeps the loss within {aim.loss:.1%}: "
                "allow more with --loss, or give more prompts"
            )
    if not file:
        raise EdgespecError(f"the calibration could not be kept: {reason}")
    return 0


def _choice(
    texts: Sequence[TeacherScores], signal: Signal, span: Span, loss: float, suite: str
) -> ThresholdChoice:
    from edgespec.apps.bench.teacher import choose, curve
    from edgespec.engine.cascade import ThresholdChoice

    points = curve(texts, signal, span)
    n_tokens = sum(len(marks.agrees) for marks in texts)
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return ThresholdChoice(
        signal, span, loss, choose(points, loss), points, suite, len(texts), n_tokens, date
    )


def _print_choice(choice: ThresholdChoice) -> None:
    from edgespec.apps.bench.commands.report import print_figures
    from edgespec.apps.bench.rows import NONE

    shown = {*evenly(choice.curve, _MOST_ROWS - 1), choice.curve[-1], choice.point}
    rows = [
        [
            f"{point.threshold:.3g}",
            f"{point.target_share:.0%}",
            f"{point.loss:.1%} ± {point.error:.1%}",
            NONE if point.kl is None else f"{point.kl:.4f}",
            "<- chosen" if point == choice.point else "",
        ]
        for point in choice.curve
        if point in shown
    ]
    headings = [">the target\nwrites", ">loss of\ntokens", ">KL, nats a token", ""]
    print_figures([[f">{choice.signal}", *headings], *rows])
    out.print(
        f"{choice.wake_policy}: the target writes {choice.point.target_share:.0%} of the tokens, "
        f"loss {choice.point.loss:.1%} of the tokens, {choice.asked:.1%} allowed "
        f"({choice.n_prompts} prompts, {choice.n_tokens} tokens; span {choice.span})"
    )
