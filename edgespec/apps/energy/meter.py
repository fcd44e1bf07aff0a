"""Energy: the sources of this machine, in the order of preference, and the meter that reads one.

    counters   RAPL          figures are microjoules spent so far; cheap, read at every mark
    powers     all others    figures are watts at a moment; slow, read every interval_s by a thread

For each kind of source, a SourceFinding says whether this machine has it. All paths are below a root. The
meter has windows of time, and the joules of each; of a counter also by phase:

    window = meter.begin()
    ...
    window.mark("prefill")             the time since begin() was "prefill"
    ...
    measured = window.end()            the time since the last mark was "rest"

It sums the joules between successive readings of its source: at the start and the end of each window, by a
thread in between, so that no wrap goes unseen, and at every mark, which costs some microseconds. Power
samples lie too far apart for phases: marks do not read such a source.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Annotated, NamedTuple, Self

import msgspec

from edgespec.errors import MessageFn, UsageError, describe_os_error, silent
from edgespec.platform.closing import Closing
from edgespec.platform.kept import IDLE_POWER, DamagedFileError, StateFile, parse_json
from edgespec.platform.machine import MOST_OTHER_LOAD, OtherLoad, device_model, read_cpu
from edgespec.platform.metering import Measurement, Phase

# ---- what all have ----


_LONGEST = 4096  # bytes: no file in sysfs is longer


class UnreadableError(Exception):
    """A source cannot be read, or the energy spent is unknown; `str(error)` says why in one line."""

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
    """A source of constant watts, which the user gave: estimates."""

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
    """Look for a Raspberry Pi 5, and the command that prints its power."""
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


MOST_GAP = 0.1
"""A window has no joules if samples were too far apart for more than this share of it."""

MOST_INTERVALS = 4.0
"""Power samples further apart than this many intervals leave a gap."""

ClockFn = Callable[[], float]

_MOVES_IN_S = 0.1  # a working counter ticks about every millisecond


def boot_clock() -> float:
    """Return the seconds since the machine was started, time in suspend included.

    A counter may wrap or restart in a suspend, which Python's monotonic clock leaves out.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EnergySums(NamedTuple):
    """The joules that a source has measured up to a moment."""

    at: float
    joules: tuple[float, ...]
    """Energy spent in each domain."""
    gap_s: float
    """Seconds in which samples were too far apart."""


class Window:
    """A span of time that is measured, opened by EnergyMeter.begin."""

    def __init__(self, meter: EnergyMeter, began: float, start: EnergySums | None, fault: str) -> None:
        self._meter = meter
        self.began = began
        self.start = start
        """None if the source could not be read."""
        self.fault = fault
        """Why the window will have no joules; "" so far as is known."""
        self.marks: list[tuple[Phase, EnergySums]] = []
        """The sums at the end of each phase."""
        self.measured: Measurement | None = None

    def mark(self, phase: Phase) -> None:
        """Count the time since the last mark, or the beginning, as `phase`. A closed window ignores it."""
        meter = self._meter
        if not (meter.counts or meter.estimated):
            return
        with meter._lock:
            if self.fault or self.measured is not None:
                return
            if meter.sample():
                self.marks.append((phase, meter._sums))
            else:
                self.fault = meter.reason  # where this phase ended is unknown

    def end(self) -> Measurement:
        """Close the window and return what was measured; a second call returns the same."""
        meter, ended = self._meter, self._meter._clock()
        with meter._lock:
            if self.measured is None:
                if not self.fault and not meter.sample():
                    self.fault = meter.reason  # the energy since the last sample is unknown
                self.measured = meter._closed(self, ended - self.began)
            return self.measured


