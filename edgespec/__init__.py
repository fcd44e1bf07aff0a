"""edgespec: exact speculative sampling for local language models on machines without a GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.energy import EnergyMeter, Measurement
    from edgespec.engine import Engine
    from edgespec.errors import EdgespecError, UsageError
    from edgespec.records import Result, Stats, Token
    from edgespec.sampling import SamplingParams
    from edgespec.stream import Stream

__all__ = [
    "EdgespecError",
    "EnergyMeter",
    "Engine",
    "Measurement",
    "Result",
    "SamplingParams",
    "Stats",
    "Stream",
    "Token",
    "UsageError",
]

_ROOMS = {
    "energy": ("EnergyMeter", "Measurement"),
    "engine": ("Engine",),
    "errors": ("EdgespecError", "UsageError"),
    "records": ("Result", "Stats", "Token"),
    "sampling": ("SamplingParams",),
    "stream": ("Stream",),
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a public name at its first use: what needs no llama.cpp runs where it cannot be loaded."""
        room = next((room for room, names in _ROOMS.items() if name in names), None)
        if room is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{room}"), name)
        return value
