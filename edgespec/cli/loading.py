"""Loads the models that a command was asked for."""

from __future__ import annotations

from typing import TypedDict, Unpack

from edgespec.cli.console import err, message
from edgespec.cli.options import Compute, ComputeOnNodes
from edgespec.decoding.choices import DrafterName, Objective
from edgespec.energy import EnergyMeter
from edgespec.engine.engine import Engine
from edgespec.platform.signals import Cancellation


class EngineKeywords(TypedDict, total=False):
    """Keyword arguments that commands give an `Engine` with its models and `Compute`."""

    drafter: DrafterName
    n_ctx: int | None
    objective: Objective
    history: bool
    meter: EnergyMeter | None
    signals: Cancellation
    prefix_cache: int
    parallel: int | None
    chat_template: str | None


def load_engine(
    models: tuple[str | None, str | None], compute: Compute, **keywords: Unpack[EngineKeywords]
) -> Engine:
    """Return the engine of a target and a draft; it tells the user on stderr what they should know."""
    with err.status("loading the models"):
        return Engine(
            *models,
            n_threads=compute.threads,
            kernels=compute.kernels,
            cache_type=compute.cache_type,
            nodes=compute.addresses() if isinstance(compute, ComputeOnNodes) else (),
            on_message=message,
            **keywords,
        )
