"""Energy: the sources of energy figures on this machine, and the joules spent between two moments."""

from edgespec.energy.base import Finding, Source
from edgespec.energy.idle import Idle, measure_idle
from edgespec.energy.kept_idle import idle_path, keep_idle
from edgespec.energy.measurement import Measurement, Phase
from edgespec.energy.meter import EnergyMeter, Window
from edgespec.energy.resolution import Resolution
from edgespec.energy.sources import survey

__all__ = [
    "EnergyMeter",
    "Finding",
    "Idle",
    "Measurement",
    "Phase",
    "Resolution",
    "Source",
    "Window",
    "idle_path",
    "keep_idle",
    "measure_idle",
    "survey",
]
