"""RAPL: the processor's energy counters, as Linux shows them in its powercap tree (Intel and AMD).

    /sys/class/powercap/intel-rapl:0/name                   package-0
                                    /energy_uj              microjoules since some time, wrapping
                                    /max_energy_range_uj    where it wraps
                        intel-rapl:0:1/name                 dram, of package-0
                        intel-rapl:1/name                   psys, the whole board
                        intel-rapl-mmio:0/name              package-0 again, through memory-mapped I/O

The joules are those of the packages (cores, caches and graphics of each socket or die) plus their memory, if
it has a counter. psys includes the packages, so it counts only if there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec.apps.energy.base import SourceFinding, UnreadableError, read_number, read_text
from edgespec.apps.energy.rapl_counters import KIND, RaplCounters, RaplZone
from edgespec.apps.energy.through_pyrapl import PyRaplCounters
from edgespec.platform.cpu import read_cpu
from edgespec.platform.files import text_of

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
"""Shell commands that let a group read the counters, also after a reboot."""

_POWERCAP = "sys/class/powercap"
_PACKAGE = re.compile(r"package-\d+(?:-die-\d+)?")


def find_rapl(root: Path) -> SourceFinding:
    """Look for RAPL counters below `root`. Never raises: the finding says what is missing."""
    zones: tuple[RaplZone, ...] = ()
    try:
        zones = tuple(_zones(root / _POWERCAP))
        if not zones:
            return SourceFinding(KIND, None, _why_none(root))
        source = RaplCounters(zones)
        source.read()  # may find that they cannot be read
    except OSError as error:
        return SourceFinding(KIND, None, f"{root / _POWERCAP}: {error.strerror or error}")
    except UnreadableError as error:
        fix = GROUP_FIX if "root only" in str(error) else error.fix
        return SourceFinding(KIND, None, str(error), fix, present=True)
    return SourceFinding(KIND, _through_pyrapl(root, source) or source, present=True)


def _zones(powercap: Path) -> Iterator[RaplZone]:
    """Yield each zone to count, once: some machines show a package through registers and through MMIO."""
    seen = set()
    for folder in sorted(powercap.glob("intel-rapl*:*"), key=lambda path: ("mmio" in path.name, path.name)):
        if not (folder / "name").exists():  # not a zone, or just removed
            continue
        domain = _domain(powercap, folder)
        if domain and domain not in seen:
            seen.add(domain)
            yield RaplZone(domain, folder, _range_uj(folder))


def _domain(powercap: Path, folder: Path) -> str:
    """Return the domain of a zone; "" if another zone includes it."""
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


def _through_pyrapl(root: Path, direct: RaplCounters) -> RaplCounters | None:
    """Return the same counters read by pyRAPL, or None if it cannot read them."""
    if root != Path("/") or not is_for_pyrapl(root, direct.zones):
        return None
    try:
        return PyRaplCounters(direct.zones)
    except UnreadableError:
        return None


def is_for_pyrapl(root: Path, zones: Sequence[RaplZone]) -> bool:
    """Whether these zones are all that pyRAPL understands: one Intel package and perhaps its memory.

    It expects one package per socket, all with or all without memory, and knows neither dies nor psys.
    """
    intel = "GenuineIntel" in text_of(root / "proc/cpuinfo")
    domains = [zone.domain for zone in zones]
    return intel and domains in (["package-0"], ["package-0", "dram-0"])
