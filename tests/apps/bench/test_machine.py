"""The machine: what is said of it, and of what disturbed it, on trees of files as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.apps.bench.machine import MachineWatch, facts
from edgespec.platform import machine as load
from edgespec.platform.machine import processor_clock, read_cpu, temperatures, throttling
from pi_trees import PI_4_4GB, PI_5_8GB, plant

CPUS = "sys/devices/system/cpu"


class Tree:
    """A machine's files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, files: dict[str, object], folder: str = "") -> None:
        for name, content in files.items():
            file = self.root / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")

    def cpufreq(
        self, cpu: int, now_mhz: int, *, highest_mhz: int = 3000, governor: str = "performance"
    ) -> None:
        self.write(
            {
                "scaling_governor": governor,
                "scaling_cur_freq": now_mhz * 1000,
                "cpuinfo_max_freq": highest_mhz * 1000,
                "scaling_available_governors": "performance powersave",
            },
            f"{CPUS}/cpu{cpu}/cpufreq",
        )

    def supply(self, name: str, kind: str, status: str, **more: str) -> None:
        self.write({"type": kind, "status": status, **more}, f"sys/class/power_supply/{name}")

    def throttled(self, cpu: int, core: int, package: int) -> None:
        counts = {"core_throttle_count": core, "package_throttle_count": package}
        self.write(counts, f"{CPUS}/cpu{cpu}/thermal_throttle")

    def vcgencmd(self, body: str) -> None:
        """Install the Raspberry Pi's program, as a script."""
        self.write({"vcgencmd": f"#!/bin/sh\n{body}"}, "usr/bin")
        (self.root / "usr/bin/vcgencmd").chmod(0o755)

    def firmware(self, bits: int) -> None:
        self.vcgencmd(f'[ "$*" = get_throttled ] && echo throttled={bits:#x}')

    def swapped(self, pages_in: int, pages_out: int) -> None:
        self.write({"proc/vmstat": f"nr_free_pages 5\npswpin {pages_in}\npswpout {pages_out}\npgfault 7"})


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def the_warning(watch: MachineWatch) -> str:
    (line,) = watch.warnings()
    assert len(line.splitlines()) == 1
    return line


# ---- facts ----


def test_facts_of_this_machine():
    found = facts()
    assert found["processor"] == read_cpu().model
    assert found["usable processors"] == len(os.sched_getaffinity(0))
    assert found["numpy"] == np.__version__
    assert found["llama-cpp-python"] == "0.3.36"
    assert {"memory GiB", "system", "Python", "edgespec", "llama.cpp"} <= found.keys()
    assert all(isinstance(fact, str | int | float) and fact for fact in found.values())


def test_facts_of_a_board(tree):
    plant(tree.root, PI_5_8GB)
    found = facts(tree.root)
    assert found["processor"] == "Cortex-A76"
    assert found["memory GiB"] == 7.9
    assert found["board"] == "Raspberry Pi 5 Model B Rev 1.0"
    assert found["governor"] == "ondemand"
    tree.cpufreq(1, 1500)
    assert facts(tree.root)["governor"] == "ondemand, performance"


# ---- what it says now ----


def clock_of(governors, least, most, now):
    return {"governors": governors, "least": least, "most": most, "now": now}


def test_clock_and_heat_of_a_board(tmp_path):
    plant(tmp_path, PI_4_4GB)
    assert processor_clock(tmp_path) == clock_of(["ondemand"], 600.0, 1800.0, 600.0)
    assert temperatures(tmp_path) == {"cpu-thermal": 58.426}


def test_clock_of_cores_that_differ(tree):
    tree.cpufreq(0, 1800, highest_mhz=1800)
    tree.cpufreq(4, 2000, highest_mhz=2400, governor="ondemand")
    tree.write({f"{CPUS}/cpu4/cpufreq/cpuinfo_min_freq": 408000})
    assert processor_clock(tree.root) == clock_of(["ondemand", "performance"], 408.0, 2400.0, 2000.0)


@pytest.mark.parametrize(
    ("bits", "now", "since_start"),
    [
        (0, (), ()),
        (0x50005, ("under-voltage", "throttled"), ("under-voltage", "throttled")),
        (0x50000, (), ("under-voltage", "throttled")),
        (0xA0008, ("soft temperature limit",), ("frequency capped", "soft temperature limit")),
        (0xE0002, ("frequency capped",), ("frequency capped", "throttled", "soft temperature limit")),
    ],
)
def test_flags_of_the_firmware(tmp_path, bits, now, since_start):
    assert throttling(plant(tmp_path, PI_4_4GB, throttled=bits)) == {
        "now": [*now],
        "since_start": [*since_start],
    }


# ---- the watch ----


def test_this_machine_is_watched_without_error():
    watch = MachineWatch()
    watch.sample()
    assert all(len(line.splitlines()) == 1 for line in watch.warnings())


def test_damaged_files_are_silence(tree):
    tree.cpufreq(0, 100)
    for name in (f"{CPUS}/cpu0/cpufreq/cpuinfo_max_freq", "proc/vmstat", "proc/stat"):
        tree.write({name: "what\xff is this"})
    tree.write({f"{CPUS}/cpu0/thermal_throttle/core_throttle_count": ""})
    tree.vcgencmd("echo VCHI initialization failed; exit 1")
    watch = MachineWatch(tree.root)
    watch.sample()
    assert watch.warnings() == ()


