"""Cores of two kinds: threads default to the fast ones. The system's files are those of real machines."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from edgespec.cli.doctor import _threads_line
from edgespec.cli.doctor_report import _host
from edgespec.platform.machine import default_threads, fast_cores, physical_cores

CPUS = "sys/devices/system/cpu"
LAPTOP = [(0, 0), (1, 0), (2, 1), (3, 1), *((cpu, cpu) for cpu in range(4, 12))]
"""Two P cores of two threads each, then eight E cores: each processor with its core."""


def tree(root: Path, cores: Iterable[tuple[int, int]], **files: str) -> Path:
    for cpu, core in cores:
        folder = root / CPUS / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core}\n")
        (folder / "physical_package_id").write_text("0\n")
    for name, text in files.items():
        file = root / "sys/devices" / name / "cpus"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return root


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch):
    return lambda cpus: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))


def set_capacities(root: Path, capacities: Iterable[int | str]) -> None:
    for cpu, capacity in enumerate(capacities):
        (root / CPUS / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity}\n")


def test_intels_p_cores(tmp_path, usable):
    root = tree(tmp_path, LAPTOP, cpu_core="0-3\n", cpu_atom="4-11\n")
    usable(range(12))
    assert (physical_cores(root), fast_cores(root), default_threads(root)) == (10, 2, 2)
    assert _threads_line(_host(root)["threads"]) == "10 physical cores, 12 logical; the 2 fast ones are used"
    usable({2, 3, 4, 5, 6})
    assert (physical_cores(root), default_threads(root)) == (4, 1)


def test_cores_that_are_counted_from_0_in_each_cluster(tmp_path, usable):
    root = tree(tmp_path, [(cpu, cpu % 4) for cpu in range(12)])  # Snapdragon X
    for cpu in range(12):
        (root / CPUS / f"cpu{cpu}" / "topology" / "cluster_id").write_text(f"{cpu // 4}\n")
    usable(range(12))
    assert physical_cores(root) == default_threads(root) == 12


def test_a_process_that_may_use_slow_cores_alone_uses_them(tmp_path, usable):
    root = tree(tmp_path, LAPTOP, cpu_core="0-3\n", cpu_atom="4-11\n")
    usable({4, 5, 6})
    assert default_threads(root) == 3
    assert "fast" not in _threads_line(_host(root)["threads"])


@pytest.mark.parametrize(
    ("capacities", "fast"),
    [
        ([446] * 4 + [1024] * 4, 4),  # Cortex-A55 and A76
        ([1024] * 4, 4),
        ([930, 1024, 1024, 930], 4),  # of one kind: some are allowed a higher clock
        ([290] * 4 + [870] * 3 + [1024], 4),  # LITTLE, big, one of a higher clock
        ([446, 446, "junk", 1024], 1),
        ([], 4),
    ],
)
def test_arms_big_cores(tmp_path, usable, capacities, fast):
    n = max(4, len(capacities))
    root = tree(tmp_path, ((cpu, cpu) for cpu in range(n)))
    set_capacities(root, capacities)
    usable(range(n))
    assert default_threads(root) == fast


@pytest.mark.parametrize("text", ["", "junk", "0-", "8-11", "3-1"])
def test_a_list_of_processors_that_says_nothing(tmp_path, usable, text):
    root = tree(tmp_path, LAPTOP, cpu_core=text)
    usable(range(12))
    assert default_threads(root) == (4 if text == "8-11" else 10)


def test_a_quota_holds_for_fast_cores_too(tmp_path, usable):
    root = tree(tmp_path, LAPTOP, cpu_core="0-3")
    usable(range(12))
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert default_threads(root) == 1
