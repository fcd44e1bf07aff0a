"""edgespec: exact speculative sampling for local language models on machines without a GPU."""

from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.records import Result, Stats, Token
from edgespec.sampling import SamplingParams
from edgespec.stream import Stream

__all__ = [
    "EdgespecError",
    "Engine",
    "Result",
    "SamplingParams",
    "Stats",
    "Stream",
    "Token",
    "UsageError",
]
