"""The energy sources of this machine, in the order of preference: readings, and the joules between two.

    counters   RAPL          figures are microjoules spent so far; cheap, read at every mark
    powers     all others    figures are watts at a moment; slow, read every interval_s by a thread

For each kind of source, a SourceFinding tells whether this machine has it. All paths are below a root.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import UsageError, describe_os_error
from edgespec.platform.machine import device_model, read_cpu

# ---- what all have ----


_LONGEST = 4096  # bytes: no file in sysfs is longer


class UnreadableError(Exception):
    """A source cannot be read, or the energy spent cannot be told; `str(error)` says why in one line."""

    def __init__(self, reason: str, *fix: str) -> None:
        super().__init__(reason)
        self.fix = fix
        """Steps that cure it, a line each."""


class EnergySource:
    """Something in this machine that shows energy or power. By default it shows watts."""

    name: str
    """Its name for the user: Measurement.source."""
    domains: tuple[str, ...]
    """The parts of the machine that it measures separately, such as package-0."""
    counted: tuple[bool, ...] = (True,)
    """Whether each domain counts for the total; those that do not overlap with the others."""
    counts = False
    """Whether it counts energy, fine enough for windows of milliseconds; else it shows power."""
    estimated = False
    """Whether its figures are an assumption."""
    interval_s: float
    """Seconds between readings while a window is open; infinite: never read in between."""

    def read(self) -> tuple[float, ...]:
        """Return the present figure of each domain. Raises UnreadableError."""
        raise NotImplementedError

    def joules(
        self, seconds: float, before: tuple[float, ...], after: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Return the joules of each domain between two readings: of watts by the trapezoidal rule.

        Raises UnreadableError.
        """
        return tuple(seconds * (a + b) / 2 for a, b in zip(before, after, strict=True))


@dataclass(frozen=True, slots=True)
class SourceFinding:
    """Whether this machine has one kind of source, and the source."""

    kind: str
    """The kind in words, such as RAPL."""
    source: EnergySource | None
    """None if unavailable."""
    reason: str = ""
    """Why it is unavailable, in one line."""
    fix: tuple[str, ...] = ()
    """Steps that make it available, a line each; () if nothing can be done."""
    is_absent: bool = False
    """Whether the machine simply has none: of several findings the others say more."""


def _finding(kind: str, find: Callable[[], EnergySource]) -> SourceFinding:
    """Whether `find` gives a source that can be read."""
    try:
        source = find()
        source.read()
    except OSError as error:
        return SourceFinding(kind, None, describe_os_error(error))
    except UnreadableError as error:
        return SourceFinding(kind, None, str(error), error.fix)
    return SourceFinding(kind, source)


def read_kernel_file(file: str | Path) -> str:
    """Return the text of a small kernel file. Raises UnreadableError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # much faster than Path.read_text
        try:
            return os.read(descriptor, _LONGEST).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except PermissionError:
        raise UnreadableError(f"{file}: readable by root only") from None
    except OSError as error:
        raise UnreadableError(describe_os_error(error)) from None


def read_number(file: str | Path) -> int:
    """Return the number in a kernel file. Raises UnreadableError."""
    text = read_kernel_file(file)
    try:
        return int(text)
    except ValueError:
        raise UnreadableError(f"{file}: {text[:40]!r} is no number") from None


def survey(root: Path = Path("/"), *, assume_watts: float | None = None) -> tuple[SourceFinding, ...]:
    """Return a finding for each kind of source; the first available one is the best.

    Raises UsageError unless `assume_watts` is finite and above 0.
    """
    found = (find_rapl(root), find_pmic(root), find_battery(root))
    if assume_watts is None:
        return found
    if not (math.isfinite(assume_watts) and assume_watts > 0):
        problem = "not a number above 0; give the power of this machine in watts, such as 15"
        raise UsageError(problem, field="assume_watts", value=f"{assume_watts:g}")
    return SourceFinding("assumption", AssumedPower(assume_watts)), *found


def why_none(found: Sequence[SourceFinding]) -> str:
    """Return in one line why no source is available."""
    for finding in found:
        if not finding.is_absent:
            return f"{finding.kind}: {finding.reason}"
    return f"this machine shows no energy counter or power sensor: {'; '.join(one.reason for one in found)}"


class AssumedPower(EnergySource):
    """Constant watts that the user gave."""

    estimated = True
    domains = ("assumed",)
    interval_s = math.inf

    def __init__(self, watts: float) -> None:
        """`watts`: above 0."""
        self._watts = watts
        self.name = f"{watts:g} W assumed"

    def read(self) -> tuple[float, ...]:
        """Return the assumed watts."""
        return (self._watts,)


# ---- Raspberry Pi 5: the volts and amperes of each rail ----

PMIC = "Raspberry Pi 5 PMIC"
_PMIC_SCALE, _PMIC_OFFSET_W = 1.1451, 0.5879  # a published fit of a meter at the plug to the rails' sum
_PMIC_FIGURE = re.compile(r"(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d+)?)[AV]\b")
_VCGENCMD = ("usr/bin/vcgencmd", "usr/local/bin/vcgencmd", "opt/vc/bin/vcgencmd")
_HANGS_AFTER_S = 2.0
_VIDEO_GROUP = ("sudo usermod --append --groups video $USER", "then log out and in again")


class PmicPower(EnergySource):
    """The rails of a Raspberry Pi 5's power chip, scaled to the whole board."""

    name = PMIC
    domains = ("board",)
    interval_s = 0.2

    def __init__(self, vcgencmd: Path) -> None:
        self._command = [str(vcgencmd), "pmic_read_adc"]

    def read(self) -> tuple[float, ...]:
        """Return the board's power in watts. Raises UnreadableError where its program fails."""
        what = " ".join(self._command)
        try:
            process = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_HANGS_AFTER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UnreadableError(f"{what}: no answer in {_HANGS_AFTER_S:g} s") from None
        except OSError as error:
            raise UnreadableError(f"{what}: {error.strerror or error}") from None
        rails: dict[str, dict[str, float]] = {}
        for rail, unit, figure in _PMIC_FIGURE.findall(process.stdout):
            rails.setdefault(rail, {})[unit] = float(figure)
        watts = [rail["A"] * rail["V"] for rail in rails.values() if len(rail) == 2]
        if process.returncode or not watts:
            said = " ".join((process.stderr or process.stdout).split())[:120]
            fix = _VIDEO_GROUP if re.search("vcio|vchi|permission", said, re.IGNORECASE) else ()
            raise UnreadableError(f"{what}: {said or 'said nothing'}", *fix)
        return (sum(watts) * _PMIC_SCALE + _PMIC_OFFSET_W,)


