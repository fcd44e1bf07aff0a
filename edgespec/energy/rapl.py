"""RAPL: the processor's energy counters, as Linux shows them in its powercap tree (Intel and AMD).

    /sys/class/powercap/intel-rapl:0/name                   package-0
                                    /energy_uj              microjoules since some time, wrapping
                                    /max_energy_range_uj    where it wraps
                        intel-rapl:0:1/name                 dram, of package-0
                        intel-rapl:1/name                   psys, the whole board
                        intel-rapl-mmio:0/name              package-0 once more, seen by memory

Counted are the packages (cores, caches and graphics of each socket or die) and their memory where a
counter is there for it; psys only where there is no package, since packages are a part of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.cpu import read_cpu
from edgespec.energy.base import Finding, Reading, UnreadableError, read_number, read_text

KIND = "RAPL"

GROUP_FIX = (
    "sudo groupadd --system --force powercap",
    "sudo usermod --append --groups powercap $USER",
    'echo \'ACTION=="add", SUBSYSTEM=="powercap", KERNEL=="intel-rapl*:*", '
    'RUN+="/bin/chgrp powercap /sys%p/energy_uj", RUN+="/bin/chmod g+r /sys%p/energy_uj"\' '
    "| sudo tee /etc/udev/rules.d/60-edgespec-powercap.rules",
    "sudo udevadm control --reload",
    "sudo udevadm trigger --subsystem-match=powercap --action=add",
    "then log out and in again",
)
"""Lines that let a group read the counters, also after the next start."""

_POWERCAP = "sys/class/powercap"
_PACKAGE = re.compile(r"package-\d+(?:-die-\d+)?")
_MOST_W = 1000.0  # of a package or its memory: twice what the largest sockets draw for a moment
_MOST_PSYS_W = 5000.0
_USUAL_RANGE_UJ = 65_532_610_987  # 32 bits of 2^-16 J, the smallest unit in use: where none is told
_LONGEST_S = 10.0  # between two readings, where the range would allow more
_LATE_S = 1.0  # by which a counter's figure may be older than its reading, generously


@dataclass(frozen=True, slots=True)
class Zone:
    """One counter."""

    domain: str
    """package-0, dram-0, psys."""
    folder: Path
    range_uj: int | None
    """Where it wraps; None: not known."""

    @property
    def most_w(self) -> float:
        """Watts that it never exceeds."""
        return _MOST_PSYS_W if self.domain == "psys" else _MOST_W

    @property
    def wraps_after_s(self) -> float:
        """Seconds in which it wraps at the earliest."""
        return (self.range_uj or _USUAL_RANGE_UJ) / 1e6 / self.most_w


class Counters:
    """The counters of some zones: what RAPL sources share, however they read them."""

    counts = True
    estimated = False

    def __init__(self, zones: Sequence[Zone], name: str = KIND) -> None:
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
            for file in self._files:  # read_number without its calls: this is what a mark costs
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    figures.append(int(os.read(descriptor, 64)))
                finally:
                    os.close(descriptor)
        except (OSError, ValueError):
            return tuple(map(read_number, self._files))  # says what is wrong
        return tuple(figures)

    def joules(self, before: Reading, after: Reading) -> tuple[float, ...]:
        """Return the joules of each zone; its counter may have wrapped once."""
        seconds = after.at - before.at
        pairs = zip(self.zones, before.figures, after.figures, strict=True)
        return tuple(_joules(zone, start, end, seconds) for zone, start, end in pairs)


def _joules(zone: Zone, start: float, end: float, seconds: float) -> float:
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
    if not 0 <= spent <= zone.most_w * (seconds + _LATE_S):  # set to 0 anew, as after a suspend
        raise UnreadableError(f"RAPL: {zone.domain} went backwards without having wrapped")
    return spent


def find_rapl(root: Path) -> Finding:
    """Look for RAPL counters below `root`. Never raises: the finding says what is missing."""
    zones: tuple[Zone, ...] = ()
    try:
        zones = tuple(_zones(root / _POWERCAP))
        if not zones:
            return Finding(KIND, None, _why_none(root))
        source = Counters(zones)
        source.read()  # may find that they cannot be read
    except OSError as error:
        return Finding(KIND, None, f"{root / _POWERCAP}: {error.strerror or error}")
    except UnreadableError as error:
        fix = GROUP_FIX if "root only" in str(error) else error.fix
        return Finding(KIND, None, str(error), fix, present=True)
    return Finding(KIND, _through_pyrapl(root, source) or source, present=True)


def _zones(powercap: Path) -> Iterator[Zone]:
    """Yield each zone that counts once: some machines show a package by its registers and by memory."""
    seen = set()
    for folder in sorted(powercap.glob("intel-rapl*:*"), key=lambda path: ("mmio" in path.name, path.name)):
        if not (folder / "name").exists():  # no zone, or one that goes away
            continue
        domain = _domain(powercap, folder)
        if domain and domain not in seen:
            seen.add(domain)
            yield Zone(domain, folder, _range_uj(folder))


def _domain(powercap: Path, folder: Path) -> str:
    """Return the domain of a zone, "" where it is a part of another."""
    name = read_text(folder / "name")
    if _PACKAGE.fullmatch(name) or name == "psys":
        return name
    if name == "dram" and folder.name.count(":") > 1:
        package = read_text(powercap / folder.name.rpartition(":")[0] / "name")
        return package.replace("package", "dram", 1) if _PACKAGE.fullmatch(package) else ""
    return ""


def _range_uj(folder: Path) -> int | None:
    try:
        return read_number(folder / "max_energy_range_uj") or None
    except UnreadableError:
        return None


def _why_none(root: Path) -> str:
    if not (root / _POWERCAP).exists():
        reason = f"no {root / _POWERCAP}"
    else:
        reason = f"no counters of processor packages in {root / _POWERCAP}"
    if "hypervisor" in read_cpu(root / "proc/cpuinfo").flags:
        reason += " (a virtual machine: its host keeps the counters)"
    return reason


def _through_pyrapl(root: Path, direct: Counters) -> Counters | None:
    """Return the same counters read by pyRAPL, where it can serve."""
    if root != Path("/") or not is_for_pyrapl(root, direct.zones):
        return None
    from edgespec.energy.through_pyrapl import PyRAPLCounters  # not installed everywhere

    try:
        return PyRAPLCounters(direct.zones)
    except UnreadableError:
        return None


def is_for_pyrapl(root: Path, zones: Sequence[Zone]) -> bool:
    """Whether these zones are all that pyRAPL understands: one Intel package and perhaps its memory.

    It wants as many packages as sockets, each with memory or none, and knows neither dies nor psys.
    """
    try:
        intel = "GenuineIntel" in (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False
    domains = [zone.domain for zone in zones]
    return intel and domains in (["package-0"], ["package-0", "dram-0"])
