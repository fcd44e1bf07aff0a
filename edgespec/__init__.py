"""edgespec: exact speculative sampling for local language models on machines without a GPU."""

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
