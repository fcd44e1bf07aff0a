"""Limits that a container or a shell sets to this process: Linux's control groups (v1 and v2), and ulimit.

    /proc/self/cgroup     which group this process is in, for each controller
    /sys/fs/cgroup        the groups, each in the folder of the one around it: all their limits hold
    /proc/self/limits     what `ulimit` shows

Tests pass a `root` with their own `proc` and `sys`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.platform.files import lines_of

ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""Bytes: a limit of version 1 is a little less than 2^63 where there is none."""
_REFUSAL = re.compile(
    r"cannot allocate|failed to allocate|bad_alloc|temporarily unavailable|can't start new thread"
    r"|failed to map segment|out of memory",
    re.IGNORECASE,
)
_FEW_TASKS = 64
"""Threads that edgespec and llama.cpp may want to start at once."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that this process may have of something, and how much is taken of it."""

    name: str
    """Its origin, for a message."""
    most: float
    used: int = 0

    @property
    def left(self) -> int:
        """Amount that can still be taken."""
        return max(0, int(self.most) - self.used)


def memory_limits(root: Path = ROOT) -> list[Limit]:
    """Return the limits, in bytes, of the memory that this process and others of its groups hold."""
    second = ("memory.max", "memory.current", "active_file", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
    groups = [(group, *second) for group in _groups(root, "")]
    groups += [(group, *first) for group in _groups(root, "memory")]
    found = []
    for group, limit, current, *cached in groups:
        most, used = _number(group / limit), _number(group / current)
        if most is not None and used is not None:
            # Cached file pages count as used, but the kernel drops them when memory is needed.
            stat = dict(line.split()[:2] for line in lines_of(group / "memory.stat"))
            freed = sum(int(stat.get(name, 0)) for name in cached)
            found.append(Limit(f"the memory limit in {group}", most, used - freed))
    return found


def cpu_quota(root: Path = ROOT) -> Limit | None:
    """Return how many processors' time this process may have, such as 1.5; None for no quota."""
    found = []
    for group in _groups(root, ""):
        if words := " ".join(lines_of(group / "cpu.max")).split():
            quota, period = (*words, "100000")[:2]
            found.append((group / "cpu.max", quota, period))
    for group in _groups(root, "cpu"):
        quota, period = (" ".join(lines_of(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        found.append((group / "cpu.cfs_quota_us", quota, period))
    quotas = [
        Limit(f"the quota in {file}", int(quota) / int(period))
        for file, quota, period in found
        if quota.isdecimal() and period.isdecimal() and int(period)
    ]
    return min(quotas, key=lambda limit: limit.most, default=None)


def address_limit(root: Path = ROOT) -> Limit | None:
    """Return the limit of the addresses that this process may use, in bytes: `ulimit -v`."""
    return _ulimit(root, "Max address space", "`ulimit -v`", "VmSize")


def why_refused(root: Path = ROOT) -> str:
    """Return which limits may be why the system refused memory or a thread; "" for none of those known."""
    reasons = []
    for limit in (address_limit(root), _ulimit(root, "Max data size", "`ulimit -d`", "VmData")):
        if limit:
            reasons.append(
                f"{limit.name} lets this process have {limit.most / (1 << 30):.2f} GiB, too little for the "
                f"models and their threads: raise it, or try {limit.name[:-1]} unlimited`"
            )
    reasons += [f"no more than {limit.most:.0f} threads: {limit.name}" for limit in _spent_task_limits(root)]
    return "; ".join(reasons)


def is_refusal(reason: str) -> bool:
    """Whether a message tells that the system refused memory or a thread: `why_refused` may know why."""
    return _REFUSAL.search(reason) is not None


def _spent_task_limits(root: Path) -> Iterator[Limit]:
    for group in (*_groups(root, ""), *_groups(root, "pids")):
        most, used = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and used is not None and used + _FEW_TASKS >= most:
            yield Limit(f"the limit in {group / 'pids.max'}", most, used)
    users = _soft_limit(root, "Max processes")
    running = " ".join(lines_of(root / "proc/loadavg")).replace("/", " ").split()  # all users' tasks: [4]
    if users is not None and len(running) > 4 and int(running[4]) + _FEW_TASKS >= users:
        yield Limit("`ulimit -u`", users)


def _ulimit(root: Path, line: str, name: str, used: str) -> Limit | None:
    most = _soft_limit(root, line)
    if most is None:
        return None
    status = dict(line.split(":", 1) for line in lines_of(root / "proc/self/status") if ":" in line)
    return Limit(name, most, int((status.get(used) or "0").split()[0]) * 1024)


def _soft_limit(root: Path, name: str) -> int | None:
    for line in lines_of(root / "proc/self/limits"):
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            return int(soft) if soft.isdecimal() else None
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those around it; `controller` "": of version 2."""
    mounts = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller not in controllers.split(","):
            continue
        # Where a system has both versions, the second lies in a folder beside those of the first.
        names = (controllers, controller) if controller else ("unified",)
        mount = next((mounts / name for name in names if (mounts / name).is_dir()), mounts)
        # A container may see its own group as the outermost one, and yet be told its path from outside.
        group = mount if ".." in path.split("/") else mount / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))


def _number(path: Path) -> int | None:
    """Return the number in a file; None for none, "max", and version 1's word for no limit."""
    text = " ".join(lines_of(path)).strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None
