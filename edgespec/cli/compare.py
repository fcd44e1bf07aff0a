"""`edgespec compare`: a matrix of targets, drafts and kernels on one suite of prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, get_args

import typer

from edgespec.benchmark.accuracy import WINDOW
from edgespec.benchmark.bench import Settings
from edgespec.benchmark.compare import NO_DRAFT, ROUNDS, SUFFIX, Combination, Comparison, Plan, Progress
from edgespec.benchmark.humaneval import Problem, load_problems
from edgespec.benchmark.judge import TEXT_TOKENS, Judge
from edgespec.benchmark.machine import facts
from edgespec.benchmark.runs import Accuracy, Cell, Outcome, Solved
from edgespec.benchmark.ways import parse_ways
from edgespec.choices import KernelsChoice
from edgespec.cli.completion import complete_models
from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.cli.energy import know_idle
from edgespec.cli.options import (
    CategoryOption,
    PerCategoryOption,
    RuleOption,
    SeedOption,
    SuiteOption,
    TempOption,
    ThreadsOption,
    TokensOption,
    WattsOption,
    WaysOption,
)
from edgespec.cli.outputs import CsvOption, JsonOption, Outputs, PngOption, ReportOption
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.energy import EnergyMeter
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.quantizations import ModelFile, model_file, parse_types, variants
from edgespec.pair import default_threads
from edgespec.suites import DEFAULT, evenly, load_suite

_ACCURACY = "Accuracy"

_IDENTITY = ("processor", "usable processors", "energy", "edgespec", "llama-cpp-python", "llama.cpp")
"""The facts of a machine that runs in one table must share."""


def compare_command(
    *,
    targets: Annotated[
        str,
        typer.Option(
            metavar="A,B,...", help="Models that decide, with commas.", autocompletion=complete_models
        ),
    ],
    drafts: Annotated[
        str,
        typer.Option(
            metavar="C,D,...",
            help="Models that draft, with commas; none: the target alone, suffix: drafts without a model.",
            autocompletion=complete_models,
        ),
    ],
    quants: Annotated[
        str | None,
        typer.Option(
            metavar="q4_0,...",
            help="Each target in these quantizations; missing ones are made.",
            show_default="the targets as they are",
        ),
    ] = None,
    kernels: Annotated[
        str, typer.Option(metavar="auto,off", help="Kernels, with commas, as in `run`.")
    ] = "auto",
    ways: WaysOption = "auto",
    rule: RuleOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every cell is measured.")] = ROUNDS,
    threads: ThreadsOption = None,
    suite: SuiteOption = DEFAULT,
    category: CategoryOption = None,
    per_category: PerCategoryOption = None,
    n_predict: TokensOption = 128,
    temp: TempOption = 0.0,
    seed: SeedOption = 0,
    assume_watts: WattsOption = None,
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy/--no-accuracy",
            help="Compare each quantization's answers with the best one's, on a text.",
            rich_help_panel=_ACCURACY,
        ),
    ] = True,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The text.",
            show_default="the default suite's prompts",
            rich_help_panel=_ACCURACY,
        ),
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(min=WINDOW, help="Tokens of it, at most.", rich_help_panel=_ACCURACY)
    ] = TEXT_TOKENS,
    humaneval: Annotated[
        bool,
        typer.Option(
            "--humaneval",
            help="Run the programs that each target writes for HumanEval, in a sandbox: pass@1.",
            rich_help_panel=_ACCURACY,
        ),
    ] = False,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="Problems of HumanEval.", show_default="all 164", rich_help_panel=_ACCURACY),
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
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Where raw runs are kept; there it goes on if stopped."
        ),
    ] = Path("edgespec-compare"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is in DIR.")] = False,
    json: JsonOption = False,
    csv: CsvOption = None,
    report: ReportOption = None,
    png: PngOption = None,
) -> int:
    """Measure every pair of targets and drafts, each against its target alone, and their accuracy.

    Each cell has a process of its own, and its raw runs are written when it ends: after Ctrl-C or a crash the
    same command goes on. Cells that cannot run are named with the reason and left out.
    """
    outputs = Outputs(json, csv, report, png)
    outputs.check()
    _refuse_contradictions(
        {
            "--problems or --humaneval-file without --humaneval": not humaneval
            and bool(problems or humaneval_file),
            "--humaneval with --no-accuracy": humaneval and not accuracy,
            "--text with --no-accuracy": text is not None and not accuracy,
        }
    )
    settings = Settings(parse_ways(ways), n_predict, temp, seed, rule)
    if SUFFIX in _names(drafts, "--drafts") and all(way.needs_model for way in settings.ways):
        raise UsageError(f"--drafts {SUFFIX} and --ways {ways}: they need a draft model; add auto or suffix")
    choices = _kernels(kernels)
    types = parse_types(quants, "--quants") if quants is not None else []
    chosen = load_suite(suite).select(category, per_category)
    questions = _problems(humaneval_file, problems) if humaneval else []
    read = _text(text) if text else "\n\n".join(prompt.text for prompt in load_suite(DEFAULT).prompts)
    lineup = _lineup(_names(targets, "--targets"), _names(drafts, "--drafts"), types, out / "models")
    with EnergyMeter.choose(assume_watts=assume_watts, on_message=message) as meter:
        know_idle(meter)
        machine = {**facts(), "energy": meter.source or "unavailable"}
    n_threads = threads or default_threads()
    with err.status("hashing the models"):
        models = {name: file.facts() for name, file in lineup.files.items()}
    plan = Plan(
        models=models,
        combinations=tuple(
            Combination(target.name, draft, choice)
            for choice in choices
            for target in lineup.targets
            for draft in lineup.drafts
        ),
        prompts=chosen.interleaved(),
        settings=settings,
        rounds=rounds,
        n_threads=n_threads,
        assume_watts=assume_watts,
        machine={name: machine[name] for name in _IDENTITY if name in machine},
    )
    if fresh:
        Comparison.discard(out)
    comparison = Comparison(plan, {name: file.path for name, file in lineup.files.items()}, out)
    code, solved = 0, list[Solved]()
    warnings: list[str] = []
    accuracies: list[Accuracy] = []
    again = f"the same command{' without --fresh' if fresh else ''} goes on with what is in {out}"
    try:
        with WorkDisplay() as display:

            def show(progress: Progress) -> None:
                what = f"round {progress.round + 1}: {progress.combination.name}"
                display.show(what, progress.done, progress.total)

            comparison.run(show)
        for choice in choices if accuracy else []:
            with WorkDisplay() as display:
                judge = Judge(out, lineup.targets, models, choice, n_threads, display.show, warnings.append)
                found = judge.texts(read, text_tokens)
                if questions and choice == choices[0]:
                    found = judge.human_eval(found, questions, lineup.drafts_of(comparison.cells()))
                    solved = _solved(judge, plan, comparison.cells(), questions, lineup.files)
                accuracies += found.values()
    except KeyboardInterrupt:
        message(f"stopped; {again}")
        code = INTERRUPTED
    except OSError as error:
        message(f"stopped: {describe_os_error(error)}; {again}")
        code = EdgespecError.exit_code
    outcome = Outcome(
        kind="compare",
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine,
        settings={
            **settings.facts(),
            "rounds": rounds,
            "threads": n_threads,
            "accuracy text": str(text) if text else DEFAULT,
            "accuracy text sha256": hashlib.sha256(read.encode()).hexdigest(),
            "accuracy text tokens, at most": text_tokens,
        },
        suite={"name": chosen.name, "sha256": chosen.sha256, "prompts": chosen.categories},
        models=models,
        cells=comparison.cells(),
        accuracy=tuple(accuracies),
        solved=tuple(solved),
        warnings=(*comparison.warnings, *warnings),
    )
    outputs.write(outcome)
    for line in outcome.warnings:
        message(f"warning: {line}")
    return code


def _solved(
    judge: Judge,
    plan: Plan,
    cells: Sequence[Cell],
    questions: Sequence[Problem],
    files: Mapping[str, ModelFile],
) -> list[Solved]:
    """Return what ways that are not exact solve, with the kernels that the judge has."""
    ways = [way for way in plan.settings.ways if not way.exact]
    pairs = zip(plan.combinations, cells, strict=True)
    ran = [cell for combination, cell in pairs if combination.kernels == judge.kernels]
    return judge.ways(questions, ran, ways, list(files.values()))


def _refuse_contradictions(found: dict[str, bool]) -> None:
    for options, both in found.items():
        if both:
            raise UsageError(f"{options}: contradictory; add or leave out one of them")


@dataclass(frozen=True, slots=True)
class _Lineup:
    """The models that were asked for."""

    targets: list[ModelFile]
    drafts: list[str]
    """Names, or what stands in a draft's place."""
    files: dict[str, ModelFile]
    """All of them by name."""

    def drafts_of(self, cells: Sequence[Cell]) -> dict[str, ModelFile]:
        """Return for each target a draft model that ran with it, where one did."""
        pairs = {cell.target: cell.draft for cell in cells if cell.runs and cell.draft in self.files}
        return {target: self.files[draft] for target, draft in pairs.items() if draft}


