"""The energy meter: windows of time, and the joules of each by phase.

    window = meter.begin()
    ...
    window.mark("prefill")             the time since begin() was "prefill"
    ...
    measured = meter.end(window)       the time since the last mark was "rest"

Counters are read at every mark, which costs some microseconds, and by a thread in between, so that no wrap
goes unseen. Watts are read by the thread alone, and marks only note the time: when the window ends, the
power between samples is interpolated at the marks.

    clock       ---begin------------mark------------mark-----------end---
    counters       read   (read)    read            read   (read)  read
    watts       read    .     .   .     .     .    .     .    .       read
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, RLock, Thread
from typing import Annotated, NamedTuple, Self

import msgspec

from edgespec.apps.energy.sources import (
    EnergyReading,
    EnergySource,
    SourceFinding,
    UnreadableError,
    survey,
    why_none,
)
from edgespec.errors import describe_os_error
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import IDLE_POWER
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.metering import Measurement, Phase
from edgespec.platform.other_load import MOST_OTHER_LOAD, OtherLoad
from edgespec.platform.state_file import DamagedFileError, NewerFormatError, StateFile, parse_json

MOST_GAP = 0.1
"""A window has no joules if samples were too far apart for more than this share of it."""

ClockFn = Callable[[], float]

_MOVES_IN_S = 0.1  # a working counter ticks about every millisecond


def boot_clock() -> float:
    """Return the seconds since the machine was started, time in suspend included.

    A counter may wrap or restart in a suspend, which Python's monotonic clock leaves out.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Window:
    """A span of time that is measured: from EnergyMeter.begin to EnergyMeter.end."""

    def __init__(self, meter: EnergyMeter, began: float) -> None:
        self._meter = meter
        self.began = began
        self.start: TrailPoint | None = None
        """None if the source could not be read."""
        self.fault = ""
        """Why the window will have no joules; "" so far as is known."""
        self.marks: list[tuple[float, Phase, TrailPoint | None]] = []
        """End of each phase and, if the source is a counter, the energy spent until then."""
        self.measured: Measurement | None = None

    def mark(self, phase: Phase) -> None:
        """Say that the time since the last mark, or since the beginning, was `phase`."""
        self._meter.mark(self, phase)

    def end(self) -> Measurement:
        """Close the window and return what was measured in it, as EnergyMeter.end."""
        return self._meter.end(self)


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

        `clock` gives seconds. Without `threaded`, only `sample` reads the source between marks.
        """
        self._source = source
        self.reason = "" if source else reason or "nothing to measure with"
        """Why the source cannot be read now, else "". It may become readable again."""
        self.idle_w = idle_w
        """Watts of the idle machine by this source; None if unknown."""
        self.found: tuple[SourceFinding, ...] = ()
        """The sources that `choose` looked for."""
        self._clock = clock
        self._latest = clock()
        self._threaded = threaded
        self._lock = RLock()
        self._windows: list[Window] = []
        self._unsettled: list[tuple[EnergyReading, Window, int]] = []
        self._stop = Event()
        self._trail = EnergyTrail(source) if source else None
        self._n_read, self._read_s = 0, 0.0

    @classmethod
    def choose(
        cls,
        root: Path = Path("/"),
        assume_watts: float | None = None,
        *,
        vcgencmd: Path | None = None,
        on_message: MessageFn = silent,
    ) -> Self:
        """Return a meter with the best source of this machine: an assumption, RAPL, PMIC, INA, battery.

        If there is none, `reason` says why. The idle power is the one stored for the source; `on_message`
        takes a line if that cannot be read. Raises UsageError unless `assume_watts` is finite and above 0.
        """
        found = survey(root, assume_watts=assume_watts, vcgencmd=vcgencmd)
        source = next((finding.source for finding in found if finding.source), None)
        idle_w = load_idle_power(source.name, root, on_message) if source and not source.estimated else None
        meter = cls(source, reason="" if source else why_none(found), idle_w=idle_w)
        meter.found = found
        return meter

    # ---- the source ----

    @property
    def available(self) -> bool:
        """Whether the last reading succeeded."""
        return not self.reason

    @property
    def source(self) -> str:
        """The source's name; "" for none."""
        return self._source.name if self._source else ""

    @property
    def estimated(self) -> bool:
        """Whether the source is an assumption."""
        return self._source is not None and self._source.estimated

    @property
    def counts(self) -> bool:
        """Whether the source counts energy: fine enough for windows of a fraction of a second."""
        return self._source is not None and self._source.counts

    @property
    def interval_s(self) -> float | None:
        """Seconds between two readings by the thread; None without a source."""
        return self._source.interval_s if self._source else None

    @property
    def reading_s(self) -> float | None:
        """Mean seconds per reading; None before the first."""
        return self._read_s / self._n_read if self._n_read else None

    def resolution(self) -> Resolution:
        """Return how finely the source measures. Takes 0.2 s if the source is a counter."""
        return find_resolution(self._source, self._read) if self._source else Resolution()

    # ---- windows ----

    def begin(self) -> Window:
        """Open a window now. Raises nothing: if the source cannot be read, the window has no joules."""
        source = self._source
        with self._lock:
            self._settle()
            reading = self._read()
            if not self._windows and self._trail:
                self._trail.clear()  # samples missed while no window was open do not matter
            window = Window(self, self._now())
            if reading is None or self._trail is None:
                window.fault = self.reason
            else:
                self._add(reading)
                window.start = self._trail.last
            self._windows.append(window)
            if len(self._windows) == 1 and self._threaded and source and math.isfinite(source.interval_s):
                self._start_thread(source.interval_s)
            return window

    def mark(self, window: Window, phase: Phase) -> None:
        """Close a phase of `window`: see Window.mark. A window that has ended ignores marks."""
        if not self.counts:  # no lock: the thread may hold it while it reads
            window.marks.append((self._clock(), phase, None))
            return
        with self._lock:
            if self._source is None or window.fault or window.measured is not None:
                return
            # Settle later: between two passes the caches are full of weights, so that all code is slow.
            try:
                figures = self._source.read()
            except UnreadableError as error:
                self.reason = window.fault = str(error)  # where this phase ended is unknown
                return
            now = self._now()
            window.marks.append((now, phase, None))
            self._unsettled.append((EnergyReading(now, figures), window, len(window.marks) - 1))

    def end(self, window: Window) -> Measurement:
        """Close a window and return what was measured; a second call returns the same."""
        ended = self._now()
        with self._lock:
            if window.measured is None:
                if not window.fault and not self.sample():
                    window.fault = self.reason  # the energy since the last sample is unknown
                if window in self._windows:  # a call that Ctrl-C ended may have removed it already
                    self._windows.remove(window)
                if not self._windows:
                    self._stop.set()
                window.measured = self._measurement(window, max(ended, window.began))
            return window.measured

    def sample(self) -> bool:
        """Read the source for the open windows, as the thread does every `interval_s`.

        Return whether that succeeded. A failure loses little: a counter keeps counting, and of power only
        one sample is missing.
        """
        with self._lock:
            self._settle()
            reading = self._read()
            if reading is not None:
                self._add(reading)
            return reading is not None

    def close(self) -> None:
        """Stop reading. Open windows can still be ended."""
        self._stop.set()

    # ---- inside ----

    def _now(self) -> float:
        self._latest = max(self._latest, self._clock())
        return self._latest

    def _read(self) -> EnergyReading | None:
        """Return a reading of the source; on failure None, and `reason` says why."""
        if self._source is None:
            return None
        began = time.perf_counter()
        before = self._now()
        try:
            figures = self._source.read()
        except (UnreadableError, OSError) as error:
            self.reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            return None
        self._n_read, self._read_s = self._n_read + 1, self._read_s + time.perf_counter() - began
        self.reason = ""
        now = self._now()
        return EnergyReading(now if self._source.counts else (before + now) / 2, figures)

    def _settle(self) -> None:
        for reading, window, at in self._unsettled:
            self._add(reading)
            moment, phase, _ = window.marks[at]
            window.marks[at] = (moment, phase, self._trail.last if self._trail else None)
        self._unsettled.clear()

    def _add(self, reading: EnergyReading) -> None:
        if self._trail:
            try:
                self._trail.add(reading)
            except UnreadableError as error:
                for window in self._windows:
                    window.fault = window.fault or str(error)
                self._trail.clear()
                self._trail.add(reading)  # a new trail for windows that begin later

    def _start_thread(self, interval_s: float) -> None:
        stop = self._stop = Event()

        def run() -> None:
            while not stop.wait(interval_s):
                with self._lock:
                    if not stop.is_set():
                        self.sample()

        Thread(target=run, name="edgespec-energy", daemon=True).start()

    def _measurement(self, window: Window, ended: float) -> Measurement:
        seconds = ended - window.began
        source, trail = self._source, self._trail
        if source is None or trail is None or window.start is None or window.fault:
            reason = window.fault or self.reason
            return Measurement(seconds, None, self.idle_w, source=self.source, reason=reason)

        def at(moment: float, point: TrailPoint | None) -> TrailPoint:
            return point or trail.at(moment)

        start = window.start if source.counts else trail.at(window.began)
        end = at(ended, trail.last if source.counts else None)
        gap_s = end.gap_s - start.gap_s
        if gap_s > MOST_GAP * seconds:
            reason = f"{source.name} gave no samples for {gap_s:.1f} s of {seconds:.1f} s"
            if self.reason:
                reason += f": {self.reason}"
            return Measurement(seconds, None, self.idle_w, source=source.name, reason=reason, gap_s=gap_s)

        def counted(before: TrailPoint, after: TrailPoint) -> float:
            spent = zip(source.counted, before.joules, after.joules, strict=True)
            return sum(end - start for is_counted, start, end in spent if is_counted)

        phases: dict[str, float] = {}
        before = start
        rest: tuple[float, Phase, TrailPoint | None] = (ended, "rest", end)
        marked = window.began
        for moment, phase, point in [*window.marks, rest] if window.marks else []:
            marked = min(max(moment, marked), ended)  # the clock may have gone backwards
            after = at(marked, point)
            phases[phase] = phases.get(phase, 0.0) + counted(before, after)
            before = after
        joules = sum(phases.values()) if phases else counted(start, end)
        if source.counts and joules == 0 and seconds > _MOVES_IN_S:
            reason = f"{source.name} stood still for {seconds:.1f} s"
            return Measurement(seconds, None, self.idle_w, source=source.name, reason=reason)
        domains = zip(source.domains, start.joules, end.joules, strict=True)
        return Measurement(
            seconds,
            joules,
            self.idle_w,
            domains={domain: after - before for domain, before, after in domains},
            phases=phases,
            source=source.name,
            estimated=source.estimated,
            gap_s=gap_s,
        )


