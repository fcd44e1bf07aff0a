"""A cell of a comparison: its process, which measures it for one round, and its rounds together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.apps.bench import clients
from edgespec.apps.bench.bench import BenchSettings, leaving_no_trace, turns, unfit, warm_up
from edgespec.apps.bench.runs import Cell, PassTime
from edgespec.apps.energy import EnergyMeter
from edgespec.decoding.choices import DrafterName
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.models.suites import Prompt
from edgespec.platform.child import answer, say
from edgespec.platform.memory import peak_rss_bytes


def merged(rounds: Sequence[Cell]) -> Cell:
    """Return the rounds of a cell, which had the same kernels, as one."""
    return replace(
        rounds[0],
        runs=tuple(run for cell in rounds for run in cell.runs),
        throughput=tuple(one for cell in rounds for one in cell.throughput),
        passes=tuple(one for cell in rounds for one in cell.passes),
        peak_rss_bytes=max(cell.peak_rss_bytes or 0 for cell in rounds),
    )


@dataclass(frozen=True, slots=True)
class CellRequest:
    """The job that a cell's process reads from stdin."""

    target: str
    draft: str | None
    drafter: DrafterName
    """The drafter that the engine loads models for."""
    kernels: KernelsChoice
    n_threads: int
    prompts: tuple[Prompt, ...]
    settings: BenchSettings
    round: int
    assume_watts: float | None


def _in_child() -> int:
    return answer(CellRequest, _measure)


def _measure(request: CellRequest) -> None:
    """Measure a cell for one round and report the runs."""
    settings = request.settings
    with (
        EnergyMeter.choose(assume_watts=request.assume_watts) as meter,
        Engine(
            request.target,
            request.draft,
            drafter=request.drafter,
            n_threads=request.n_threads,
            kernels=request.kernels,
            meter=meter,
            parallel=max(settings.clients, default=1),
            on_message=lambda line: say("message", line),
        ) as engine,
    ):
        if request.draft and engine.draft is None:
            raise EdgespecError("one of the models cannot take tokens back: nothing is drafted")
        if too_long := unfit(engine, request.prompts, settings.n_predict):
            name, why = next(iter(too_long.items()))
            raise EdgespecError(f"{name}: {why.removeprefix(f'{name} is left out: ')}")
        say("kernels", engine.kernels)
        with leaving_no_trace(engine):
            if settings.clients:
                _many_at_once(engine, request)
            else:
                _one_by_one(engine, request)
        say("peak", peak_rss_bytes())


def _one_by_one(engine: Engine, request: CellRequest) -> None:
    warm_up(engine, request.prompts, request.settings)
    for place, prompt in enumerate(request.prompts):
        for run in turns(engine, prompt, request.settings, round_=request.round, place=place):
            say("run", run)


def _many_at_once(engine: Engine, request: CellRequest) -> None:
    settings, prompts = request.settings, request.prompts
    with clients.Passes(engine, prompts, settings) as passes:
        clients.warm_up(engine, prompts, settings)
        for measured in clients.one_round(engine, prompts, settings, passes, request.round):
            say("pass" if isinstance(measured, PassTime) else "throughput", measured)
