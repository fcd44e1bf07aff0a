"""`edgespec bench`: one pair against its target alone, on a suite of prompts or of recordings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgespec.apps.bench.commands.bench_options import (
    RecordingChoice,
    ReportOutputs,
    SuitePrompts,
    VariantChoice,
)
from edgespec.cli.console import message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import ComputeOnNodes, ModelChoice, WattsOption, refuse_contradictions
from edgespec.cli.progress import pull_named
from edgespec.decoding.choices import DrafterName
from edgespec.errors import UsageError
from edgespec.models.registry import load_registry
from edgespec.models.suites import is_recordings

if TYPE_CHECKING:
    from edgespec.apps.bench.bench import BenchLimits, BenchSettings

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
    recordings: RecordingChoice

    def limits(self) -> BenchLimits:
        """Return when it ends. Raises UsageError."""
        from edgespec.apps.bench.bench import BenchLimits

        return BenchLimits(_seconds(self.budget), self.precision, self.rounds)


@option_group(_PEERS)
class PeerChoice:
    """Another program measured on the same prompts."""

    peer: Annotated[
        Literal["llama.cpp"] | None,
        typer.Option(help="Run this one's own programs too, on the same files and prompts, in turns."),
    ] = None
    bin_: Annotated[Path | None, typer.Option("--bin", metavar="DIR", help="Where its programs are.")] = None


@shown("Measure", "edgespec bench --category code")
@grouped
def bench_command(
    *,
    models: ModelChoice,
    measuring: BenchMeasuring,
    compute: ComputeOnNodes,
    prompts: SuitePrompts,
    assume_watts: WattsOption = None,
    peer: PeerChoice,
    outputs: ReportOutputs,
) -> int:
    """Measure a pair against its target alone: speed, acceptance, joules, on a suite of prompts.

    Plain decoding and speculation take turns over each prompt, until the interval of the speed-up is tight
    or the budget is spent. A Whisper model is measured on recordings (--suite FOLDER), with word errors
    where NAME.txt says what is said in NAME.wav. Every number is explained in docs/measuring.md.
    """
    refuse_contradictions(models.contradictions())
    suite = prompts.suite.suite
    if is_recordings(suite):
        given = {
            "--clients": measuring.variants.clients,
            "--rule": measuring.variants.rule,
            "--n-predict": prompts.n_predict != SuitePrompts.n_predict,
            "--temp": prompts.temp != SuitePrompts.temp,
            "--seed": prompts.seed != SuitePrompts.seed,
            "--cache-type": compute.cache_type != ComputeOnNodes.cache_type,
            "--rpc": compute.rpc,
            "--peer": peer.peer or peer.bin_,
            "--report": outputs.report,
            "--png": outputs.png,
            "--pair": models.pair,
        }
        _refuse_given(given, f"is for texts, and --suite {suite} holds recordings")
        from edgespec.apps.bench.commands.bench_runs import RecordingBench

        work = RecordingBench(
            models, prompts.suite, measuring.variants.variants, measuring.recordings, outputs
        )
        return work.run(compute, measuring.limits(), assume_watts)
    _refuse_given(measuring.recordings.given(), f"is for recordings; --suite {suite} holds texts")
    _refuse_whisper(models.target, suite)
    if (peer.peer is None) != (peer.bin_ is None):
        raise UsageError("--peer and --bin go together: --peer llama.cpp --bin DIR")
    outputs.check()
    return _bench_texts(models, measuring, compute, prompts, peer, outputs, watts=assume_watts)


def _bench_texts(
    models: ModelChoice,
    measuring: BenchMeasuring,
    compute: ComputeOnNodes,
    prompts: SuitePrompts,
    peer: PeerChoice,
    outputs: ReportOutputs,
    *,
    watts: float | None,
) -> int:
    from edgespec.apps.bench.clients import prompts_for
    from edgespec.apps.bench.commands.bench_runs import RunningBench, draft_of_peers, llama_cpp
    from edgespec.apps.bench.peers import check_programs
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.plugins import part
    from edgespec.platform.signals import SignalPipe

    settings, limits = measuring.variants.settings(prompts), measuring.limits()
    if settings.clients and peer.peer:
        raise UsageError("--clients and --peer contradict each other: the peer's programs answer one text")
    suite = prompts.suite.load()
    if settings.clients:
        prompts_for(suite.prompts, settings.clients)  # refuses before anything is loaded
    drafter = _drafter(settings)
    if drafter in ("suffix", "mtp") and models.draft is not None:
        raise UsageError(
            f"--draft and --variants {measuring.variants.variants} contradict each other: choose one"
        )
    writes = any(variant.cascade for variant in settings.variants)
    meter = choose_meter(assume_watts=watts, on_message=message)
    names = models.choose(drafter, compute, writes=writes)
    if peer.bin_:
        check_programs(peer.bin_, drafts=names.draft is not None)
    pull_named(*names)
    peers_draft = draft_of_peers(names) if peer.peer else None
    with meter, SignalPipe() as signals:
        part("energy.know_idle")(meter)
        parallel = max(settings.clients, default=1)
        with compute.load_engine(
            names, drafter=drafter, meter=meter, signals=signals, parallel=parallel
        ) as engine:
            peers = [] if peer.bin_ is None else [llama_cpp(peer.bin_, engine, peers_draft, suite, settings)]
            return RunningBench(engine, suite, settings, limits, peers).run(outputs)


def _refuse_given(options: Mapping[str, object], why: str) -> None:
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} {why}")


def _refuse_whisper(target: str | None, suite: str) -> None:
    entry = load_registry().entries.get(target or "")
    if entry and entry.speech:
        raise UsageError(
            f"--target {target}: a Whisper model, and --suite {suite} holds texts; "
            "name recordings, as --suite FOLDER or --suite talk.wav"
        )


def _drafter(settings: BenchSettings) -> DrafterName:
    if any(variant.drafter == "mtp" for variant in settings.variants):
        return "mtp"
    if any(variant.needs_model for variant in settings.variants):
        return "model"  # each variant says itself what drafts
    return "auto" if any(variant.drafter == "auto" for variant in settings.variants) else "suffix"


def _seconds(text: str) -> float:
    found = _BUDGET.fullmatch(text.strip())
    if not found or float(found[1]) <= 0:
        raise UsageError("must be a time, such as 300, 90s, 10m or 1h", field="budget", value=text)
    return float(found[1]) * _SECONDS[found[2] or "s"]