def chosen_source(root: Path, *, on_message: MessageFn) -> dict[str, str | None]:
    """Return the source of joules that `EnergyMeter.choose` takes, or why there is none, for `doctor`."""
    with EnergyMeter.choose(root, on_message=on_message) as meter:
        return {"source": meter.source or None, "reason": meter.reason}


# ---- the running sum ----

MOST_INTERVALS = 4.0
"""Power samples further apart than this many intervals leave a gap."""


class TrailPoint(NamedTuple):
    """The sums up to a moment."""

    joules: tuple[float, ...]
    """Energy spent in each domain."""
    gap_s: float
    """Seconds in which samples were too far apart."""


class EnergyTrail:
    """Successive readings of a source and the running sums of their joules.

    Of a counter only the last reading is kept: it is never interpolated.
    """

    def __init__(self, source: EnergySource) -> None:
        self._source = source
        self._readings: list[EnergyReading] = []
        self._points: list[TrailPoint] = []

    def clear(self) -> None:
        """Forget all readings: the next one begins a new trail."""
        self._readings.clear()
        self._points.clear()

    @property
    def last(self) -> TrailPoint | None:
        """The sums up to the last reading; None before the first."""
        return self._points[-1] if self._points else None

    def add(self, reading: EnergyReading) -> None:
        """Add a reading. Raises UnreadableError, and adds nothing, if the energy spent cannot be told."""
        if not self._readings:
            point = TrailPoint((0.0,) * len(reading.figures), 0.0)
        else:
            before, last = self._readings[-1], self._points[-1]
            spent = self._source.joules(before, reading)
            gap_s = last.gap_s + self._gap_s(before, reading)
            point = TrailPoint(tuple(a + b for a, b in zip(last.joules, spent, strict=True)), gap_s)
        if self._source.counts:
            self.clear()
        self._readings.append(reading)
        self._points.append(point)

    def at(self, moment: float) -> TrailPoint:
        """Return the sums up to `moment`, which is limited to between the first and the last reading."""
        i = bisect_right(self._readings, moment, key=lambda reading: reading.at)
        if i == len(self._readings):
            return self._points[-1]
        if i == 0:
            return self._points[0]
        before, after, point = self._readings[i - 1], self._readings[i], self._points[i - 1]
        share = (moment - before.at) / (after.at - before.at)
        pairs = zip(before.figures, after.figures, strict=True)
        between = EnergyReading(moment, tuple(a + share * (b - a) for a, b in pairs))
        spent = self._source.joules(before, between)
        return TrailPoint(
            tuple(a + b for a, b in zip(point.joules, spent, strict=True)),
            point.gap_s + share * self._gap_s(before, after),
        )

    def _gap_s(self, before: EnergyReading, after: EnergyReading) -> float:
        """Return the seconds between two samples if they are too far apart, else 0."""
        seconds = after.at - before.at
        is_gap = not self._source.counts and seconds > MOST_INTERVALS * self._source.interval_s
        return seconds if is_gap else 0.0