@pytest.fixture
def clock(monkeypatch):
    """The clock of `OtherLoad` and this process's times, both in our hands; two processors are ours."""
    found = SimpleNamespace(now=0.0, user=0.0, system=0.0, children_user=0.0, children_system=0.0)
    monkeypatch.setattr(load, "perf_counter", lambda: found.now)
    monkeypatch.setattr(os, "times", lambda: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return found


def busy(tree: Tree, seconds: float) -> None:
    ticks = round(seconds * os.sysconf("SC_CLK_TCK"))
    tree.write({"proc/stat": f"cpu 0 0 0\ncpu0 {ticks} 0 0 9 9 0 0 0 0 0\ncpu1 0 0 0 9 9 0 0 0 0 0"})


def test_other_programs(tree, clock):
    busy(tree, 0)
    watches = [
        MachineWatch(tree.root),
        MachineWatch(tree.root, n_threads=2),
        MachineWatch(tree.root, n_threads=1),
    ]
    clock.now, clock.user = 10.0, 12.0
    busy(tree, 16)
    line = "other programs kept 0.4 processors busy; stop them and run the benchmark again"
    assert [watch.warnings() for watch in watches] == [(line,), (line,), ()]
    clock.children_user = 3.0  # it was a peer that this process ran
    assert watches[0].warnings() == ()


def test_battery(tree):
    tree.supply("BAT0", "Battery", "Discharging", scope="System")
    watch = MachineWatch(tree.root)
    tree.supply("BAT0", "Battery", "Charging", scope="System")
    assert the_warning(watch).endswith("; plug it in"), "it was discharging once"
    watch = MachineWatch(tree.root)
    tree.supply("hid-mouse", "Battery", "Discharging", scope="Device")
    assert watch.warnings() == ()
    tree.supply("BAT1", "Battery", "Discharging")
    watch.sample()
    tree.supply("BAT1", "Battery", "Full")
    assert "battery" in the_warning(watch)


def test_governor(tree):
    """Only where the clock was low: on many machines powersave reaches the highest one too."""

    def warned() -> list[str]:
        watch = MachineWatch(tree.root)
        watch.sample()
        return [line for line in watch.warnings() if "governor" in line]

    tree.cpufreq(0, 3000)
    tree.cpufreq(1, 3000, governor="powersave")
    assert warned() == []
    tree.cpufreq(0, 1000)
    tree.cpufreq(1, 1000, governor="powersave")
    (line,) = warned()
    assert "the frequency governor is powersave" in line
    assert f"`echo performance | sudo tee /{CPUS}/cpu*/cpufreq/scaling_governor`" in line
    for cpu in (0, 1):
        (tree.root / CPUS / f"cpu{cpu}/cpufreq/scaling_available_governors").unlink()
    assert len(warned()) == 1
    tree.write({f"{CPUS}/cpu1/cpufreq/scaling_available_governors": "powersave userspace"})
    assert warned() == [], "there is nothing that could be done"


def test_clock_frequency(tree):
    def watched(*samples: tuple[int, int]) -> tuple[str, ...]:
        watch = MachineWatch(tree.root)
        for samples_mhz in samples:
            for cpu, now_mhz in enumerate(samples_mhz):
                tree.cpufreq(cpu, now_mhz)
            watch.sample()
        return watch.warnings()

    assert watched((1200, 800), (800, 1500), (1500, 1400))[0].startswith(
        "the processor ran at 1.5 of 3.0 GHz; "
    )
    assert watched((1200, 800), (800, 2500), (2900, 1400)) == (), (
        "one core at a time is enough, half of the times"
    )
    assert watched((1800, 800)) == ()
    assert len(watched((1790, 800))) == 1
    assert len(watched((1200, 800), (2900, 800))) == 1
    assert watched() == ()


def test_throttling(tree):
    tree.throttled(0, core=7, package=9)
    tree.throttled(1, core=0, package=9)
    watch = MachineWatch(tree.root)
    assert watch.warnings() == ()
    tree.throttled(0, core=8, package=12)
    tree.throttled(1, core=0, package=12)
    assert the_warning(watch).startswith("the processor slowed down for heat 3 times; ")


UNDER_VOLTAGE = "the Raspberry Pi had too low a voltage; use a stronger power supply and a short cable"
SLOWED = "the Raspberry Pi's firmware slowed the processor down; give it a fan or a heat sink"


@pytest.mark.parametrize(
    ("before", "during", "after", "said"),
    [
        (0, 0, 0, ()),
        (0x50000, 0x50000, 0x50000, ()),  # long ago
        (0, 0x50005, 0x50000, (UNDER_VOLTAGE, SLOWED)),
        (0x50000, 0x50001, 0x50000, (UNDER_VOLTAGE,)),
        (0, 0, 0x10000, (UNDER_VOLTAGE,)),  # between two samples
        (0x10000, 0x10000, 0x90000, (SLOWED,)),
        (0, 0x2, 0, (SLOWED,)),
        (0x1, 0, 0, (UNDER_VOLTAGE,)),
    ],
)
def test_raspberry_pi(tree, before, during, after, said):
    tree.firmware(before)
    watch = MachineWatch(tree.root)
    tree.firmware(during)
    watch.sample()
    tree.firmware(after)
    assert watch.warnings() == said


def test_vcgencmd_that_cannot_run(tree):
    tree.firmware(0x5)
    (tree.root / "usr/bin/vcgencmd").chmod(0o644)
    assert MachineWatch(tree.root).warnings() == ()


def test_swap(tree):
    pages = (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    tree.swapped(500_000, 900_000)
    watch = MachineWatch(tree.root)
    tree.swapped(500_000 + pages // 2, 900_000 + pages // 2)
    assert watch.warnings() == ()
    tree.swapped(500_000 + pages, 900_000 + 2 * pages)
    assert the_warning(watch).startswith("48 MiB went to the swap and back")
