"""`edgespec draft`: makes drafts for a model on this machine, lists, evaluates and removes them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from edgespec.cli.completion import complete_draft, complete_model
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.groups import grouped, option_group
from edgespec.cli.made_drafts import acceptance_text, described, full_table, sources_text
from edgespec.cli.options import TARGET, JsonOption, ThreadsAndKernels, read_number
from edgespec.cli.progress import LINE_EVERY, WorkDisplay, pull_named
from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.draft_records import best_first, draft_records
from edgespec.models.hub import format_size

if TYPE_CHECKING:
    from edgespec.apps.forge.evaluation import CandidateResult
    from edgespec.apps.forge.make import MakeResult
    from edgespec.apps.forge.request import DraftRequest, EvaluationSettings, StageContext


class StageDisplay(WorkDisplay):
    """The progress of the current stage: a bar in a terminal, elsewhere a line for each tenth."""

    def show_stage(self, stage: str, share: float, detail: str) -> None:
        """Show the progress of a stage."""
        if stage != self._last:
            self._next_line = LINE_EVERY
        self.show(stage, share, 1.0, f": {detail}" if detail else "")
        if detail and share >= self._next_line and not err.is_terminal:
            err.print(f"{stage}: {share:.0%}, {detail}")
            self._next_line += LINE_EVERY * ((share - self._next_line) // LINE_EVERY + 1)


# ---- options of `edgespec draft make` and `draft eval`, and what users write as numbers and sizes ----


_DATA, _TRAINING, _EVALUATION = "What it learns from", "Training", "Evaluation"
_LONGEST_WAIT_S = 30.0


@option_group()
class MakeOptions:
    """The target for which a draft is made, its name, and whether it is always kept."""

    target: Annotated[str | None, TARGET] = None
    name: Annotated[
        str | None, typer.Option(help="What it is to be called.", show_default="TARGET-head-TYPE")
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Keep it though it is no better, and replace one of that name.")
    ] = False
    until: Annotated[
        str | None,
        typer.Option(
            metavar="HH:MM",
            help="Stop at that time of the day, as Ctrl-C does; run the same command again to resume.",
            show_default="when it is done",
        ),
    ] = None


@option_group(_DATA)
class DataOptions:
    """The texts that the target writes."""

    data_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Tokens that the target is to have written, such as 200k; what it wrote for earlier drafts "
            "counts, but not with --prompts and --from-history.",
            show_default="200k for each hour of training, at least 20k; from mistakes, as many as they need",
        ),
    ] = None
    answer_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of each of its answers.")] = 400
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Most disk space for these texts and the target's hidden states along them."
        ),
    ] = "2GB"
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts or texts like yours, in addition to the built-in prompts; may be repeated.",
            show_default=False,
        ),
    ] = None
    from_history: Annotated[
        bool,
        typer.Option(
            "--from-history",
            help="Also your own earlier prompts, and first the places where drafts were rejected (`edgespec "
            "cache info`). They stay on this machine. The current head is trained on, and a guard decides: "
            "the new one must have more accepted on your latest texts and hardly less on built-in ones.",
        ),
    ] = False


@option_group(_TRAINING)
class TrainingOptions:
    """The training, and the drafts that are made of it."""

    hours: Annotated[float | None, typer.Option(metavar="H", help="Hours of training.", show_default="2")] = (
        None
    )
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Instead of hours: tokens of training, such as 1M.", show_default=False
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="The head that the training of a head starts from, such as one from another machine.",
            show_default="the last training's, or the best",
            autocompletion=complete_model,
        ),
    ] = None
    keep: Annotated[
        int | None, typer.Option(min=1, help="Size of the draft's vocabulary.", show_default="16384, or all")
    ] = None
    types: Annotated[str, typer.Option(help="Quantizations to try, with commas.")] = "q4_0,q8_0"


@option_group(_EVALUATION)
class EvaluationOptions:
    """How long an evaluation is: rounds, and tokens of an answer."""

    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all prompts.")] = 3
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", min=2, help="Tokens of an answer.")] = 64

    def settings(self, compute: ThreadsAndKernels, n_prompts: int = 6) -> EvaluationSettings:
        """Return the settings of an evaluation with `n_prompts` prompts."""
        from edgespec.apps.forge.request import EvaluationSettings
        from edgespec.platform.machine import default_threads

        threads = compute.threads or default_threads()
        return EvaluationSettings(self.n_predict, self.rounds, n_prompts, threads, compute.kernels)


def seconds_until(time_of_day: str, now: datetime) -> float:
    """Return the seconds from `now` until it is that time, such as "07:00". Raises UsageError."""
    try:
        wanted = time.fromisoformat(time_of_day)
    except ValueError:
        problem = "must be a time of the day, such as 07:00"
        raise UsageError(problem, field="until", value=time_of_day) from None
    then = now.replace(hour=wanted.hour, minute=wanted.minute, second=wanted.second, microsecond=0)
    return ((then - now).total_seconds() - 1) % 86_400 + 1  # that very minute is tomorrow's


@contextmanager
def _ended_by(ends: datetime | None) -> Iterator[threading.Event]:
    """Let SIGTERM, and the moment `ends`, end the command as Ctrl-C does; the event says which it was."""
    is_time = threading.Event()

    def wait(ends: datetime) -> None:
        # In short waits: a timer stands still while the machine is suspended.
        while (left_s := (ends - datetime.now()).total_seconds()) > 0:
            if is_over.wait(min(left_s, _LONGEST_WAIT_S)):
                return
        is_time.set()
        os.kill(os.getpid(), signal.SIGTERM)

    is_over = threading.Event()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if ends:
            threading.Thread(target=wait, args=(ends,), daemon=True).start()
        yield is_time
    finally:
        is_over.set()
        signal.signal(signal.SIGTERM, previous)


def _request(
    target: str,
    making: MakeOptions,
    data: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    compute: ThreadsAndKernels,
) -> DraftRequest:
    from edgespec.apps.bench.quantizations import parse_types
    from edgespec.apps.forge.request import DraftRequest

    asked: dict[str, Any] = {**vars(data), **vars(training)}
    for name in ("data_tokens", "tokens"):
        if asked[name] is not None:
            asked[name] = read_number(name, asked[name])
    asked["budget"] = read_number("budget", data.budget, is_size=True)
    asked["prompts"], asked["types"] = tuple(data.prompts or ()), tuple(parse_types(training.types, "types"))
    if training.hours is None and training.tokens is None:
        asked["hours"] = 2.0
    settings = evaluation.settings(compute)
    return DraftRequest(target=target, name=making.name, force=making.force, evaluation=settings, **asked)


@contextmanager
def _stages() -> Iterator[StageContext]:
    """Show the progress of the stages, and let signals end a running pass."""
    from edgespec.apps.forge.request import StageContext
    from edgespec.platform.processes import SignalPipe

    with SignalPipe() as signals, StageDisplay() as display:
        yield StageContext(on_progress=display.show_stage, on_message=message, signals=signals)


# ---- the commands ----


draft_app = typer.Typer(
    rich_help_panel="Models and drafts",
    no_args_is_help=True,
    help="Make drafts: small, fast models that propose for a larger one; list, evaluate and remove them.",
    epilog="Example: edgespec draft make --hours 2",
)


_Name = Annotated[str, typer.Argument(help="A name of `edgespec draft list`.", autocompletion=complete_draft)]


@draft_app.command(
    "make",
    epilog="Examples: `edgespec draft make --hours 2` · over night: `edgespec draft make -t my-7b.gguf "
    "--hours 5 --from-history --until 07:00`",
)
@grouped
def make_command(
    *,
    making: MakeOptions,
    data: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    compute: ThreadsAndKernels,
    json: JsonOption = False,
) -> None:
    """Make the draft that makes a model fastest on this machine; keep it if it beats the current one.

    The model writes texts; a head is trained on them (a block that continues from the model's hidden states),
    quantized, and evaluated by tokens a second. The best one is used from then on if none is named. The
    text stays the model's, exactly. Ctrl-C and SIGTERM stop it; run the same command again to resume.
    """
    from edgespec.apps.forge.draft_store import check_draft_name
    from edgespec.apps.forge.make import make, require_jax
    from edgespec.models.resolve import locate

    target = making.target or choose_models(None, None, "none")[0]
    request = _request(target, making, data, training, evaluation, compute)
    now = datetime.now()  # what is wrong is refused before anything is done
    ends = now + timedelta(seconds=seconds_until(making.until, now)) if making.until else None
    require_jax()  # before anything is downloaded, as all that can be refused by then
    if making.name:
        check_draft_name(making.name, replace=making.force or data.from_history)
    if training.start:
        locate(training.start)
    pull_named(target, choose_models(target, None)[1])
    with _ended_by(ends) as is_time, _stages() as context:
        try:
            made = make(request, context)
        except KeyboardInterrupt:
            message("what was written and trained is kept; run the same command again to resume")
            if is_time.is_set():
                return
            raise
    if made is None:
        message("nothing was rejected since the last training: there is nothing new to learn from")
    if json:
        out.print_json(data=made_document(made) if made else {"target": target, "kept": None})
    elif made:
        print_made(made)


@draft_app.command("list", epilog="Example: edgespec draft list --json")
def list_command(json: JsonOption = False) -> None:
    """List the drafts that were made here: for which file, from what, and what was measured of them."""
    drafts = draft_records(on_message=message)
    if json:
        out.print_json(data={"drafts": [described(draft) for draft in drafts]})
    elif drafts:
        print_table(full_table(drafts))
    else:
        out.print("no draft was made here yet; `edgespec draft make` makes one")


@draft_app.command(
    "eval",
    epilog="Examples: `edgespec draft eval my-draft` · `edgespec draft eval my-draft --suite human-eval`",
)
@grouped
def eval_command(
    name: _Name,
    *,
    target: Annotated[str | None, TARGET] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Evaluate on these prompts: default, human-eval, or a file in Spec-Bench's format (.jsonl).",
            show_default="prompts that it was not trained on",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="How many prompts, spread over the suite.")] = 12,
    evaluation: EvaluationOptions,
    compute: ThreadsAndKernels,
    json: JsonOption = False,
) -> None:
    """Evaluate a draft again: tokens a second with it, with the target's other draft, and with neither.

    Measurements with its own target replace those in its record.
    """
    from edgespec.apps.bench.suites import evenly, load_suite
    from edgespec.apps.forge.evaluation import evaluate_draft

    asked = None if suite is None else evenly(load_suite(suite).interleaved(), questions)
    settings = evaluation.settings(compute, questions)
    with _stages() as context:
        target_name, mine, other = evaluate_draft(name, target, asked, settings, context)
    if json:
        document = {"target": target_name, "draft": _document(mine), "other": other and _document(other)}
        out.print_json(data=document)
    else:
        out.print(f"for {target_name}")
        print_table(_table([(one.candidate.name, one) for one in (mine, other) if one]))


@draft_app.command("remove", epilog="Example: edgespec draft remove my-draft --data")
def remove_command(
    name: _Name,
    data: Annotated[
        bool,
        typer.Option("--data", help="Also the texts that its target wrote, and what is left of training."),
    ] = False,
) -> None:
    """Delete a draft that was made here: its file, its name and its record."""
    from edgespec.apps.forge.draft_store import delete_dataset, remove_draft

    record, gone = remove_draft(name)
    for path in gone:
        out.print(f"{path}: deleted")
    if data:
        folder, n_bytes = delete_dataset(record.target_name, record.target_sha256) if record else (None, 0)
        out.print(f"{folder}: deleted, {format_size(n_bytes)}" if folder else "its data is not here")


# ---- what is printed ----


def print_made(made: MakeResult) -> None:
    """Print the evaluation of each draft, and what became of the best."""
    from edgespec.apps.forge.make import LEAST_GAIN

    out.print(f"for {made.target_name}, from {sources_text(made.texts)}")
    if made.guard:
        out.print(str(made.guard))
        if made.kept is None:
            out.print(
                f"{made.beaten} is kept: neither all of the training nor a part of it had more accepted on "
                "your texts and hardly less on the built-in ones; --force keeps the new one"
            )
            return
    rows = [(one.candidate.name, one) for one in made.candidates]
    if made.before:
        rows.insert(0, (f"{made.before.candidate.name} (there now)", made.before))
    print_table(_table(rows))
    faster = "faster" if made.gain >= 0 else "slower"
    verdict = f"{made.best} is {abs(made.gain):.1%} {faster} than {made.beaten}"
    if made.kept is None:
        out.print(
            f"nothing is kept: {verdict}, and less than {LEAST_GAIN:.0%} is not told from noise; "
            "--force keeps it"
        )
        return
    out.print(verdict)
    out.print(f"kept: {made.path}")
    rivals = best_first(one for one in draft_records() if one.target_sha256 == made.kept.target_sha256)
    used = rivals[0].name if rivals else made.kept.name
    when = "from now on" if used == made.kept.name else f"with --draft {made.kept.name}; else {used} does"
    out.print(f"it drafts for {made.target_name} {when}; `edgespec draft remove {made.kept.name}` removes it")


def made_document(made: MakeResult) -> dict[str, Any]:
    """Return the outcome as a JSON object, raw runs included."""
    trained = {
        "n_tokens": made.trained.n_tokens,
        "hours": made.trained.elapsed_s / 3600,
        "acceptance": made.trained.acceptance.by_position,
        "curve": [(n, seconds / 3600, one.by_position) for n, seconds, one in made.trained.history],
    }
    return {
        "target": made.target_name,
        "texts": made.texts,
        "before": made.before and _document(made.before),
        "candidates": [
            {"label": one.candidate.name, "trained": trained, **_document(one)} for one in made.candidates
        ],
        "best": made.best,
        "beaten": made.beaten,
        "gain": made.gain,
        "share": made.share,
        "guard": made.guard and msgspec.to_builtins(made.guard),
        "kept": made.kept and described(made.kept),
        "path": str(made.path) if made.path else None,
    }


def _table(rows: list[tuple[str, CandidateResult]]) -> Table:
    from edgespec.apps.bench.rows import shown, with_interval

    table = Table("draft", box=None, pad_edge=False)
    for title in ("size", "c", "accepted", "greedy [95 %]", "at 0.8 [95 %]", "rounds"):
        table.add_column(title, justify="right")
    for name, one in rows:
        timing = one.timing
        table.add_row(
            name,
            format_size(one.size) if one.size else "-",
            *((f"{timing.cost_ratio:.2f}", acceptance_text(timing.acceptance)) if timing else ("-", "-")),
            *(shown(speedup.speedup, with_interval) for speedup in (one.greedy, one.sampled)),
            str(one.rounds),
        )
    return table


def _document(judged: CandidateResult) -> dict[str, Any]:
    timing = judged.timing
    return {
        "name": judged.candidate.name,
        "size": judged.size,
        "cost_ratio": timing and timing.cost_ratio,
        "acceptance": list(timing.acceptance) if timing else None,
        "greedy": msgspec.to_builtins(judged.greedy.speedup),
        "sampled": msgspec.to_builtins(judged.sampled.speedup),
        "rounds": judged.rounds,
        "runs": msgspec.to_builtins(judged.runs),
    }
