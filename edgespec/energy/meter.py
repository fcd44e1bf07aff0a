"""The energy meter: windows of time, and the joules of each by phase.

    window = meter.begin()
    ...                                what went by until here
    window.mark("prefill")             was the prompt
    ...
    measured = meter.end(window)       what is left is "rest"

Counters are read at every mark, which costs some microseconds; a thread reads them in between, so that
none wraps unseen. Watts are read by the thread alone, and marks only note the time: the trapezoids
between the samples are cut at the marks when the window ends.

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

from edgespec.energy.base import Finding, Reading, Source, UnreadableError
from edgespec.energy.kept_idle import kept_idle
from edgespec.energy.measurement import Measurement, Phase
from edgespec.energy.resolution import Resolution, find_resolution
from edgespec.energy.sources import survey, why_none
from edgespec.energy.trail import Point, Trail
from edgespec.errors import describe_os_error
from edgespec.platform.closing import Closing
from edgespec.platform.messages import MessageFn, silent

MOST_GAP = 0.1
"""Share of a window without samples close enough, above which it has no joules."""

ClockFn = Callable[[], float]

_MOVES_IN_S = 0.1  # a counter that works ticks about every millisecond


def boot_clock() -> float:
    """Return the seconds since the machine was started, those it was suspended included.

    A counter may wrap in a suspend, or start anew; Python's monotonic clock would not show the time.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Window:
    """A span of time that is measured: from EnergyMeter.begin to EnergyMeter.end."""

    def __init__(self, meter: EnergyMeter, began: float) -> None:
        self._meter = meter
        self.began = began
        self.start: Point | None = None
        """None: the source could not be read."""
        self.fault = ""
        """Why it has no joules, once that is known."""
        self.marks: list[tuple[float, Phase, Point | None]] = []
        """When each phase ended; and what had gone by, of a counter."""
        self.measured: Measurement | None = None

    def mark(self, phase: Phase) -> None:
        """Say that what went by since the last mark, or since the beginning, was `phase`."""
        self._meter.mark(self, phase)

    def end(self) -> Measurement:
        """Close the window: EnergyMeter.end."""
        return self._meter.end(self)


