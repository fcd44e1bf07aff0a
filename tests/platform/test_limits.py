"""Limits of control groups and ulimit, from made-up trees of /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.footprint import fits_in_memory, required_bytes
from edgespec.platform.machine import (
    available_bytes,
    cache_bytes,
    cpu_quota,
    default_threads,
    is_refusal,
    memory_left,
    memory_limits,
    physical_cores,
    why_refused,
)

V2 = "0::/a/b\n"
V1 = "4:memory:/docker/x\n3:cpuset:/\n1:cpu,cpuacct:/docker/x\n0::/\n"
NO_LIMIT = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files of /proc/self and /sys/fs/cgroup below `root`."""
    for name, text in files.items():
        path = root / ("proc" if name.startswith("self/") or name == "loadavg" else "sys/fs/cgroup") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_quota(folder: str, quota: str, period: str) -> dict[str, str]:
    return {"self/cgroup": V1, f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, None, 8),
        ({"self/cgroup": V2, "a/b/cpu.max": "max 100000\n"}, None, 8),
        ({"self/cgroup": V2, "a/b/cpu.max": "100000 100000\n"}, 1.0, 1),
        ({"self/cgroup": V2, "a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"self/cgroup": V2, "a/b/cpu.max": "150000\n"}, 1.5, 2),
        ({"self/cgroup": V2, "a/b/cpu.max": "1000 100000\n"}, 0.01, 1),
        ({"self/cgroup": V2, "a/b/cpu.max": "210000 100000\n", "a/cpu.max": "9000000 100000\n"}, 2.1, 2),
        ({"self/cgroup": V2, "a/b/cpu.max": "9000000 100000\n"}, 90.0, 8),
        # As a container sees it: its own group is the outermost, and the path is the machine's.
        ({"self/cgroup": "0::/../../other\n", "cpu.max": "200000 100000\n"}, 2.0, 2),
        (v1_quota("cpu,cpuacct", "-1", "100000"), None, 8),
        (v1_quota("cpu,cpuacct", "300000\n", "100000\n"), 3.0, 3),
        (v1_quota("cpu,cpuacct/docker/x", "300000\n", "100000\n"), 3.0, 3),
        (v1_quota("cpu/docker/x", "25000", "50000"), 0.5, 1),
        (v1_quota("cpu", "junk", "0"), None, 8),
        ({"self/cgroup": "damaged"}, None, 8),
    ],
)
def test_threads_by_the_quota_of_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = cpu_quota(tree(tmp_path, files))
    assert (found and found.most) == quota
    assert default_threads(tmp_path) == threads
    if found:
        assert "cpu.max" in found.name or "cpu.cfs_quota_us" in found.name


def v1_memory(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    folder = f"memory/{folder}memory."
    return {
        f"{folder}limit_in_bytes": f"{limit}\n",
        f"{folder}usage_in_bytes": f"{used}\n",
        f"{folder}stat": f"inactive_file 3\ntotal_active_file 0\ntotal_inactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"self/cgroup": V1, **v1_memory("docker/x/", NO_LIMIT, 5, 0)}, []),
        ({"self/cgroup": V1, **v1_memory("docker/x/", "500000", 200000, 50000)}, [350000]),
        ({"self/cgroup": V1, **v1_memory("", "500000", 200000, 0)}, [300000]),
        (
            {
                "self/cgroup": V1,
                **v1_memory("docker/x/", "9000", 1000, 0),
                **v1_memory("docker/", "600", 700, 0),
            },
            [8000, 0],
        ),
        # Both versions beside each other: the second in a folder of its own.
        (
            {
                "self/cgroup": "1:memory:/\n0::/s\n",
                **v1_memory("", "5000", 0, 0),
                "unified/s/memory.max": "4000",
                "unified/s/memory.current": "1000",
            },
            [3000, 5000],
        ),
        ({"self/cgroup": V2, "a/memory.max": "4000", "a/memory.current": "1000"}, [3000]),
    ],
)
def test_memory_that_the_groups_leave(tmp_path: Path, files: dict, expected: list[int]) -> None:
    assert [limit.left for limit in memory_limits(tree(tmp_path, files))] == expected
    assert available_bytes(tmp_path) == min(expected, default=None)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (
            {"self/cgroup": V1, **v1_memory("", "1000000", 900000, 0)},
            "the memory limit in .*sys/fs/cgroup/memory",
        ),
        ({"self/cgroup": V2, "a/memory.max": "9", "a/memory.current": "1"}, "the memory limit in .*cgroup/a"),
        ({"self/status": "VmSize:  700 kB\n", "ulimit": "AS 1000000"}, "`ulimit -v`"),
    ],
)
def test_too_little_is_said_before_loading_with_the_limit(
    tmp_path: Path, tiny_path: Path, files: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, files.pop("ulimit", ""))
    header = check_model_file(tiny_path)
    with pytest.raises(EdgespecError, match=rf"GiB available under {named}; .*raise that limit"):
        fits_in_memory([(header, 512)], tree(tmp_path, files))
    left = memory_left(tmp_path)
    assert left is not None
    assert left.bytes < required_bytes(header, 512)


def set_limits(monkeypatch: pytest.MonkeyPatch, *limits: str) -> None:
    """Set this process's limits, each "NAME BYTES"; others are unlimited."""
    given = {
        getattr(resource, f"RLIMIT_{name}"): int(n) for name, n in (one.split() for one in limits if one)
    }
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (given.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY)
    )


def test_why_the_system_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, "NPROC 100000")
    assert why_refused(tmp_path / "nothing known") == ""
    assert why_refused(tree(tmp_path / "free", {"loadavg": "0 0 0 1/200 9"})) == ""
    set_limits(monkeypatch, "DATA 1073741824", "NPROC 230")
    files = {"loadavg": "0.1 0.2 0.3 1/200 9", "self/cgroup": V2}
    said = why_refused(tree(tmp_path / "few", files | {"a/pids.max": "50", "a/pids.current": "49"}))
    assert "`ulimit -d` lets this process have 1.00 GiB" in said
    assert "try `ulimit -d unlimited`" in said
    assert "no more than 230 threads: `ulimit -u`" in said
    assert "no more than 50 threads: the limit in" in said


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        ("error loading model: Resource temporarily unavailable", True),
        ("mmap failed: Cannot allocate memory", True),
        ("failed to allocate CPU buffer of size 5", True),
        ("can't start new thread", True),
        ("libllama.so: failed to map segment from shared object", True),
        ("wrong number of tensors", False),
        ("No such file or directory", False),
    ],
)
def test_a_refusal_of_memory_is_known(reason: str, refused: bool) -> None:
    assert is_refusal(reason) == refused


def test_caches_are_counted_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, kind, size) in enumerate(
            [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1024K"), (3, "Unified", "32768K")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "type").write_text(f"{kind}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text("0-3\n" if level == 3 else f"{cpu}\n")
    (tmp_path / "cpu3" / "cache" / "index2" / "size").unlink()
    assert cache_bytes(tmp_path) == (4 * 64 + 3 * 1024 + 32768) << 10
    assert cache_bytes(tmp_path / "none") == 0
    assert physical_cores() >= 1