class EnergyMeter(Closing):
    """Measures windows of time with one source; several may be open at once, and in several threads."""

    def __init__(
        self,
        source: EnergySource | None,
        *,
        reason: str = "",
        idle_w: float | None = None,
        clock: ClockFn = boot_clock,
        threaded: bool = True,
    ) -> None:
        """Measure with `source`; None: unavailable for `reason`, and windows have no joules.

        `clock` gives seconds, and never goes backwards. Without `threaded`, only `sample` reads the source
        between marks.
        """
        self._source = source
        self.source = source.name if source else ""
        """The source's name; "" for none."""
        self.estimated = source is not None and source.estimated
        """Whether the source is an assumption."""
        self.counts = source is not None and source.counts
        """Whether the source counts energy: fine enough for windows of a fraction of a second."""
        self.reason = "" if source else reason or "nothing to measure with"
        """Why the source cannot be read now, else "". It may become readable again."""
        self.idle_w = idle_w
        """Watts of the idle machine by this source; None if unknown."""
        self.found: tuple[SourceFinding, ...] = ()
        """The sources that `choose` looked for."""
        self._clock = clock
        self._threaded = threaded
        self._lock = RLock()
        self._windows: list[Window] = []
        self._stop = Event()
        self._last: tuple[float, ...] | None = None
        self._sums = EnergySums(0.0, (), 0.0)

    @classmethod
    def choose(
        cls, root: Path = Path("/"), assume_watts: float | None = None, *, on_message: MessageFn = silent
    ) -> Self:
        """Return a meter with the best source of this machine: an assumption, RAPL, PMIC, battery.

        If there is none, `reason` says why. The idle power is the one stored for the source; `on_message`
        takes a line if that cannot be read. Raises UsageError unless `assume_watts` is finite and above 0.
        """
        found = survey(root, assume_watts=assume_watts)
        source = next((finding.source for finding in found if finding.source), None)
        idle_w = load_idle_power(source.name, root, on_message) if source and not source.estimated else None
        meter = cls(source, reason="" if source else why_none(found), idle_w=idle_w)
        meter.found = found
        return meter

    @property
    def available(self) -> bool:
        """Whether the last reading succeeded."""
        return not self.reason

    @property
    def interval_s(self) -> float | None:
        """Seconds between two samples of a source of power; None for any other."""
        return None if self._source is None or self.counts or self.estimated else self._source.interval_s

    def begin(self) -> Window:
        """Open a window now. Raises nothing: if the source cannot be read, the window has no joules."""
        with self._lock:
            if not self._windows:
                # Samples missed while no window was open do not matter.
                self._last, self._sums = None, EnergySums(0.0, (), 0.0)
            is_read = self.sample()
            window = Window(self, self._clock(), self._sums if is_read else None, self.reason)
            self._windows.append(window)
            interval_s = self._source.interval_s if self._source else math.inf
            if len(self._windows) == 1 and self._threaded and math.isfinite(interval_s):
                self._start_thread(interval_s)
            return window

    def sample(self) -> bool:
        """Read the source for the open windows, as the thread does every `interval_s`.

        Return whether that succeeded. A failure loses little: a counter keeps counting, and a source of power
        misses only one sample.
        """
        source = self._source
        if source is None:
            return False
        with self._lock:
            before = self._clock()
            try:
                figures = source.read()
            except (UnreadableError, OSError) as error:
                self.reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
                return False
            self.reason = ""
            now = self._clock()
            self._add(source, now if source.counts else (before + now) / 2, figures)
            return True

    def close(self) -> None:
        """Stop reading. Open windows can still be ended."""
        self._stop.set()

    def _add(self, source: EnergySource, at: float, figures: tuple[float, ...]) -> None:
        """Add the joules since the last reading; if they are unknown, open windows get none."""
        last, self._last = self._last, figures
        sums, gap_s = self._sums.joules or (0.0,) * len(figures), self._sums.gap_s
        if last is not None:
            seconds = at - self._sums.at
            if not source.counts and seconds > MOST_INTERVALS * source.interval_s:
                gap_s += seconds
            try:
                spent = source.joules(seconds, last, figures)
                sums = tuple([a + b for a, b in zip(sums, spent, strict=True)])
            except UnreadableError as error:
                for window in self._windows:
                    window.fault = window.fault or str(error)
        self._sums = EnergySums(at, sums, gap_s)

    def _start_thread(self, interval_s: float) -> None:
        stop = self._stop = Event()

        def run() -> None:
            while not stop.wait(interval_s):
                with self._lock:
                    if not stop.is_set():
                        self.sample()

        Thread(target=run, name="edgespec-energy", daemon=True).start()

    def _closed(self, window: Window, seconds: float) -> Measurement:
        if window in self._windows:  # a call that Ctrl-C ended may have removed it already
            self._windows.remove(window)
        if not self._windows:
            self._stop.set()
        source, start, end = self._source, window.start, self._sums
        unknown = Measurement(seconds, None, self.idle_w, source=self.source)
        if source is None or start is None or window.fault:
            return msgspec.structs.replace(unknown, reason=window.fault or self.reason)
        gap_s = end.gap_s - start.gap_s
        if gap_s > MOST_GAP * seconds:
            reason = f"{source.name} gave no samples for {gap_s:.1f} s of {seconds:.1f} s"
            return msgspec.structs.replace(unknown, reason=reason, gap_s=gap_s)
        # Samples of power take time: the window lies between the first and the last.
        span_s = end.at - start.at
        share = 1.0 if source.counts or span_s <= 0 else min(1.0, seconds / span_s)

        def spent(before: EnergySums, after: EnergySums) -> list[float]:
            return [share * (b - a) for a, b in zip(before.joules, after.joules, strict=True)]

        phases: dict[str, float] = {}
        before = start
        for phase, after in (*window.marks, ("rest", end)):
            counted = compress(spent(before, after), source.counted)
            phases[phase], before = phases.get(phase, 0.0) + sum(counted), after
        joules = sum(phases.values())
        if source.counts and joules == 0 and seconds > _MOVES_IN_S:
            return msgspec.structs.replace(unknown, reason=f"{source.name} stood still for {seconds:.1f} s")
        return msgspec.structs.replace(
            unknown,
            joules=joules,
            domains=dict(zip(source.domains, spent(start, end), strict=True)),
            phases=phases if window.marks else {},
            estimated=source.estimated,
            gap_s=gap_s,
        )