def _lineup(targets: Sequence[str], drafts: Sequence[str], types: Sequence[str], folder: Path) -> _Lineup:
    """Find the models, pull what is missing, and make the quantizations that are."""
    drafting = [name for name in drafts if name not in (NO_DRAFT, SUFFIX)]
    pull_named(*targets, *drafting)
    # Names may be two spellings of one file.
    found = list(_by_name(_targets(targets, types, folder)).values())
    by_name = {name: model_file(name) for name in drafting}
    for name, file in by_name.items():
        if file.name in (NO_DRAFT, SUFFIX):
            raise UsageError(f"--drafts {name}: a draft model cannot be called {file.name}; rename the file")
    names = dict.fromkeys(by_name[name].name if name in by_name else name for name in drafts)
    return _Lineup(found, list(names), _by_name([*found, *by_name.values()]))


def _problems(file: Path | None, n: int | None) -> list[Problem]:
    found = load_problems(file)
    return evenly(found, n or len(found))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"--text {file}: not UTF-8 text; convert it first") from None
    except OSError as error:
        raise UsageError(f"--text {file}: {error.strerror}") from None


def _kernels(text: str) -> list[KernelsChoice]:
    chosen: list[KernelsChoice] = []
    for name in _names(text, "--kernels"):
        if name not in get_args(KernelsChoice):
            raise UsageError(f"--kernels {name}: must be one of {', '.join(get_args(KernelsChoice))}")
        chosen.append(name)  # type: ignore[arg-type] # one of them, as just checked
    return chosen


def _names(text: str, option: str) -> list[str]:
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    if not names:
        raise UsageError(f"{option}: name at least one")
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"{option}: {twice[0]} is named twice")
    return names


def _targets(names: Sequence[str], types: Sequence[str], folder: Path) -> list[ModelFile]:
    """Return the targets, in each of the quantizations if any are wanted; missing ones are made."""
    if not types:
        return [model_file(name) for name in names]
    found: list[ModelFile] = []
    with err.status("quantizing") as status:
        for name in names:
            found += variants(
                name, types, folder, on_making=lambda made: status.update(f"quantizing: {made}")
            )
    return found


def _by_name(files: Sequence[ModelFile]) -> dict[str, ModelFile]:
    """Return the files by name. Raises UsageError when two have the same one."""
    found: dict[str, ModelFile] = {}
    for file in files:
        other = found.setdefault(file.name, file)
        if other.path.resolve() != file.path.resolve():
            raise UsageError(f"two models are called {file.name}: {other.path} and {file.path}; rename one")
    return found
