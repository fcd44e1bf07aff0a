"""Memory: what the machine has left, what this process uses, and freeing pages of mapped files."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

_MADV_DONTNEED = 4
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) r--. \S+ \S+ \d+ +(.+)"
)  # a line of /proc/PID/maps, read-only


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory a new process can still take, or None if unknown.

    The lowest of MemAvailable and what is left in each cgroup (v2) around this process. Tests pass a `root`
    with their own `proc` and `sys`.
    """
    limits = [limit for limit in (_meminfo(root, "MemAvailable"), *_cgroup_limits(root)) if limit is not None]
    return min(limits, default=None)


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the machine's memory, or None if unknown; `root` as above."""
    return _meminfo(root, "MemTotal")


def peak_rss_bytes() -> int:
    """Return this process's peak resident memory so far, mapped model files included."""
    for line in _lines(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Second choice: ru_maxrss starts at what the parent held when it started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _meminfo(root: Path, wanted: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_limits(root: Path) -> list[int]:
    """Return what is left under each memory limit from this process's cgroup up to the root."""
    mount = root / "sys/fs/cgroup"
    own = [line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")]
    group = mount / (own[0].strip("/") if own else "")
    limits = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        limit, used = _lines(directory / "memory.max"), _lines(directory / "memory.current")
        if limit and used and limit[0] != "max":
            # Cached file pages count as used, but the kernel drops them when memory is needed.
            stat = dict(line.split() for line in _lines(directory / "memory.stat"))
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            limits.append(max(0, int(limit[0]) - int(used[0]) + cached))
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class MappedPages:
    """The resident pages of files that are mapped read-only after this object was made.

    Earlier mappings are left alone: they belong to other models, and another thread may unmap those at any
    time; something else could then be at their address.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {os.path.realpath(file) for file in files}
        self._earlier = set(self._ranges())

    def drop(self) -> int:
        """Take the pages out of resident memory and return the size of the mappings in bytes.

        Pages read later come back from the page cache. Nothing is lost: read-only pages are never dirty.
        """
        dropped = 0
        for start, end in self._ranges():
            if (start, end) not in self._earlier and not _madvise(start, end - start, _MADV_DONTNEED):
                dropped += end - start
        return dropped

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for line in _lines(Path("/proc/self/maps")):
            if (found := _MAPPING.fullmatch(line)) and found[3] in self._files:
                yield int(found[1], 16), int(found[2], 16)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
