"""Energy: the sources of energy figures on this machine, and the joules spent between two moments."""

from edgespec.energy.idle import measure_idle
from edgespec.energy.idle_store import idle_path, store_idle_power
from edgespec.energy.measurement import Measurement, Phase
from edgespec.energy.meter import EnergyMeter, Window
from edgespec.energy.resolution import Resolution
from edgespec.energy.sources import survey

__all__ = [
    "EnergyMeter",
    "Measurement",
    "Phase",
    "Resolution",
    "Window",
    "idle_path",
    "measure_idle",
    "store_idle_power",
    "survey",
]
