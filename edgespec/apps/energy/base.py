"""The interface of all energy sources: take readings, and compute the joules between two of them.

    counters   RAPL          figures are microjoules spent so far; cheap, read at every mark
    powers     all others    figures are watts at a moment; slow, read every interval_s by a thread

For each kind of source, a SourceFinding tells whether this machine has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from edgespec.errors import describe_os_error

_LONGEST = 4096  # bytes: no file in sysfs is longer


class UnreadableError(Exception):
    """A source cannot be read, or the energy spent cannot be told; `str(error)` says why in one line."""

    def __init__(self, reason: str, *fix: str) -> None:
        super().__init__(reason)
        self.fix = fix
        """Steps that cure it, a line each."""


class EnergyReading(NamedTuple):
    """Figures that a source showed at a moment."""

    at: float
    """Seconds of the meter's clock."""
    figures: tuple[float, ...]
    """Figure of each of the source's domains: a counter's microjoules, or watts."""


class EnergySource(Protocol):
    """Something in this machine that shows energy or power."""

    @property
    def name(self) -> str:
        """Its name for the user: Measurement.source."""

    @property
    def domains(self) -> tuple[str, ...]:
        """The parts of the machine that it measures separately, such as package-0."""

    @property
    def counted(self) -> tuple[bool, ...]:
        """Whether each domain counts for the total; those that do not overlap with the others."""

    @property
    def counts(self) -> bool:
        """Whether it counts energy, fine enough for windows of milliseconds; else it shows power."""

    @property
    def estimated(self) -> bool:
        """Whether its figures are an assumption."""

    @property
    def interval_s(self) -> float:
        """Seconds between readings while a window is open; infinite: never read in between."""

    def read(self) -> tuple[float, ...]:
        """Return the present figure of each domain. Raises UnreadableError."""

    def joules(self, before: EnergyReading, after: EnergyReading) -> tuple[float, ...]:
        """Return the joules of each domain between two readings. Raises UnreadableError."""


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
    present: bool = False
    """Whether the machine has it, available or not."""


def finding(kind: str, find: Callable[[], EnergySource | None], missing: str) -> SourceFinding:
    """Whether `find` gives a source that can be read; `missing` says why it may give None."""
    try:
        source = find()
        if source is None:
            return SourceFinding(kind, None, missing)
        source.read()
    except OSError as error:
        return SourceFinding(kind, None, describe_os_error(error), present=True)
    except UnreadableError as error:
        return SourceFinding(kind, None, str(error), error.fix, present=True)
    return SourceFinding(kind, source, present=True)


class PowerSource:
    """Base of the sources that show watts: computes the joules between two samples."""

    counts = False
    estimated = False

    def joules(self, before: EnergyReading, after: EnergyReading) -> tuple[float, ...]:
        """Return the joules of each domain between two samples, by the trapezoidal rule."""
        half = (after.at - before.at) / 2
        return tuple(half * (a + b) for a, b in zip(before.figures, after.figures, strict=True))


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