# ---- resolution ----

_OBSERVED_S = 0.2
_ENOUGH_STEPS = 50


@dataclass(frozen=True, slots=True)
class Resolution:
    """Smallest differences that a source measures."""

    step_j: float | None = None
    """The smallest step seen of a counter; None for a source of power or a counter that stood still."""
    step_s: float | None = None
    """The median time between two steps of a counter."""
    interval_s: float | None = None
    """The time between two samples of a source of power; None for a counter or an assumption."""


def find_resolution(source: EnergySource, read: Callable[[], EnergyReading | None]) -> Resolution:
    """Return the resolution of `source`; watches a counter for 0.2 s. `read` returns None on failure."""
    if not source.counts:
        if math.isinf(source.interval_s):
            return Resolution()
        read()
        return Resolution(interval_s=source.interval_s)
    steps: list[float] = []
    times: list[float] = []
    began = before = read()
    while before and began and len(steps) < _ENOUGH_STEPS:
        now = read()
        if now is None or now.at - began.at > _OBSERVED_S:
            break
        pairs = zip(source.counted, before.figures, now.figures, strict=True)
        changes = [after - start for counted, start, after in pairs if counted and after > start]
        if changes:
            steps.append(min(changes) / 1e6)
            times.append(now.at)
            before = now
    gaps = [after - start for start, after in pairwise(times)]
    return Resolution(min(steps, default=None), median(gaps) if gaps else None)


