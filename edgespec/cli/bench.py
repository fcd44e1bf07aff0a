"""`edgespec bench`: one pair against its target alone, on a suite of prompts."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from edgespec.benchmark.bench import BUDGET_S, PRECISION, Peer, Progress, Settings, measure, unfit
from edgespec.benchmark.machine import Watch, facts
from edgespec.benchmark.peers import LlamaCpp, LlamaCppPeer, context_for
from edgespec.benchmark.runs import Cell, Outcome, Run
from edgespec.benchmark.ways import parse_ways
from edgespec.choices import DrafterName
from edgespec.cli.console import INTERRUPTED, err, line_of, message
from edgespec.cli.energy import know_idle
from edgespec.cli.options import (
    CategoryOption,
    DraftOption,
    KernelsOption,
    PairOption,
    PerCategoryOption,
    RuleOption,
    SeedOption,
    SuiteOption,
    TargetOption,
    TempOption,
    ThreadsOption,
    TokensOption,
    WattsOption,
    WaysOption,
)
from edgespec.cli.outputs import CsvOption, JsonOption, Outputs, PngOption, ReportOption
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.energy import EnergyMeter
from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.quantizations import ModelFacts, model_file
from edgespec.models.registry import load_registry
from edgespec.pair import choose_models
from edgespec.platform.memory import peak_rss_bytes
from edgespec.platform.signals import SignalPipe
from edgespec.suites import DEFAULT, Suite, load_suite

_PEERS = "Peers"
_PEER_GAMMA = 3  # llama.cpp's default
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def bench_command(
    *,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    ways: WaysOption = "auto",
    rule: RuleOption = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time to measure, at most: seconds, or such as 10m.")
    ] = f"{BUDGET_S:g}",
    precision: Annotated[
        float,
        typer.Option(
            min=0, help="Stop when the speed-up's interval over the rounds is this share of it, or less."
        ),
    ] = PRECISION,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds at most.", show_default="as the budget allows")
    ] = None,
    threads: ThreadsOption = None,
    kernels: KernelsOption = "auto",
    suite: SuiteOption = DEFAULT,
    category: CategoryOption = None,
    per_category: PerCategoryOption = None,
    n_predict: TokensOption = 128,
    temp: TempOption = 0.0,
    seed: SeedOption = 0,
    assume_watts: WattsOption = None,
    peer: Annotated[
        Literal["llama.cpp"] | None,
        typer.Option(
            help="Run this one's own programs too, on the same files and prompts, in turns.",
            rich_help_panel=_PEERS,
        ),
    ] = None,
    bin_: Annotated[
        Path | None,
        typer.Option("--bin", metavar="DIR", help="Where its programs are.", rich_help_panel=_PEERS),
    ] = None,
    json: JsonOption = False,
    csv: CsvOption = None,
    report: ReportOption = None,
    png: PngOption = None,
) -> int:
    """Measure a pair against its target alone: speed, acceptance, joules, on a suite of prompts.

    Plain decoding and speculation take turns over each prompt, until the interval of the speed-up is tight
    or the budget is spent. Every number is explained in docs/measuring.md.
    """
    if pair is not None and (target or draft):
        raise UsageError("--pair and --target or --draft contradict each other: choose one")
    if (peer is None) != (bin_ is None):
        raise UsageError("--peer and --bin go together: --peer llama.cpp --bin DIR")
    outputs = Outputs(json, csv, report, png)
    outputs.check()
    settings = Settings(parse_ways(ways), n_predict, temp, seed, rule)
    budget_s = _seconds(budget)
    chosen = load_suite(suite).select(category, per_category)
    if pair is not None:
        named = load_registry().pair(pair)
        target, draft = named.target, named.draft
    drafter = _drafter(settings)
    if drafter == "suffix" and draft is not None and pair is None:
        raise UsageError(f"--draft and --ways {ways} contradict each other: choose one")
    target, draft = choose_models(target, draft, drafter)
    meter = EnergyMeter.choose(assume_watts=assume_watts, on_message=message)
    pull_named(target, draft)
    with meter, SignalPipe() as signals:
        know_idle(meter)
        with err.status("loading the models"):
            engine = Engine(
                target,
                draft,
                drafter=drafter,
                n_threads=threads,
                kernels=kernels,
                meter=meter,
                signals=signals,
                on_message=message,
            )
        with engine:
            peers = [] if bin_ is None else [_peer(bin_, engine, chosen, settings)]
            return _bench(
                engine,
                chosen,
                settings,
                budget_s=budget_s,
                precision=precision,
                rounds=rounds,
                peers=peers,
                outputs=outputs,
            )


def _bench(
    engine: Engine,
    suite: Suite,
    settings: Settings,
    *,
    budget_s: float,
    precision: float,
    rounds: int | None,
    peers: list[Peer],
    outputs: Outputs,
) -> int:
    """Measure, and print what was measured, also when Ctrl-C or a failure ends it early."""
    too_long = unfit(engine, suite.prompts, settings.n_predict)
    warnings = list(too_long.values())
    prompts = [prompt for prompt in suite.interleaved() if prompt.id not in too_long]
    if not prompts:
        raise EdgespecError(f"{warnings[0]}; no prompt is left")
    models = _models(engine)
    asked = {
        **settings.facts(),
        "threads": engine.n_threads,
        "budget_s": budget_s,
        "precision": precision,
        **({"peers": ", ".join(peer.name for peer in peers)} if peers else {}),
    }
    runs: list[Run] = []
    failure: EdgespecError | None = None
    code = 0
    watch = Watch(n_threads=engine.n_threads)
    with WorkDisplay() as display:

        def keep(run: Run) -> None:
            runs.append(run)
            watch.sample()

        def show(progress: Progress) -> None:
            detail = f", {progress.place + 1} of {progress.n_prompts} prompts"
            if progress.noise is not None:
                detail += f", interval {progress.noise:.1%}"
            display.show(f"round {progress.round + 1}", progress.spent_s, budget_s, detail)

        try:
            ended = measure(
                engine,
                prompts,
                settings,
                budget_s=budget_s,
                precision=precision,
                most_rounds=rounds,
                peers=peers,
                on_progress=show,
                on_run=keep,
                on_message=warnings.append,
            )
        except KeyboardInterrupt:
            ended, code = "interrupted", INTERRUPTED
        except EdgespecError as error:
            ended, failure = f"failed: {line_of(error)}", error
    if runs:
        n_answered = len({run.prompt for run in runs})
        if n_answered < len(prompts):
            warnings.append(
                f"only {n_answered} of {len(prompts)} prompts had their turn; give more time (--budget) or "
                "take fewer (--per-category)"
            )
        warnings += watch.warnings()
        cell = Cell(
            target=models[0].name,
            draft=models[1].name if len(models) > 1 else None,
            kernels=engine.kernels,
            runs=tuple(runs),
            peak_rss_bytes=peak_rss_bytes(),
        )
        outcome = Outcome(
            kind="bench",
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=facts(),
            settings={**asked, "ended": ended},
            suite={"name": suite.name, "sha256": suite.sha256, "prompts": suite.categories},
            models={model.name: model for model in models},
            cells=(cell,),
            warnings=tuple(warnings),
        )
        outputs.write(outcome)
    for line in warnings:
        message(f"warning: {line}")
    if failure:
        raise failure
    message(ended)
    return code


def _models(engine: Engine) -> list[ModelFacts]:
    """Return which files target and draft are, under two names also where the files are called the same."""
    names = [name for name in (engine.target_name, engine.draft_name) if name is not None]
    with err.status("hashing the models"):
        models = [model_file(name).facts() for name in names]
    if len({model.name for model in models}) < len({model.sha256 for model in models}):
        return [replace(model, name=name) for model, name in zip(models, names, strict=True)]
    return models


def _peer(folder: Path, engine: Engine, suite: Suite, settings: Settings) -> Peer:
    """Return llama.cpp's programs on the engine's files; they draft as many tokens as the ways, or 3."""
    longest = max(len(engine.prompt_tokens(prompt.text)) for prompt in suite.prompts)
    draft = engine.draft.path if engine.draft else None
    programs = LlamaCpp(
        folder,
        engine.target.path,
        draft,
        n_threads=engine.n_threads,
        n_ctx=min(context_for(longest, settings.n_predict), engine.target.n_ctx_train),
    )
    gammas = sorted({way.gamma for way in settings.ways if way.gamma}) or [_PEER_GAMMA]
    return LlamaCppPeer(programs, engine, settings, gammas if draft else ())


def _drafter(settings: Settings) -> DrafterName:
    """Return what the engine is to load models for."""
    if any(way.needs_model for way in settings.ways):
        return "model"  # each way says itself what drafts
    return "auto" if any(way.drafter == "auto" for way in settings.ways) else "suffix"


def _seconds(text: str) -> float:
    found = _BUDGET.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--budget {text}: must be a time, such as 300, 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2] or "s"]