class EnergyMeter(Closing):
    """Measures windows of time with one source; several may be open at once, and in several threads."""

    def __init__(
        self,
        source: Source | None,
        *,
        reason: str = "",
        idle_w: float | None = None,
        clock: ClockFn = boot_clock,
        threaded: bool = True,
    ) -> None:
        """Take a source; None: unavailable for a `reason`, and all windows are without joules.

        `clock` gives seconds. Without `threaded` nothing reads the source between marks but `sample`.
        """
        self._source = source
        self.reason = "" if source else reason or "nothing to measure with"
        """Why there is nothing to measure with now; "" where there is. A source may come back."""
        self.idle_w = idle_w
        """Watts of the idle machine by this source; None: not known."""
        self.found: tuple[Finding, ...] = ()
        """What `choose` chose from."""
        self._clock = clock
        self._latest = clock()
        self._threaded = threaded
        self._lock = RLock()
        self._windows: list[Window] = []
        self._unsettled: list[tuple[Reading, Window, int]] = []
        self._stop = Event()
        self._trail = Trail(source) if source else None
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

        Where there is none the meter says so in `reason`. The idle power is what was kept of the source;
        `on_message` takes a line if that cannot be read. Raises UsageError for watts that are none.
        """
        found = survey(root, assume_watts=assume_watts, vcgencmd=vcgencmd)
        source = next((finding.source for finding in found if finding.source), None)
        idle_w = kept_idle(source.name, root, on_message) if source and not source.estimated else None
        meter = cls(source, reason="" if source else why_none(found), idle_w=idle_w)
        meter.found = found
        return meter

    # ---- what it is ----

    @property
    def available(self) -> bool:
        """Whether the source could be read the last time."""
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
        """Seconds between two readings of the thread; None without a source."""
        return self._source.interval_s if self._source else None

    @property
    def reading_s(self) -> float | None:
        """Mean seconds that a reading took; None before the first."""
        return self._read_s / self._n_read if self._n_read else None

    def resolution(self) -> Resolution:
        """Return how finely the source tells energy. Reads it, a counter for a fifth of a second."""
        return find_resolution(self._source, self._read) if self._source else Resolution()

    # ---- windows ----

    def begin(self) -> Window:
        """Open a window now. Raises nothing: where the source cannot be read, it ends without joules."""
        source = self._source
        with self._lock:
            self._settle()
            reading = self._read()
            if not self._windows and self._trail:
                self._trail.clear()  # what was missed while nobody asked concerns nobody
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
        """Close a phase of `window`: see Window.mark. One that has ended takes no more marks."""
        if not self.counts:  # no lock: the thread may hold it while it reads
            window.marks.append((self._clock(), phase, None))
            return
        with self._lock:
            if self._source is None or window.fault or window.measured is not None:
                return
            # No more than this now: between two passes the caches hold weights, and all code is slow.
            try:
                figures = self._source.read()
            except UnreadableError as error:
                self.reason = window.fault = str(error)  # nothing says where this phase ended
                return
            now = self._now()
            window.marks.append((now, phase, None))
            self._unsettled.append((Reading(now, figures), window, len(window.marks) - 1))

    def end(self, window: Window) -> Measurement:
        """Close a window and return what was measured; the same again for one that has ended."""
        ended = self._now()
        with self._lock:
            if window.measured is None:
                if not window.fault and not self.sample():
                    window.fault = self.reason  # nothing says what went by since the last sample
                if window in self._windows:  # Ctrl-C may have come between these lines
                    self._windows.remove(window)
                if not self._windows:
                    self._stop.set()
                window.measured = self._measurement(window, max(ended, window.began))
            return window.measured

    def sample(self) -> bool:
        """Read the source for the windows that are open, as the thread does every `interval_s`.

        Return whether it could be read. If not, the next time may do: a counter goes on counting, and of
        power a sample is missing.
        """
        with self._lock:
            self._settle()
            reading = self._read()
            if reading is not None:
                self._add(reading)
            return reading is not None

    def close(self) -> None:
        """Stop reading. Windows that are still open can be ended."""
        self._stop.set()

    # ---- inside ----

    def _now(self) -> float:
        """Return the clock, which never goes backwards here."""
        self._latest = max(self._latest, self._clock())
        return self._latest

    def _read(self) -> Reading | None:
        """Return a reading of the source; None, and `reason` says why, if there is none."""
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
        return Reading(now if self._source.counts else (before + now) / 2, figures)

    def _settle(self) -> None:
        """Put what marks have read into the trail."""
        for reading, window, at in self._unsettled:
            self._add(reading)
            moment, phase, _ = window.marks[at]
            window.marks[at] = (moment, phase, self._trail.last if self._trail else None)
        self._unsettled.clear()

    def _add(self, reading: Reading) -> None:
        if self._trail:
            try:
                self._trail.add(reading)
            except UnreadableError as error:
                for window in self._windows:
                    window.fault = window.fault or str(error)
                self._trail.clear()
                self._trail.add(reading)  # windows that begin from here on are not concerned

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

        def at(moment: float, point: Point | None) -> Point:
            return point or trail.at(moment)

        start = window.start if source.counts else trail.at(window.began)
        end = at(ended, trail.last if source.counts else None)
        gap_s = end.gap_s - start.gap_s
        if gap_s > MOST_GAP * seconds:
            reason = f"{source.name} gave no samples for {gap_s:.1f} s of {seconds:.1f} s"
            if self.reason:
                reason += f": {self.reason}"
            return Measurement(seconds, None, self.idle_w, source=source.name, reason=reason, gap_s=gap_s)

        def counted(before: Point, after: Point) -> float:
            spent = zip(source.counted, before.joules, after.joules, strict=True)
            return sum(end - start for is_counted, start, end in spent if is_counted)

        phases: dict[str, float] = {}
        before = start
        rest: tuple[float, Phase, Point | None] = (ended, "rest", end)
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
