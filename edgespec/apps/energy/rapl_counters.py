"""RAPL's counters: read them from their files, and compute the joules between two readings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.energy.base import EnergyReading, UnreadableError, read_number

KIND = "RAPL"
_MOST_W = 1000.0  # of a package or its memory: twice the short peaks of the largest sockets
_MOST_PSYS_W = 5000.0
_USUAL_RANGE_UJ = 65_532_610_987  # if unknown: 32 bits of 2^-16 J, the smallest unit in use
_LONGEST_S = 10.0  # between two readings, even if the range would allow more
_LATE_S = 1.0  # how old a counter's figure may be when it is read; a generous bound


@dataclass(frozen=True, slots=True)
class RaplZone:
    """A counter of RAPL."""

    domain: str
    """package-0, dram-0, psys."""
    folder: Path
    range_uj: int | None
    """Microjoules at which it wraps; None if unknown."""

    @property
    def most_w(self) -> float:
        """Upper bound of its watts."""
        return _MOST_PSYS_W if self.domain == "psys" else _MOST_W

    @property
    def wraps_after_s(self) -> float:
        """Shortest time in seconds in which it can wrap."""
        return (self.range_uj or _USUAL_RANGE_UJ) / 1e6 / self.most_w


class RaplCounters:
    """The counters of some zones, read from sysfs; pyRAPL's are a subclass."""

    counts = True
    estimated = False

    def __init__(self, zones: Sequence[RaplZone], name: str = KIND) -> None:
        self.zones = tuple(zones)
        self._files = [str(zone.folder / "energy_uj") for zone in zones]
        self.name = name
        self.domains = tuple(zone.domain for zone in self.zones)
        only_psys = all(domain == "psys" for domain in self.domains)
        self.counted = tuple(only_psys or domain != "psys" for domain in self.domains)
        self.interval_s = min(_LONGEST_S, *(zone.wraps_after_s / 4 for zone in self.zones))

    def read(self) -> tuple[float, ...]:
        """Return the microjoules of each zone."""
        figures = []
        try:
            for file in self._files:  # read_number inlined: a mark must be fast
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    figures.append(int(os.read(descriptor, 64)))
                finally:
                    os.close(descriptor)
        except (OSError, ValueError):
            return tuple(map(read_number, self._files))  # raises with the reason
        return tuple(figures)

    def joules(self, before: EnergyReading, after: EnergyReading) -> tuple[float, ...]:
        """Return the joules of each zone; its counter may have wrapped once."""
        seconds = after.at - before.at
        pairs = zip(self.zones, before.figures, after.figures, strict=True)
        return tuple(_joules(zone, start, end, seconds) for zone, start, end in pairs)


def _joules(zone: RaplZone, start: float, end: float, seconds: float) -> float:
    if seconds >= zone.wraps_after_s:
        raise UnreadableError(
            f"RAPL was not read for {seconds:.3g} s (suspended, or starved of time): "
            f"{zone.domain} may have wrapped more than once"
        )
    spent = (end - start) / 1e6
    if spent >= 0:
        return spent
    if zone.range_uj is None:
        raise UnreadableError(f"RAPL: {zone.domain} went backwards, and where it wraps is not known")
    spent += zone.range_uj / 1e6
    if not 0 <= spent <= zone.most_w * (seconds + _LATE_S):  # reset to 0, as after a suspend
        raise UnreadableError(f"RAPL: {zone.domain} went backwards without having wrapped")
    return spent