def chosen_source(root: Path, *, on_message: MessageFn) -> dict[str, str | None]:
    """Return the source of joules that `EnergyMeter.choose` takes, or why there is none, for `doctor`."""
    with EnergyMeter.choose(root, on_message=on_message) as meter:
        return {"source": meter.source or None, "reason": meter.reason}


# ---- the idle machine's power, kept ----
#
#     cache_root()/energy.json        {"format": "edgespec energy", "version": 1, "idle": {
#                                         "RAPL": {"watts": 3.21, "cpu": "..."}}}
#
# A figure holds for one source on one processor model. Failures here raise nothing: each is one line for
# `on_message`.

FORMAT, VERSION = "edgespec energy", 1


class _IdleFigure(msgspec.Struct, frozen=True):
    watts: Annotated[float, msgspec.Meta(gt=0)]
    cpu: str


_Figures = dict[str, _IdleFigure]  # by source


def load_idle_power(source: str, root: Path = Path("/"), on_message: MessageFn = silent) -> float | None:
    """Return the idle watts stored for `source` on this processor, or None."""
    try:
        entry = (_file(on_message).read() or {}).get(source)
    except OSError as error:
        on_message(f"the idle power is not known: {describe_os_error(error)}")
        return None
    return entry.watts if entry and entry.cpu == read_cpu(root / "proc/cpuinfo").model else None


def store_idle_power(
    source: str, watts: float, root: Path = Path("/"), on_message: MessageFn = silent
) -> Path | None:
    """Store the idle power of `source`; return the file, or None if it cannot be written."""
    file = _file(on_message)
    entry = _IdleFigure(float(f"{watts:.6g}"), read_cpu(root / "proc/cpuinfo").model)

    def with_entry(kept: _Figures | None) -> bytes:
        content = {"format": FORMAT, "version": VERSION, "idle": {**(kept or {}), source: entry}}
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    try:
        file.update(with_entry)
    except OSError as error:
        on_message(f"the idle power could not be kept: {describe_os_error(error)}")
        return None
    return file.path


def _file(on_message: MessageFn) -> StateFile[_Figures]:
    path = IDLE_POWER.path()

    def parse(data: bytes) -> _Figures:
        try:
            return msgspec.convert(parse_json(data, form=FORMAT, version=VERSION)["idle"], _Figures)
        except (KeyError, msgspec.ValidationError):
            raise DamagedFileError("damaged: no power of the idle machine") from None

    return StateFile(path, parse, on_message=on_message)


# ---- measuring the idle machine ----

_STEP_S = 0.1  # between two calls of on_progress


def measure_idle(
    meter: EnergyMeter,
    seconds: float = 10.0,
    *,
    on_progress: Callable[[float], None] = lambda _done_s: None,
    load: OtherLoad | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[float | None, str]:
    """Return the mean watts over `seconds` in which this process sleeps, and why they are None or unreliable.

    `on_progress` takes the seconds that have passed. `load` measures how busy other programs are.
    """
    load = load or OtherLoad()
    window = meter.begin()
    n_steps = max(1, round(seconds / _STEP_S))
    try:
        for step in range(n_steps):
            on_progress(seconds * step / n_steps)
            sleep(seconds / n_steps)
    finally:
        measured = window.end()
    on_progress(seconds)
    if not measured.joules or measured.estimated:
        still = f"{meter.source} stood still: measure for longer"
        reason = "an assumption says nothing of it" if measured.estimated else measured.reason or still
        return None, f"the idle power is unavailable: {reason}"
    busy, fault = load.processors(), ""
    if busy is not None and busy > MOST_OTHER_LOAD:
        fault = (
            f"the machine was busy: other programs kept {busy:.1f} processors busy; this idle power is too "
            "high and was not kept: stop other programs and run edgespec energy again"
        )
    return measured.joules / measured.seconds, fault
