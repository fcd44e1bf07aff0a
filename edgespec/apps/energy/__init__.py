"""Energy: the sources of energy figures on this machine, and the joules spent between two moments."""

from edgespec.apps.energy.idle import measure_idle
from edgespec.apps.energy.idle_store import idle_path, store_idle_power
from edgespec.apps.energy.meter import EnergyMeter, Window
from edgespec.apps.energy.resolution import Resolution
from edgespec.apps.energy.sources import survey

__all__ = [
    "EnergyMeter",
    "Resolution",
    "Window",
    "idle_path",
    "measure_idle",
    "store_idle_power",
    "survey",
]
