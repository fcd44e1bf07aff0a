"""The energy meter: windows of time, and the joules of each; of a counter also by phase.

    window = meter.begin()
    ...
    window.mark("prefill")             the time since begin() was "prefill"
    ...
    measured = window.end()            the time since the last mark was "rest"

The meter sums the joules between successive readings of its source: at the begin and the end of each window,
by a thread in between, so that no wrap goes unseen, and at every mark, which costs some microseconds. Power
samples lie too far apart for phases: marks do not read such a source.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Annotated, NamedTuple, Self

import msgspec

from edgespec.apps.energy.sources import (
    EnergySource,
    SourceFinding,
    UnreadableError,
    survey,
    why_none,
)
from edgespec.errors import MessageFn, describe_os_error, silent
from edgespec.platform.closing import Closing
from edgespec.platform.kept import IDLE_POWER, DamagedFileError, StateFile, parse_json
from edgespec.platform.machine import MOST_OTHER_LOAD, OtherLoad, read_cpu
from edgespec.platform.metering import Measurement, Phase

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
    """What the source has measured up to a moment."""

    at: float
    joules: tuple[float, ...]
    """Energy spent in each domain."""
    gap_s: float
    """Seconds in which samples were too far apart."""


class Window:
    """A span of time that is measured, from EnergyMeter.begin on."""

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
        """Say that the time since the last mark, or the begin, was `phase`. Once ended this does nothing."""
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

        Return whether that succeeded. A failure loses little: a counter keeps counting, and of power only
        one sample is missing.
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
        """Add the joules since the last reading; where they cannot be told, open windows get none."""
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
            return replace(unknown, reason=window.fault or self.reason)
        gap_s = end.gap_s - start.gap_s
        if gap_s > MOST_GAP * seconds:
            reason = f"{source.name} gave no samples for {gap_s:.1f} s of {seconds:.1f} s"
            return replace(unknown, reason=reason, gap_s=gap_s)
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
            return replace(unknown, reason=f"{source.name} stood still for {seconds:.1f} s")
        return replace(
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

    `on_progress` takes the seconds that have passed. `load` tells how busy other programs are.
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
