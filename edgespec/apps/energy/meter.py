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
from collections.abc import Callable
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Self

from edgespec.apps.energy.base import EnergyReading, EnergySource, SourceFinding, UnreadableError
from edgespec.apps.energy.idle_store import load_idle_power
from edgespec.apps.energy.resolution import Resolution, find_resolution
from edgespec.apps.energy.sources import survey, why_none
from edgespec.apps.energy.trail import EnergyTrail, TrailPoint
from edgespec.errors import describe_os_error
from edgespec.platform.closing import Closing
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.metering import Measurement, Phase

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
        """Close the window: EnergyMeter.end."""
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
        """Return the clock's time, kept from going backwards."""
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
        """Add to the trail what was read at marks."""
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