def find_pmic(root: Path) -> SourceFinding:
    """Look for a Raspberry Pi 5, and the command by which it tells its power."""
    board = device_model(root)
    if "Raspberry Pi" in board and "Raspberry Pi 5" not in board:
        return SourceFinding(PMIC, None, f"a {board} has no sensor of its current: only a Pi 5 has")
    vcgencmd = next((root / path for path in _VCGENCMD if (root / path).exists()), None)
    if vcgencmd is not None:
        return _finding(PMIC, lambda: PmicPower(vcgencmd))
    if "Raspberry Pi 5" not in board:
        return SourceFinding(PMIC, None, "this is no Raspberry Pi 5", is_absent=True)
    fix = ("sudo apt install raspi-utils   # brings vcgencmd",)
    return SourceFinding(PMIC, None, "vcgencmd is not installed", fix)


# ---- a laptop that is not plugged in ----

BATTERY = "battery"


class BatteryPower(EnergySource):
    """A laptop's batteries while they discharge: the power of the whole machine, display included."""

    interval_s = 1.0  # gauges update every second or more slowly

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self.domains = tuple(folder.name for folder in folders)
        self.counted = (True,) * len(self.domains)
        self.name = f"{BATTERY} {'+'.join(self.domains)}"

    def read(self) -> tuple[float, ...]:
        """Return the watts of each battery. Raises UnreadableError if the machine is plugged in."""
        states = {folder: read_kernel_file(folder / "status") for folder in self._folders}
        for folder, state in states.items():
            if state == "Charging" or "Discharging" not in states.values():
                raise UnreadableError(
                    f"{folder.name} is {'not discharging' if state == 'Unknown' else state.lower()}: "
                    "what the machine takes from the plug is not seen",
                    "unplug the charger and wait a minute",
                )
        watts = [
            _battery_watts(folder) if state == "Discharging" else 0.0 for folder, state in states.items()
        ]
        if not sum(watts):
            raise UnreadableError(f"{self.name} says 0 W", "wait a minute: a gauge is slow after unplugging")
        return tuple(watts)


def _battery_watts(folder: Path) -> float:
    power = folder / "power_now"
    if power.exists():
        return abs(read_number(power)) / 1e6  # some drivers show discharging as negative
    return abs(read_number(folder / "current_now")) * read_number(folder / "voltage_now") / 1e12


def find_battery(root: Path) -> SourceFinding:
    """Look for discharging batteries that power the machine, not a mouse or a headset."""
    supplies = root / "sys/class/power_supply"

    def says(folder: Path, file: str, text: str) -> bool:
        return (folder / file).exists() and read_kernel_file(folder / file) == text

    try:
        folders = [
            folder
            for folder in sorted(supplies.glob("*"))
            if says(folder, "type", "Battery") and not says(folder, "scope", "Device")
        ]
    except (OSError, UnreadableError) as error:
        return SourceFinding(BATTERY, None, str(error))
    if not folders:
        return SourceFinding(BATTERY, None, f"no battery in {supplies}", is_absent=True)
    return _finding(BATTERY, lambda: BatteryPower(folders))


