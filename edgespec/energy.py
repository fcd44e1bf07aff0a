"""The processor's energy counters, as Linux shows them in its powercap tree.

    /sys/class/powercap/intel-rapl:0/name                 package-0
                                    /energy_uj            microjoules since some time, wrapping
                                    /max_energy_range_uj  where it wraps

Counted are the packages: cores, caches and graphics of each socket, idle or not. Memory and the rest of
the machine are not in them, and what other programs do at the same time is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import describe_os_error

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    microjoules: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Domain:
    counter: Path
    range_uj: int


class Powercap:
    """The energy of all processor packages, between two moments.

        began = meter.read()
        ...
        joules = meter.joules_since(began)

    `reason` says in one line why there are no counters; it is "" where there are, which is `available`.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        """Look for the packages' counters below `root`. Never raises: `reason` says what is missing."""
        self._domains: tuple[_Domain, ...] = ()
        self.reason = ""
        try:
            self._domains = tuple(_packages(root))
        except PermissionError as error:
            self.reason = f"{error.filename}: readable by root only"
        except (OSError, ValueError) as error:
            self.reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        if not self._domains and not self.reason:
            self.reason = f"no energy counters of processor packages in {root}"
        if self.available:
            self.read()  # may find that they cannot be read

    @property
    def available(self) -> bool:
        """Whether the counters can be read."""
        return not self.reason

    def read(self) -> Reading | None:
        """Return the counters now; None, and `reason` says why, when they cannot be read (any more)."""
        if not self.available:
            return None
        try:
            return Reading(tuple(int(domain.counter.read_text()) for domain in self._domains))
        except PermissionError as error:
            self.reason = f"{error.filename}: readable by root only"
        except OSError as error:
            self.reason = describe_os_error(error)
        except ValueError as error:
            self.reason = f"not an energy counter: {error}"
        return None

    def joules_since(self, began: Reading | None) -> float | None:
        """Return the joules since `began`, a `read` of this object; None when either could not be read.

        A counter may have wrapped once in between: it does so after about an hour at the earliest.
        """
        now = self.read()
        if began is None or now is None:
            return None
        spent = 0
        for domain, before, after in zip(self._domains, began.microjoules, now.microjoules, strict=True):
            spent += after - before if after >= before else after - before + domain.range_uj
        return max(0, spent) / 1e6


def _packages(root: Path) -> Iterator[_Domain]:
    """Yield each package once: some machines show it both by its registers and by memory (mmio)."""
    seen = set()
    for zone in sorted(root.glob("*:*"), key=lambda zone: ("mmio" in zone.name, zone.name)):
        try:
            name = (zone / "name").read_text().strip()
        except FileNotFoundError:  # no zone, or one that goes away
            continue
        if name.startswith("package-") and name not in seen:
            seen.add(name)
            yield _Domain(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
