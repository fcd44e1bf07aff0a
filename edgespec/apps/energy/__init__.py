"""Energy: the sources of energy figures on this machine, and the joules spent between two moments."""

from edgespec.apps.energy.meter import (
    EnergyMeter,
    Resolution,
    Window,
    measure_idle,
    store_idle_power,
)
from edgespec.apps.energy.sources import survey

__all__ = [
    "EnergyMeter",
    "Resolution",
    "Window",
    "measure_idle",
    "store_idle_power",
    "survey",
]