# ---- the idle machine's power, kept ----
#
#     cache_root()/energy.json        {"format": "edgespec energy", "version": 1, "idle": {
#                                         "RAPL": {"watts": 3.21, "cpu": "...", "measured": "..."}}}
#
# A figure holds for one source on one processor model. Failures here raise nothing: each is one line for
# `on_message`.

FORMAT, VERSION = "edgespec energy", 1


class _IdleFigure(msgspec.Struct, frozen=True):
    watts: Annotated[float, msgspec.Meta(gt=0)]
    cpu: str
    measured: str = ""


Entries = dict[str, _IdleFigure]
"""Source name -> figure."""


def load_idle_power(source: str, root: Path = Path("/"), on_message: MessageFn = silent) -> float | None:
    """Return the idle watts stored for `source` on this processor, or None."""
    try:
        entry = (_file(on_message).read() or {}).get(source)
    except OSError as error:
        on_message(f"the idle power is not known: {describe_os_error(error)}")
        return None
    return entry.watts if entry and entry.cpu == _cpu(root) else None


def store_idle_power(
    source: str, watts: float, root: Path = Path("/"), on_message: MessageFn = silent
) -> Path | None:
    """Store the idle power of `source`; return the file, or None if it cannot be written."""
    file = _file(on_message)
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    entry = _IdleFigure(float(f"{watts:.6g}"), _cpu(root), measured)

    def with_entry(kept: Entries | None) -> bytes:
        content = {"format": FORMAT, "version": VERSION, "idle": {**(kept or {}), source: entry}}
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    try:
        file.update(with_entry)
    except (OSError, NewerFormatError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        on_message(f"the idle power could not be kept: {reason}")
        return None
    return file.path


def _cpu(root: Path) -> str:
    return read_cpu(root / "proc/cpuinfo").model


def _file(on_message: MessageFn) -> StateFile[Entries]:
    return StateFile(IDLE_POWER.path(), _parse, on_message=on_message)


def _parse(data: bytes) -> Entries:
    document = parse_json(IDLE_POWER.path(), data, form=FORMAT, version=VERSION)
    try:
        return msgspec.convert(document["idle"], Entries)
    except (KeyError, msgspec.ValidationError):
        raise DamagedFileError("damaged: no power of the idle machine") from None


# ---- measuring the idle machine ----

_STEP_S = 0.1  # between two calls of on_progress


@dataclass(frozen=True, slots=True)
class IdlePower:
    """The mean power of the machine while this program sleeps, in watts."""

    watts: float | None
    """None if unknown; `reason` says why."""
    reason: str = ""
    warning: str = ""
    """Why the figure is unreliable, in one line; else ""."""


def measure_idle(
    meter: EnergyMeter,
    seconds: float = 10.0,
    *,
    on_progress: Callable[[float], None] = lambda _done_s: None,
    load: OtherLoad | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> IdlePower:
    """Return the mean power over `seconds` in which this process sleeps.

    `on_progress` takes the seconds that have passed. `load` tells how busy other programs are.
    """
    if meter.estimated:
        return IdlePower(None, "an assumption says nothing of the idle machine")
    load = load or OtherLoad()
    window = meter.begin()
    n_steps = max(1, round(seconds / _STEP_S))
    try:
        for step in range(n_steps):
            on_progress(seconds * step / n_steps)
            sleep(seconds / n_steps)
    finally:
        measured = meter.end(window)
    on_progress(seconds)
    if measured.joules is None:
        return IdlePower(None, measured.reason)
    if not measured.joules or not measured.seconds:
        return IdlePower(None, f"{meter.source} stood still for {measured.seconds:.1f} s: measure for longer")
    busy, warning = load.processors(), ""
    if busy is not None and busy > MOST_OTHER_LOAD:
        warning = (
            f"the machine was busy: other programs kept {busy:.1f} processors busy; this idle power is too "
            "high and was not kept: stop other programs and run edgespec energy again"
        )
    return IdlePower(measured.joules / measured.seconds, warning=warning)
