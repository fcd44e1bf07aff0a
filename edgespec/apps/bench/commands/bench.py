"""`edgespec bench`: one pair against its target alone, on a suite of prompts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.bench.commands.bench_options import ReportOutputs, SuitePrompts, VariantChoice
from edgespec.apps.bench.suites import Suite
from edgespec.cli.console import INTERRUPTED, err, line_of, message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import AnyCompute, ModelChoice, WattsOption
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.decoding.choices import DrafterName
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError

if TYPE_CHECKING:
    from edgespec.apps.bench.measure import BenchSettings, LlamaServer
    from edgespec.apps.bench.quantizations import FileFacts
    from edgespec.apps.bench.runs import BenchmarkOutcome, Run
    from edgespec.engine.engine import Engine
    from edgespec.engine.model_choice import ChosenModels

_PEERS = "Peers"
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@option_group()
class BenchMeasuring:
    """The measurement, and how long it takes."""

    variants: VariantChoice
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time to measure, at most: seconds, or such as 10m.")
    ] = "600"
    precision: Annotated[
        float,
        typer.Option(
            min=0, help="Stop when the speed-up's interval over the rounds is this share of it, or less."
        ),
    ] = 0.03
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds at most.", show_default="as the budget allows")
    ] = None

    @property
    def budget_s(self) -> float:
        """The budget in seconds. Raises UsageError."""
        found = _BUDGET.fullmatch(self.budget.strip())
        if not found or float(found[1]) <= 0:
            raise UsageError("must be a time, such as 300, 90s, 10m or 1h", field="budget", value=self.budget)
        return float(found[1]) * _SECONDS[found[2] or "s"]


@option_group(_PEERS)
class PeerChoice:
    """Another program measured on the same prompts."""

    peer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="Ask it too, in turns: the llama-server in this folder, started on the same models, or a "
            "server of completions, such as http://127.0.0.1:8080.",
        ),
    ] = None

    @property
    def folder(self) -> Path | None:
        """The folder with llama-server; None: an address, or no peer. Raises UsageError if it is neither."""
        from edgespec.apps.bench.measure import LLAMA_SERVER

        if not self.peer or re.fullmatch(r"https?://[^\s/]+/?", self.peer):
            return None
        if not shutil.which(Path(self.peer, LLAMA_SERVER).absolute()):
            problem = f"must be a folder with {LLAMA_SERVER}, or an address such as http://127.0.0.1:8080"
            raise UsageError(problem, field="peer", value=self.peer)
        return Path(self.peer)


@shown("Measure", "edgespec bench --category code")
@grouped
def bench_command(
    *,
    models: ModelChoice,
    measuring: BenchMeasuring,
    compute: AnyCompute,
    prompts: SuitePrompts,
    assume_watts: WattsOption = None,
    peer: PeerChoice,
    outputs: ReportOutputs,
) -> int:
    """Measure a pair against its target alone: speed, acceptance, joules, on a suite of prompts.

    Plain decoding and speculation take turns over each prompt, until the interval of the speed-up is tight
    or the budget is spent. Every number is explained in docs/measuring.md.
    """
    from edgespec.apps.bench.measure import LlamaServer, started_server
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.plugins import part
    from edgespec.platform.processes import SignalPipe

    folder = peer.folder
    outputs.check()
    settings = measuring.variants.settings(prompts)
    _ = measuring.budget_s  # which may be refused
    suite = prompts.suite.load()
    drafter = _drafter(settings)
    if drafter in ("suffix", "mtp") and models.draft is not None:
        raise UsageError(
            f"--draft and --variants {measuring.variants.variants} contradict each other: choose one"
        )
    if peer.peer and any(prompt.images for prompt in suite.prompts):
        raise UsageError("is asked about text alone: leave it out for prompts with images", field="peer")
    writes = any(variant.cascade for variant in settings.variants)
    meter = choose_meter(assume_watts=assume_watts, on_message=message)
    names = models.choose(drafter, compute, writes=writes)
    pull_named(*names)
    drafts_peer = draft_of_peers(names) if folder else None
    with meter, SignalPipe() as signals:
        part("energy.know_idle")(meter)
        options = EngineOptions(names, drafter=drafter, meter=meter, signals=signals)
        with compute.load_engine(options) as engine, ExitStack() as stack:
            peers = [LlamaServer(peer.peer, engine, settings)] if peer.peer and not folder else []
            if folder:
                for draft in dict.fromkeys((None, drafts_peer)):
                    server = started_server(folder, engine, draft, settings, suite.prompts)
                    peers.append(stack.enter_context(server))
            return _measure(engine, suite, settings, measuring, peers, outputs)


def _drafter(settings: BenchSettings) -> DrafterName:
    if any(variant.drafter == "mtp" for variant in settings.variants):
        return "mtp"
    if any(variant.needs_model for variant in settings.variants):
        return "model"  # each variant says itself what drafts
    return "auto" if any(variant.drafter == "auto" for variant in settings.variants) else "suffix"


# ---- the work ----


def _measure(
    engine: Engine,
    suite: Suite,
    settings: BenchSettings,
    measuring: BenchMeasuring,
    peers: list[LlamaServer],
    outputs: ReportOutputs,
) -> int:
    """Measure, and write the results, even if Ctrl-C or a failure ends it early.

    Prompts that do not fit are left out. Returns the exit code; raises the failure, and EdgespecError if no
    prompt is left.
    """
    from edgespec.apps.bench.commands.report import write_results
    from edgespec.apps.bench.machine import MachineWatch
    from edgespec.apps.bench.measure import BenchControl, encode_images, fitting, measure

    models = _models(engine, [peer.draft for peer in peers])
    watch = MachineWatch(n_threads=engine.n_threads)
    prompts, warnings = fitting(engine, suite.interleaved(), settings.n_predict)
    if encoded := encode_images(engine, prompts):
        message(encoded)
    runs: list[Run] = []

    def on_run(run: Run) -> None:
        runs.append(run)
        watch.sample()

    failure: EdgespecError | None = None
    code = 0
    try:
        with WorkDisplay() as display:
            limits = (measuring.budget_s, measuring.precision, measuring.rounds)
            control = BenchControl(on_run, *limits, display.show, warnings.append)
            ended = measure(engine, prompts, settings, control, [*peers])
    except KeyboardInterrupt:
        ended, code = "interrupted", INTERRUPTED
    except EdgespecError as error:
        ended, failure = f"failed: {line_of(error)}", error
    if runs:
        n_answered = len({run.prompt for run in runs})
        if n_answered < len(prompts):
            had = f"only {n_answered} of {len(prompts)} prompts had their turn"
            warnings.append(f"{had}; give more time (--budget) or take fewer (--per-category)")
        warnings += watch.warnings()
        names = ", ".join(peer.name for peer in peers)  # also of those that failed
        about = settings.facts() | {"budget_s": measuring.budget_s, "precision": measuring.precision}
        about |= {"ended": ended} | ({"peers": names} if names else {})
        write_results(_outcome(engine, models, suite, about, runs, warnings), outputs)
    for line in warnings:
        message(f"warning: {line}")
    if failure:
        raise failure
    message(ended)
    return code


def _outcome(
    engine: Engine,
    models: Sequence[FileFacts],
    suite: Suite,
    settings: dict[str, str | int | float],
    runs: Sequence[Run],
    warnings: Sequence[str],
) -> BenchmarkOutcome:
    from edgespec.apps.bench.machine import facts
    from edgespec.apps.bench.runs import BenchmarkOutcome, Cell
    from edgespec.platform.machine import peak_rss_bytes

    names = [model.name for model in models]
    cell = Cell(
        target=names[0],
        draft=names[1] if len(names) > 1 else None,
        kernels=engine.kernels,
        runs=tuple(runs),
        peak_rss_bytes=peak_rss_bytes(),
    )
    return BenchmarkOutcome(
        kind="bench",
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=facts(),
        settings={**settings, "threads": engine.n_threads},
        suite=suite.facts(),
        models=dict(zip(names, models, strict=True)),
        cells=(cell,),
        warnings=tuple(warnings),
    )


def _models(engine: Engine, of_peers: Iterable[Path | None]) -> list[FileFacts]:
    """Return the facts of the target, of its draft, and of the models that draft for peers.

    Their names differ even if those of the files are equal.
    """
    from edgespec.apps.bench.quantizations import model_file

    names = [engine.target_name]
    if engine.draft and engine.draft_name and not engine.draft.header.is_part:
        names.append(engine.draft_name)
        names += {str(path) for path in of_peers if path not in (None, engine.draft.path)}
    with err.status("hashing the models"):
        models = [model_file(name).facts() for name in names]
    if len({model.name for model in models}) < len({model.sha256 for model in models}):
        return [replace(model, name=name) for model, name in zip(models, names, strict=True)]
    return models


def draft_of_peers(models: ChosenModels) -> Path | None:
    """Return the file of the model that drafts for llama-server.

    It cannot run our heads: where the draft is one, it is the pair's small model, or none. Raises
    EdgespecError: it is not on this machine, and nobody asked for it by name.
    """
    from edgespec.llama.gguf_header import read_header
    from edgespec.models.draft_records import paired_draft
    from edgespec.models.resolve import resolve

    target, draft = models
    for name in (draft, paired_draft(target, writes=True)) if draft else ():
        if name and not (header := read_header(resolve(name, pull_missing=False))).draft_kind:
            return header.path
    return None
