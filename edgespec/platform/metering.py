"""Meters of energy as the core sees them: meters, their windows, and a window's measurement.

A meter is passed to the engine, or found by the entry points `edgespec.meters`; ours are in apps/energy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import EntryPoint
from inspect import getattr_static
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from edgespec.errors import MessageFn, silent
from edgespec.platform.plugins import PluginError, called, guarded, is_ours, offered, traced

R = TypeVar("R")

Phase = Literal["prefill", "draft", "verify", "rest"]
"""Part of a generation: the target prefills, a drafter drafts (or prefills), the target verifies, or anything
else."""


class Measurement(msgspec.Struct, frozen=True):
    """The energy of a window of time, or the reason why it is unknown."""

    seconds: float
    joules: float | None
    """Gross: all that the source measured, the idle machine's share included. None if unavailable."""
    idle_w: float | None = None
    """Watts of the idle machine by the same source; None if unknown."""
    domains: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Joules by domain, such as package-0 and dram-0; psys (the board), if listed, is not in `joules`."""
    phases: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Joules by phase; their sum is `joules`. Empty if nothing was marked."""
    source: str = ""
    """The source's name; "" for none."""
    estimated: bool = False
    """Whether `joules` is computed from watts that the user assumed."""
    reason: str = ""
    """Why there are no joules, in one line; else ""."""
    gap_s: float = 0.0
    """Seconds in which the source was not read often enough; the energy spent then is interpolated."""

    @property
    def net_joules(self) -> float | None:
        """Joules beyond what the idle machine would have taken; None if either is unknown."""
        if self.joules is None or self.idle_w is None:
            return None
        return self.joules - self.idle_w * self.seconds

    @property
    def joule_seconds(self) -> float | None:
        """The time-energy product, J s (Gonzalez and Horowitz 1996: the energy-delay product)."""
        return None if self.joules is None else self.joules * self.seconds

    def part(self, share: float) -> Measurement:
        """Return the measurement of one of several users of the machine, whose share is 0 to 1."""
        if share >= 1.0 or self.joules is None:
            return self
        return replace(
            self,
            joules=share * self.joules,
            idle_w=None if self.idle_w is None else share * self.idle_w,
            domains={name: share * joules for name, joules in self.domains.items()},
            phases={name: share * joules for name, joules in self.phases.items()},
        )

    def facts(self, n_tokens: int) -> dict[str, Any]:
        """Return all fields and the derived figures for `n_tokens` emitted tokens, ready for JSON."""
        derived = {
            "net_joules": self.net_joules,
            "joule_seconds": self.joule_seconds,
            "joules_per_token": self.per_token(n_tokens),
            "net_joules_per_token": self.net_per_token(n_tokens),
        }
        return asdict(self) | derived

    def per_token(self, n_tokens: int) -> float | None:
        """Return the gross joules per emitted token; None if unknown or nothing was emitted."""
        return None if self.joules is None or n_tokens < 1 else self.joules / n_tokens

    def net_per_token(self, n_tokens: int) -> float | None:
        """Return the net joules per emitted token; None if unknown or nothing was emitted."""
        net = self.net_joules
        return None if net is None or n_tokens < 1 else net / n_tokens


class MeterWindow(Protocol):
    """A span of time that is measured."""

    def mark(self, phase: Phase, /) -> None:
        """Note that the time since the last mark, or since the beginning, was `phase`."""

    def end(self) -> Measurement:
        """Close the window and return its measurement."""


class Meter(AbstractContextManager["Meter", None], Protocol):
    """Measures the energy that this machine spends, until it is closed."""

    @property
    def available(self) -> bool:
        """Whether the meter's last reading succeeded."""

    @property
    def counts(self) -> bool:
        """Whether it counts energy: fine enough for windows of a fraction of a second."""

    def begin(self) -> MeterWindow:
        """Open a window now. Raises nothing: if nothing can be read, the window has no joules."""


class _OthersWindow:
    """A window of another package's meter."""

    def __init__(self, meter: _OthersMeter, window: MeterWindow | None) -> None:
        self._meter, self._window, self._began = meter, window, time.perf_counter()

    def mark(self, phase: Phase) -> None:
        if window := self._window:
            self._meter.ask("mark", lambda: window.mark(phase), None)

    def end(self) -> Measurement:
        nothing = Measurement(time.perf_counter() - self._began, None)
        measured = nothing
        if window := self._window:
            measured = self._meter.ask("end", lambda: _checked(window.end()), nothing)
        return replace(measured, reason=self._meter.failed) if self._meter.failed else measured


class _OthersMeter(Meter):
    """A meter of another package: when its code fails, one line reports it and nothing more is measured."""

    failed = ""

    def __init__(self, name: str, meter: Meter, on_message: MessageFn) -> None:
        self._name, self._meter, self._on_message = name, meter, on_message

    def ask(self, what: str, call: Callable[[], R], otherwise: R) -> R:
        """Return the result of the meter's code, or `otherwise` if it fails or failed before."""
        if self.failed:
            return otherwise
        try:
            code = partial(getattr_static, type(self._meter), what)
            return guarded(f"the meter {self._name}: {what} failed", call, code=code)
        except PluginError as error:
            self.failed = str(error)
            self._on_message(traced(f"{self.failed}; no energy is measured", error))
            return otherwise

    @property
    def available(self) -> bool:
        return self.ask("available", lambda: bool(self._meter.available), otherwise=False)

    @property
    def counts(self) -> bool:
        return self.ask("counts", lambda: bool(self._meter.counts), otherwise=False)

    def begin(self) -> MeterWindow:
        return _OthersWindow(self, self.ask("begin", self._begin, None))

    def _begin(self) -> MeterWindow:
        window = self._meter.begin()
        if not (callable(window.mark) and callable(window.end)):
            raise TypeError(f"a {type(window).__name__}, and no window")
        return window

    def __enter__(self) -> Meter:
        self.ask("enter", self._meter.__enter__, None)
        return self

    def __exit__(self, *_: object) -> None:
        self.ask("close", lambda: self._meter.__exit__(None, None, None), None)


def _checked(measured: object) -> Measurement:
    """Return a Measurement. Raises TypeError and ValueError for any other value."""
    if not isinstance(measured, Measurement):
        raise TypeError(f"a {type(measured).__name__}, and no Measurement")
    numbers = [measured.seconds, measured.gap_s, *measured.domains.values(), *measured.phases.values()]
    numbers += [one for one in (measured.joules, measured.idle_w) if one is not None]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a Measurement whose seconds or joules are no finite numbers")
    return replace(measured, source=str(measured.source), reason=str(measured.reason))


def _load(point: EntryPoint, on_message: MessageFn) -> Meter:
    made: Meter = point.load()(on_message=on_message)
    return made


def choose_meter(*, assume_watts: float | None = None, on_message: MessageFn = silent) -> Meter:
    """Return the first available meter of the entry points `edgespec.meters`, ours last.

    Each is a function with these arguments that returns a Meter. Only ours can assume watts, and its windows
    say why if nothing can be read; `on_message` takes lines for the user. Raises UsageError for
    impossible watts.
    """
    points = offered("edgespec.meters").values()
    if assume_watts is None:
        for point in points:
            if is_ours(point):
                continue
            try:
                made = guarded(f"the meter {called(point)} is left out", partial(_load, point, on_message))
            except PluginError as error:
                on_message(traced(str(error), error))
                continue
            meter = _OthersMeter(point.name, made, on_message)
            if meter.available:
                return meter
    (ours,) = filter(is_ours, points)
    last: Meter = ours.load()(assume_watts=assume_watts, on_message=on_message)
    return last