# ---- RAPL ----
#
#     /sys/class/powercap/intel-rapl:0/name                   package-0
#                                     /energy_uj              microjoules since some time, wrapping
#                                     /max_energy_range_uj    where it wraps
#                         intel-rapl:0:1/name                 dram, of package-0
#                         intel-rapl:1/name                   psys, the whole board
#                         intel-rapl-mmio:0/name              package-0 again, through memory-mapped I/O
#
# The joules are those of the packages (cores, caches and graphics of each socket or die) plus their memory,
# if it has a counter. psys includes the packages, so it counts only if there are none.

RAPL = "RAPL"
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

_PACKAGE = re.compile(r"package-\d+(?:-die-\d+)?")
_MOST_W = 1000.0  # of a package or its memory: twice the short peaks of the largest sockets
_MOST_PSYS_W = 5000.0
_USUAL_RANGE_UJ = 65_532_610_987  # if unknown: 32 bits of 2^-16 J, the smallest unit in use
_LONGEST_S = 10.0  # between two readings, even if the range would allow more
_LATE_S = 1.0  # how old a counter's figure may be when it is read; a generous bound


@dataclass(frozen=True, slots=True)
class RaplZone:
    """A counter of joules that RAPL keeps, of a package or a part of it."""

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

    def joules(self, start: float, end: float, seconds: float) -> float:
        """Return the joules between two figures; it may have wrapped once. Raises UnreadableError."""
        if seconds >= self.wraps_after_s:
            raise UnreadableError(
                f"RAPL was not read for {seconds:.3g} s (suspended, or starved of time): "
                f"{self.domain} may have wrapped more than once"
            )
        if end >= start:
            return (end - start) / 1e6
        if self.range_uj is None:
            raise UnreadableError(f"RAPL: {self.domain} went backwards, and where it wraps is not known")
        spent = (end - start + self.range_uj) / 1e6
        if not 0 <= spent <= self.most_w * (seconds + _LATE_S):  # reset to 0, as after a suspend
            raise UnreadableError(f"RAPL: {self.domain} went backwards without having wrapped")
        return spent


class RaplCounters(EnergySource):
    """The counters of some zones, read from sysfs."""

    name = RAPL
    counts = True

    def __init__(self, zones: Sequence[RaplZone]) -> None:
        self.zones = tuple(zones)
        self._files = [str(zone.folder / "energy_uj") for zone in zones]
        self.domains = tuple(zone.domain for zone in zones)
        self.counted = tuple(domain != "psys" or {*self.domains} == {"psys"} for domain in self.domains)
        self.interval_s = min(_LONGEST_S, *(zone.wraps_after_s / 4 for zone in zones))

    def read(self) -> tuple[float, ...]:
        """Return the microjoules of each zone."""
        return tuple([read_number(file) for file in self._files])

    def joules(
        self, seconds: float, before: tuple[float, ...], after: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Return the joules of each zone."""
        figures = zip(self.zones, before, after, strict=True)
        return tuple(zone.joules(start, end, seconds) for zone, start, end in figures)


def find_rapl(root: Path) -> SourceFinding:
    """Look for RAPL counters below `root`. Never raises: the finding says what is missing."""
    powercap = root / "sys/class/powercap"
    try:
        zones = [*_zones(powercap)]
    except (OSError, UnreadableError) as error:
        return SourceFinding(RAPL, None, f"{powercap}: {error}")
    if zones:
        found = _finding(RAPL, lambda: RaplCounters(zones))
        return replace(found, fix=GROUP_FIX) if "root only" in found.reason else found
    missing = "no counters of processor packages in" if powercap.exists() else "no"
    if "hypervisor" not in read_cpu(root / "proc/cpuinfo").flags:
        return SourceFinding(RAPL, None, f"{missing} {powercap}", is_absent=True)
    return SourceFinding(RAPL, None, f"{missing} {powercap} (a virtual machine: its host keeps the counters)")


def _zones(powercap: Path) -> Iterator[RaplZone]:
    """Yield each zone to count, once: some machines show a package through registers and through MMIO."""
    seen = set()
    for folder in sorted(powercap.glob("intel-rapl*:*"), key=lambda path: ("mmio" in path.name, path.name)):
        if not (folder / "name").exists():  # not a zone, or just removed
            continue
        domain = _domain(powercap, folder)
        if domain and domain not in seen:
            seen.add(domain)
            try:
                range_uj = read_number(folder / "max_energy_range_uj") or None
            except UnreadableError:
                range_uj = None
            yield RaplZone(domain, folder, range_uj)


def _domain(powercap: Path, folder: Path) -> str:
    """Return the domain of a zone; "" if another zone includes it."""
    name = read_kernel_file(folder / "name")
    if _PACKAGE.fullmatch(name) or name == "psys":
        return name
    if name == "dram" and folder.name.count(":") > 1:
        package = read_kernel_file(powercap / folder.name.rpartition(":")[0] / "name")
        return package.replace("package", "dram", 1) if _PACKAGE.fullmatch(package) else ""
    return ""
