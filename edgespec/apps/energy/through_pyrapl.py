"""RAPL counters read through pyRAPL's Sensor; zones and joules are as in rapl.py.

pyRAPL's own Measurement is not used: it takes a wrapped counter for "no figure".
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from edgespec.apps.energy.base import UnreadableError
from edgespec.apps.energy.rapl_counters import RaplCounters, RaplZone

_PLACES = {"package-0": 0, "dram-0": 1}  # in what Sensor.energy returns


class PyRaplCounters(RaplCounters):
    """The counters of one package, and its memory, of the running machine."""

    def __init__(self, zones: Sequence[RaplZone]) -> None:
        """Set pyRAPL up. Raises UnreadableError if it is missing or cannot read these counters."""
        super().__init__(zones, "RAPL through pyRAPL")
        try:
            self._sensor: Any = _pyrapl().Sensor()
        except Exception as error:  # noqa: BLE001 - pyRAPL may raise anything, and is optional
            raise UnreadableError(f"pyRAPL: {error or type(error).__name__}") from None
        self.read()

    def read(self) -> tuple[float, ...]:
        """Return the microjoules of each zone, as pyRAPL reads them."""
        try:
            energy = self._sensor.energy()
            figures = tuple(float(energy[_PLACES[domain]]) for domain in self.domains)
        except (OSError, ValueError, IndexError) as error:
            raise UnreadableError(f"pyRAPL: {error}") from None
        if min(figures) < 0:  # how pyRAPL says "none"
            raise UnreadableError("pyRAPL: a counter that Linux shows is missing")
        return figures


def _pyrapl() -> Any:  # noqa: ANN401 - it has no types
    """Import pyRAPL without its warnings about its own code and exporters that are not installed."""
    quiet, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(quiet)  # else pyRAPL would configure logging for the whole program
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pyRAPL
    finally:
        root.removeHandler(quiet)
    return pyRAPL
