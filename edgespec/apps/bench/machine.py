"""Facts about the machine that a benchmark runs on, and warnings about what disturbed a measurement.

    watch = MachineWatch()  before
    watch.sample()          right after each run, before the processor cools down
    watch.warnings()        at the end: one line for each disturbance, with its cure

A check whose file in /proc or /sys is missing gives no warning.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from edgespec.llama.backend import library_version
from edgespec.platform.files import text_of
from edgespec.platform.machine import (
    BUSY,
    CAPPED,
    CPUS,
    EVER,
    MOST_OTHER_LOAD,
    SOFT_LIMIT,
    THROTTLED,
    UNDER_VOLTAGE,
    OtherLoad,
    cpufreq,
    device_model,
    firmware_flags,
    governors,
    number_in,
    read_cpu,
    total_bytes,
)

Facts = dict[str, str | int | float]


def facts(root: Path = Path("/")) -> Facts:
    """Return processor, memory, system and versions by name, without what is unknown.

    `root`: where /proc and /sys are.
    """
    memory = total_bytes(root)
    known: dict[str, str | int | float | None] = {
        "processor": read_cpu(root / "proc/cpuinfo").model,
        "usable processors": len(os.sched_getaffinity(0)),
        "memory GiB": memory and round(memory / (1 << 30), 1),
        "board": device_model(root),
        "governor": ", ".join(governors(root)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": platform.python_version(),
        "edgespec": version("edgespec"),
        "llama-cpp-python": version("llama-cpp-python"),
        "llama.cpp": library_version(),
        "numpy": version("numpy"),
    }
    return {name: fact for name, fact in known.items() if fact}


def on_battery(root: Path = Path("/")) -> bool:
    """Whether the machine runs on battery; batteries of mice and headphones, of scope Device, do not count.

    `root`: where /sys is.
    """
    return any(
        text_of(supply / "type") in ("Battery", "UPS")
        and text_of(supply / "scope") != "Device"
        and text_of(supply / "status") == "Discharging"
        for supply in (root / "sys/class/power_supply").glob("*")
    )


# ---- what disturbs a measurement ----


LEAST_SPEED = 0.6
"""Below this share of its highest clock frequency, the processor was held back. The highest frequency is that
of a single busy core; with all cores busy, a quarter less is normal."""

MOST_SWAPPED = 16 << 20
"""Bytes to and from the swap that cause no warning: some pages of idle programs always go there."""

_COOLING = "free its vents, give it a fan or a heat sink, and let it rest before the next run"


class MachineWatch:
    """Watches the machine from the constructor until `warnings`."""

    def __init__(self, root: Path = Path("/"), *, n_threads: int | None = None) -> None:
        """Begin to watch. `root`: where /proc, /sys and /usr/bin/vcgencmd are.

        `n_threads`: the benchmark's; processors that it leaves idle may do other work. None: it uses all.
        """
        self._root = root
        usable = len(os.sched_getaffinity(0))
        self._idle = 0 if n_threads is None else max(0, usable - n_threads)
        self._load = OtherLoad(root / "proc/stat")
        self._throttles, self._swapped = _throttles(root), _swapped(root)
        self._firmware = firmware_flags(root) or 0
        # Of each sample's fastest core: its share of its highest clock, and that, GHz.
        self._clocks: list[tuple[float, float]] = []
        self._was_on_battery = False
        self._flags = 0  # the Raspberry Pi's, only those set since the watch began
        self._look()

    def sample(self) -> None:
        """Note the clock frequency and what may change again. Call it right after each run."""
        if clocks := _clocks(self._root):
            self._clocks.append(max(clocks))  # the other cores may be idle already
        self._look()

    def warnings(self) -> tuple[str, ...]:
        """Return a line for each disturbance since the watch began, with its cure."""
        self._look()
        return (
            *self._of_other_programs(),
            *self._of_power(),
            *self._of_clocks(),
            *self._of_heat(),
            *self._of_firmware(),
            *self._of_swap(),
        )

    def _look(self) -> None:
        """Note what may change again: use of the battery, the firmware's flags."""
        self._was_on_battery |= on_battery(self._root)
        bits = firmware_flags(self._root) or 0
        self._flags |= bits % (1 << EVER) | (bits & ~self._firmware) >> EVER

    def _of_other_programs(self) -> Iterator[str]:
        busy = self._load.processors()
        if busy is not None and busy > MOST_OTHER_LOAD + self._idle / 2:  # two may share a core
            yield f"other programs kept {busy:.1f} {BUSY}; stop them and run the benchmark again"

    def _of_power(self) -> Iterator[str]:
        if self._was_on_battery:
            yield "the machine ran on its battery, where processors are slower; plug it in"

    def _of_clocks(self) -> Iterator[str]:
        if not self._clocks:
            return
        share, highest = statistics.median_low(self._clocks)
        if share >= LEAST_SPEED:
            return
        yield (
            f"the processor ran at {share * highest:.1f} of {highest:.1f} GHz; let it cool, use its own "
            f"power supply, or lift a limit in /{CPUS}/cpu*/cpufreq/scaling_max_freq"
        )
        slow = [name for name in governors(self._root) if name != "performance"]
        offered = cpufreq(self._root, "scaling_available_governors")
        if slow and (not offered or any("performance" in line.split() for line in offered)):
            yield (
                f"the frequency governor is {', '.join(slow)}, which may be why; set it with "
                f"`echo performance | sudo tee /{CPUS}/cpu*/cpufreq/scaling_governor`"
            )

    def _of_heat(self) -> Iterator[str]:
        now = _throttles(self._root)
        times = max((count - self._throttles.get(file, count) for file, count in now.items()), default=0)
        if times > 0:
            yield f"the processor slowed down for heat {times} times; {_COOLING}"

    def _of_firmware(self) -> Iterator[str]:
        bits = self._flags
        if bits & UNDER_VOLTAGE:
            yield "the Raspberry Pi had too low a voltage; use a stronger power supply and a short cable"
        if bits & (CAPPED | THROTTLED | SOFT_LIMIT):
            yield "the Raspberry Pi's firmware slowed the processor down; give it a fan or a heat sink"

    def _of_swap(self) -> Iterator[str]:
        moved = _swapped(self._root) - self._swapped
        if moved > MOST_SWAPPED:
            yield (
                f"{moved >> 20:,} MiB went to the swap and back, since memory was short; close other "
                "programs, or choose a smaller quantization"
            )


def _clocks(root: Path) -> list[tuple[float, float]]:
    found = []
    for folder in (root / CPUS).glob("cpu[0-9]*/cpufreq"):
        now, highest = (number_in(folder / name) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))  # kHz
        if now and highest:
            found.append((now / highest, highest / 1e6))
    return found


def _throttles(root: Path) -> dict[Path, int]:
    files = (root / CPUS).glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    return {file: number_in(file) for file in files}


def _swapped(root: Path) -> int:
    pairs = (line.split() for line in text_of(root / "proc/vmstat").splitlines())
    counts = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    pages = sum(int(counts.get(name, 0)) for name in ("pswpin", "pswpout"))
    return pages * os.sysconf("SC_PAGE_SIZE")
