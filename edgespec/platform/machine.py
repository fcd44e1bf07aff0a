"""The sensors of the machine: clocks, temperatures, and what a Raspberry Pi's firmware says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from edgespec.platform.files import text_of

CPUS = "sys/devices/system/cpu"
UNDER_VOLTAGE, CAPPED, THROTTLED, SOFT_LIMIT = 1, 2, 4, 8
"""Flags of the Raspberry Pi's firmware."""
EVER = 16
"""Shift to the flags of what has happened since the machine was switched on."""
_FIRMWARE_WORDS = {
    UNDER_VOLTAGE: "under-voltage",
    CAPPED: "frequency capped",
    THROTTLED: "throttled",
    SOFT_LIMIT: "soft temperature limit",
}
_VCGENCMD_S = 5.0


def processor_clock(root: Path = Path("/")) -> dict[str, Any] | None:
    """Return the processor's `governors` and its clock in MHz, `least` and `most` over all cores; 0: unknown.

    `now` is the clock of the fastest core. None if the system does not tell. `root`: as above.
    """
    names = ("cpuinfo_min_freq", "cpuinfo_max_freq", "scaling_cur_freq")
    least, most, now = ([int(kHz) / 1000 for kHz in cpufreq(root, name) if kHz.isdigit()] for name in names)
    if not most:
        return None
    speeds = {"least": min(least, default=0.0), "most": max(most), "now": max(now, default=0.0)}
    return {"governors": governors(root), **speeds}


def temperatures(root: Path = Path("/")) -> dict[str, float]:
    """Return the degrees Celsius of the thermal zones by name, the hottest last."""
    zones = (root / "sys/class/thermal").glob("thermal_zone*")
    found = sorted((number_in(zone / "temp") / 1000, text_of(zone / "type") or zone.name) for zone in zones)
    hottest = {name: degrees for degrees, name in found if degrees}  # among zones of one name
    return dict(sorted(hottest.items(), key=lambda zone: zone[1]))


def throttling(root: Path = Path("/")) -> dict[str, list[str]] | None:
    """Return what a Raspberry Pi's firmware says of voltage and speed, `now` and `since_start`; else None."""
    bits = firmware_flags(root)
    if bits is None:
        return None
    seen = {"now": bits, "since_start": bits >> EVER}
    return {
        when: [word for bit, word in _FIRMWARE_WORDS.items() if flags & bit] for when, flags in seen.items()
    }


# ---- what the system says ----


def number_in(file: Path) -> int:
    """Return the number in a file; 0 if there is no file or no number."""
    try:
        return int(text_of(file))
    except ValueError:
        return 0


def cpufreq(root: Path, name: str) -> list[str]:
    """Return what a file says of each processor's clock."""
    return list(filter(None, map(text_of, (root / CPUS).glob(f"cpu[0-9]*/cpufreq/{name}"))))


def governors(root: Path) -> list[str]:
    """Return the names of the governors that set the processors' clocks."""
    return sorted(set(cpufreq(root, "scaling_governor")))


def firmware_flags(root: Path) -> int | None:
    """Return the Raspberry Pi firmware's flags for voltage and throttling; None on other machines."""
    program = root / "usr/bin/vcgencmd"
    if not program.exists():
        return None
    try:
        said = subprocess.run(
            [program, "get_throttled"], capture_output=True, text=True, timeout=_VCGENCMD_S, check=False
        ).stdout
        return int(said.strip().removeprefix("throttled="), 16)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
