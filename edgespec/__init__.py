"""edgespec: exact speculative sampling for local language models on machines without a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.apps.energy.meter import EnergyMeter
    from edgespec.decoding.grammars import Grammar
    from edgespec.decoding.options import Options, WakePolicy
    from edgespec.decoding.records import Result, Stats, Token
    from edgespec.decoding.sampling import SamplingParams
    from edgespec.engine.engine import Engine
    from edgespec.engine.stream import Stream
    from edgespec.errors import EdgespecError, UsageError
    from edgespec.llama.choices import StateRoom
    from edgespec.platform.metering import Measurement
    from edgespec.platform.processes import Cancellation

__all__ = [
    "Cancellation",
    "EdgespecError",
    "EnergyMeter",
    "Engine",
    "Grammar",
    "Measurement",
    "Options",
    "Result",
    "SamplingParams",
    "StateRoom",
    "Stats",
    "Stream",
    "Token",
    "UsageError",
    "WakePolicy",
]

_HOMES = {
    "apps.energy.meter": ("EnergyMeter",),
    "platform.metering": ("Measurement",),
    "engine.engine": ("Engine",),
    "errors": ("EdgespecError", "UsageError"),
    "decoding.grammars": ("Grammar",),
    "decoding.options": ("Options", "WakePolicy"),
    "llama.choices": ("StateRoom",),
    "platform.processes": ("Cancellation",),
    "decoding.records": ("Result", "Stats", "Token"),
    "decoding.sampling": ("SamplingParams",),
    "engine.stream": ("Stream",),
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name at its first use, so that what needs no llama.cpp runs without it."""
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value
