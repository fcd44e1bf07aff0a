"""Memory: what the machine has left, what this process uses, and freeing pages of mapped files."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.platform.cpu import ROOT, address_limit, memory_limits
from edgespec.platform.files import lines_of

_MADV_DONTNEED = 4
_MAPPING = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) r--. \S+ \S+ \d+ +(.+)"
)  # a line of /proc/PID/maps, read-only


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """The memory that a process can still take."""

    bytes: int
    limit: str
    """Name of the limit that leaves no more, if the machine itself has more; else empty."""


def memory_left(root: Path = ROOT) -> MemoryLeft | None:
    """Return the memory this process can still take, or None if unknown.

    The lowest of MemAvailable, of what is left in each cgroup around this process, and of `ulimit -v`. Tests
    pass a `root` with their own `proc` and `sys`.
    """
    limits = [MemoryLeft(limit.left, limit.name) for limit in memory_limits(root)]
    if addresses := address_limit(root):
        limits.append(MemoryLeft(addresses.left, addresses.name))
    if (machine := _meminfo(root, "MemAvailable")) is not None:
        limits.insert(0, MemoryLeft(machine, ""))
    return min(limits, key=lambda left: left.bytes, default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory are left to this process; None where the system does not tell."""
    left = memory_left(root)
    return left.bytes if left else None


def total_bytes(root: Path = ROOT) -> int | None:
    """Return the machine's memory, or None if unknown; `root` as above."""
    return _meminfo(root, "MemTotal")


def peak_rss_bytes() -> int:
    """Return this process's peak resident memory so far, mapped model files included."""
    for line in lines_of(Path("/proc/self/status")):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # Second choice: ru_maxrss starts at what the parent held when it started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _meminfo(root: Path, wanted: str) -> int | None:
    for line in lines_of(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * 1024
    return None


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
        for line in lines_of(Path("/proc/self/maps")):
            if (found := _MAPPING.fullmatch(line)) and found[3] in self._files:
                yield int(found[1], 16), int(found[2], 16)


def cached_share(file: int, offset: int, size: int, samples: int = 64) -> float:
    """Return the share of `size` bytes of a file that is in the page cache, by `samples` pages of it.

    Nothing is read. 1 where the system does not tell. Raises OSError if the file is shorter.
    """
    page, state, found = mmap.PAGESIZE, ctypes.c_ubyte(), 0
    with mmap.mmap(file, offset + size, access=mmap.ACCESS_COPY) as memory:
        first = ctypes.c_char.from_buffer(memory)
        for i in range(samples):
            place = (offset + size * i // samples) // page * page
            if _mincore(ctypes.addressof(first) + place, page, ctypes.byref(state)):
                state.value = 1
            found += state.value & 1
        del first  # else the mapping could not be closed
    return found / samples


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
