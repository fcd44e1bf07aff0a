"""What every source of energy figures is: readings, and the joules between two of them.

    counters   RAPL          figures are microjoules that went by; cheap, read at every mark
    powers     all others    figures are watts at a moment; slow, read every interval_s by a thread

A source is one of a kind on this machine; what was found of each kind is a Finding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from edgespec.errors import describe_os_error

_LONGEST = 4096  # bytes: no file in sysfs is longer


class UnreadableError(Exception):
    """A source cannot be read, or what went by cannot be told; `str(error)` is the one line that says why."""

    def __init__(self, reason: str, *fix: str) -> None:
        super().__init__(reason)
        self.fix = fix
        """What to do about it, a line each."""


class Reading(NamedTuple):
    """What a source said at a moment."""

    at: float
    """Seconds of the meter's clock."""
    figures: tuple[float, ...]
    """One for each of the source's domains: microjoules of a counter, or watts."""


class Source(Protocol):
    """Something of this machine that tells energy or power."""

    @property
    def name(self) -> str:
        """What it is, in the user's words: Measurement.source."""

    @property
    def domains(self) -> tuple[str, ...]:
        """What it tells apart, such as package-0."""

    @property
    def counted(self) -> tuple[bool, ...]:
        """Which of the domains add up to `joules`; the others are in them already, or beside them."""

    @property
    def counts(self) -> bool:
        """Whether it counts energy, for windows of milliseconds too; else it tells power."""

    @property
    def estimated(self) -> bool:
        """Whether its figures are an assumption."""

    @property
    def interval_s(self) -> float:
        """Seconds after which it is to be read again while a window is open; infinite: never."""

    def read(self) -> tuple[float, ...]:
        """Return a figure for each domain, now. Raises UnreadableError."""

    def joules(self, before: Reading, after: Reading) -> tuple[float, ...]:
        """Return the joules of each domain between two readings. Raises UnreadableError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one kind of source on this machine."""

    kind: str
    """The kind in words, such as RAPL."""
    source: Source | None
    """None: unavailable."""
    reason: str = ""
    """Why it is unavailable, in one line."""
    fix: tuple[str, ...] = ()
    """What to do about it, a line each; () where nothing can be done."""
    present: bool = False
    """Whether the machine has it, available or not."""


class Power:
    """The part that all sources of watts share: the joules between two samples."""

    counts = False
    estimated = False

    def joules(self, before: Reading, after: Reading) -> tuple[float, ...]:
        """Return the trapezoid of each domain between two samples."""
        half = (after.at - before.at) / 2
        return tuple(half * (a + b) for a, b in zip(before.figures, after.figures, strict=True))


def read_text(file: str | Path) -> str:
    """Return what is in a small file of the kernel's. Raises UnreadableError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # a fraction of Path.read_text's time
        try:
            return os.read(descriptor, _LONGEST).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except PermissionError:
        raise UnreadableError(f"{file}: readable by root only") from None
    except OSError as error:
        raise UnreadableError(describe_os_error(error)) from None


def read_number(file: str | Path) -> int:
    """Return the number in a kernel's file. Raises UnreadableError."""
    text = read_text(file)
    try:
        return int(text)
    except ValueError:
        raise UnreadableError(f"{file}: {text[:40]!r} is no number") from None
