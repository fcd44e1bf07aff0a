"""The machine: processor, board, memory, sensors, other programs' load, and the limits of this process.

Limits are those of Linux's control groups (v1 and v2), and ulimit:

    /proc/self/cgroup     which group this process is in, for each controller
    /sys/fs/cgroup        the groups, nested folders: all their limits apply

Tests pass a `root` with their own `proc` and `sys`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from edgespec.platform.files import lines_of, text_of

ROOT = Path("/")

_ARM = "0x41"
_ARM_CORES = {
    "0xd03": "Cortex-A53",
    "0xd04": "Cortex-A35",
    "0xd05": "Cortex-A55",
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd09": "Cortex-A73",
    "0xd0a": "Cortex-A75",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd0d": "Cortex-A77",
    "0xd40": "Neoverse-V1",
    "0xd41": "Cortex-A78",
    "0xd42": "Cortex-A78AE",
    "0xd44": "Cortex-X1",
    "0xd46": "Cortex-A510",
    "0xd47": "Cortex-A710",
    "0xd48": "Cortex-X2",
    "0xd49": "Neoverse-N2",
    "0xd4b": "Cortex-A78C",
    "0xd4d": "Cortex-A715",
    "0xd4e": "Cortex-X3",
    "0xd4f": "Neoverse-V2",
    "0xc07": "Cortex-A7",
    "0xc09": "Cortex-A9",
    "0xc0f": "Cortex-A15",
    "0xb76": "ARM1176",
}

_NEARLY_AS_FAST = 0.7
"""Least part of the fastest core's capacity: less is another kind. Cores of one kind differ by a tenth."""


class Cpu(msgspec.Struct, frozen=True):
    """The processor's model name and the names of its features."""

    model: str
    """On ARM the names of its core types: "Cortex-A76", or "Cortex-A55 and Cortex-A76"."""
    flags: frozenset[str]
    count: int = 0
    """Logical processors; 0 if unknown."""


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return this machine's processor; if the kernel gives no model, the model is the architecture."""
    try:
        processors = [_facts(block) for block in cpuinfo.read_text(errors="replace").split("\n\n")]
    except OSError:
        processors = [{}]
    first = processors[0]
    flags = first.get("flags") or first.get("Features") or ""  # x86, ARM
    cores = dict.fromkeys(filter(None, map(_core, processors)))  # each once, in the order of the kernel
    model = " and ".join(cores) or first.get("model name") or platform.machine()
    return Cpu(model, frozenset(flags.split()), sum("processor" in facts for facts in processors))


def default_threads(root: Path = ROOT) -> int:
    """Return the best number of threads: one per usable fast core, capped by a quota.

    A quota is rounded to the nearest whole number: threads that wait for each other waste a fraction of one.
    `root`: where /proc and /sys are.
    """
    quota = cpu_quota(root)
    cores = fast_cores(root)
    return cores if quota is None else min(cores, max(1, int(quota.most + 0.5)))


def physical_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores this process may use."""
    return _count_cores(os.sched_getaffinity(0), root)


def fast_cores(root: Path = ROOT) -> int:
    """Return the number of physical cores of the fastest kind that this process may use.

    Processors may have cores of two kinds: Intel's P and E, ARM's big and LITTLE. All threads wait for the
    slowest one at the end of each operation, so slow cores are left to other programs.
    """
    usable = os.sched_getaffinity(0)
    return _count_cores(_fast(usable, root), root)


def _fast(usable: set[int], root: Path) -> set[int]:
    if performance := _numbers(root / "sys/devices/cpu_core/cpus") & usable:  # Intel's P cores
        return performance
    # The kernel's figure for a processor's speed, of 1024 for the fastest; 0 if it has none.
    capacities = {cpu: number_in(root / CPUS / f"cpu{cpu}/cpu_capacity") for cpu in usable}
    least = _NEARLY_AS_FAST * max(capacities.values())
    return {cpu for cpu, capacity in capacities.items() if capacity >= least}


def _numbers(file: Path) -> set[int]:
    """Return the numbers of a file with a list such as "0-3,8"; none if it is missing or has another form."""
    try:
        ranges = [part.partition("-") for part in text_of(file).split(",")]
        return {
            i for first, dash, last in ranges for i in range(int(first), int(last if dash else first) + 1)
        }
    except ValueError:
        return set()


def _count_cores(cpus: set[int], root: Path) -> int:
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            core = [(topology / name).read_text() for name in ("physical_package_id", "core_id")]
        except OSError:
            return len(cpus)
        # Linux counts cores in each cluster from 0 where a device tree describes them (ARM, since 6.0).
        cores.add((*core, text_of(topology / "cluster_id")))
    return len(cores)


def cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the total size of this machine's processor caches; 0 if unknown."""
    sizes = {}
    for index in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            cache = [(index / name).read_text() for name in ("level", "type", "shared_cpu_list")]
            sizes[tuple(cache)] = int((index / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


def _facts(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _core(processor: dict[str, str]) -> str:
    """Return the name of an ARM core, which the kernel reports as numbers; "" for other processors."""
    implementer, part = (processor.get(f"CPU {name}", "") for name in ("implementer", "part"))
    if not (implementer and part):
        return ""
    known = _ARM_CORES.get(part) if implementer == _ARM else None
    return known or f"processor {part} of implementer {implementer}"


# ---- boards ----


def device_model(root: Path = Path("/")) -> str:
    """Return the device's model, such as "Raspberry Pi 5 Model B Rev 1.0"; "" if the kernel names none."""
    return text_of(root / "proc/device-tree/model").strip("\0 \n")


def device_revision(root: Path = Path("/")) -> str:
    """Return a Raspberry Pi's revision code, such as "c03114"; "" on other machines."""
    pairs = (line.partition(":") for line in lines_of(root / "proc/cpuinfo"))
    return next((value.strip() for name, _, value in pairs if name.strip() == "Revision"), "")


# ---- limits ----


_NO_LIMIT = 1 << 60
"""Bytes: a limit of version 1 is a little less than 2^63 where there is none."""
_REFUSAL = re.compile(
    r"cannot allocate|failed to allocate|bad_alloc|temporarily unavailable|can't start new thread"
    r"|failed to map segment|out of memory",
    re.IGNORECASE,
)
_FEW_TASKS = 64
"""Threads that edgespec and llama.cpp may want to start at once."""


class Limit(msgspec.Struct, frozen=True):
    """The most that this process may have of something, and how much of it is used."""

    name: str
    """Its origin, for a message."""
    most: float
    used: int = 0

    @property
    def left(self) -> int:
        """The amount still available."""
        return max(0, int(self.most) - self.used)


def memory_limits(root: Path = ROOT) -> list[Limit]:
    """Return the memory limits, in bytes, of this process's groups, with their use."""
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
    """Return the processor quota of this process in processors, such as 1.5; None for no quota."""
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
    """Return the limit of this process's address space, in bytes: `ulimit -v`."""
    return _ulimit(root, resource.RLIMIT_AS, "`ulimit -v`", "VmSize")


def why_refused(root: Path = ROOT) -> str:
    """Return the limits that may have made the system refuse memory or a thread; "" for no known one."""
    reasons = []
    for limit in (address_limit(root), _ulimit(root, resource.RLIMIT_DATA, "`ulimit -d`", "VmData")):
        if limit:
            reasons.append(
                f"{limit.name} lets this process have {limit.most / (1 << 30):.2f} GiB, too little for the "
                f"models and their threads: raise it, or try {limit.name[:-1]} unlimited`"
            )
    reasons += [f"no more than {limit.most:.0f} threads: {limit.name}" for limit in _spent_task_limits(root)]
    return "; ".join(reasons)


def is_refusal(reason: str) -> bool:
    """Whether a message says that the system refused memory or a thread, which `why_refused` may explain."""
    return _REFUSAL.search(reason) is not None


def _spent_task_limits(root: Path) -> Iterator[Limit]:
    for group in (*_groups(root, ""), *_groups(root, "pids")):
        most, used = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and used is not None and used + _FEW_TASKS >= most:
            yield Limit(f"the limit in {group / 'pids.max'}", most, used)
    users, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    running = " ".join(lines_of(root / "proc/loadavg")).replace("/", " ").split()  # all users' tasks: [4]
    if users != resource.RLIM_INFINITY and len(running) > 4 and int(running[4]) + _FEW_TASKS >= users:
        yield Limit("`ulimit -u`", users)


def _ulimit(root: Path, kind: int, name: str, used: str) -> Limit | None:
    most, _ = resource.getrlimit(kind)
    if most == resource.RLIM_INFINITY:
        return None
    status = dict(line.split(":", 1) for line in lines_of(root / "proc/self/status") if ":" in line)
    return Limit(name, most, int((status.get(used) or "0").split()[0]) * 1024)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and its parents; `controller` "": of version 2."""
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
    """Return the number in a file; None for no number, "max", and version 1's value for no limit."""
    text = " ".join(lines_of(path)).strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


_MADV_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--. \S+ \S+ \d+ +(.+)")  # /proc/PID/maps, read-only


class MemoryLeft(msgspec.Struct, frozen=True):
    """The memory that a process can still take."""

    bytes: int
    limit: str
    """Name of the limit that leaves no more, if the machine itself has more; else empty."""


def memory_left(root: Path = ROOT) -> MemoryLeft | None:
    """Return the memory this process can still take, or None if unknown.

    The lowest of MemAvailable, the rest of each cgroup around this process, and the rest of `ulimit -v`.
    Tests pass a `root` with their own `proc` and `sys`.
    """
    limits = [MemoryLeft(limit.left, limit.name) for limit in memory_limits(root)]
    if addresses := address_limit(root):
        limits.append(MemoryLeft(addresses.left, addresses.name))
    if (machine := _meminfo(root, "MemAvailable")) is not None:
        limits.insert(0, MemoryLeft(machine, ""))
    return min(limits, key=lambda left: left.bytes, default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory this process can still take; None if unknown."""
    left = memory_left(root)
    return left.bytes if left else None


def total_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes of the machine's memory, None if unknown; `root`: where /proc is."""
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
        """Remove the pages from resident memory; return the size of the mappings in bytes.

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
    """Return the share of `size` bytes of a file that is in the page cache, estimated from `samples` pages.

    Nothing is read. 1 if unknown. Raises OSError if the file is shorter.
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


MOST_OTHER_LOAD = 0.15
"""Processors that other work may keep busy, on top of half of those the measurement leaves idle."""

BUSY = "processors busy"
"""Words of every warning about such a load."""

_UTIME, _CSTIME = 11, 14  # utime stime cutime cstime among what follows a process's name in its stat
_SHORTEST_S = 1.0  # ticks of /proc/stat are 10 ms: a shorter time shows little of other work


class OtherLoad:
    """Processors, of those this process may use, that other programs keep busy."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        """Start watching; `stat` is a parameter for tests, with its neighbours in /proc."""
        self._stat = stat
        self._began = self._now()

    def processors(self) -> float | None:
        """Return how many they kept busy on average since the start; None if unknown or too early."""
        began, ended = self._began, self._now()
        if began is None or ended is None or ended[0] - began[0] < _SHORTEST_S:
            return None
        busy, own = ended[1] - began[1], ended[2] - began[2]
        return max(0.0, (busy - own) / (ended[0] - began[0]))

    def _now(self) -> tuple[float, float, float] | None:
        """Return seconds: the clock, the busy time of all processors, this process's and its children's."""
        usable = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines()]
            # user nice system idle iowait irq softirq steal: busy is all but idle and iowait
            rows = [[int(ticks) for ticks in line[1:9]] for line in lines if line and line[0] in usable]
            busy = sum(sum(row) - row[3] - row[4] for row in rows)
        except (OSError, ValueError, IndexError):
            return None
        own = os.times()
        # Linux adds a child's time to its parent's when it has ended: those that run are asked themselves.
        ended = own.children_user + own.children_system
        spent = own.user + own.system + ended + _of_children(self._stat.parent, "self")
        return perf_counter(), busy / os.sysconf("SC_CLK_TCK"), spent


def _of_children(proc: Path, process: str) -> float:
    """Return the CPU seconds of the running processes that `process` started; 0 if unknown."""
    children = [text_of(listed).split() for listed in (proc / process / "task").glob("*/children")]
    spent = 0.0
    for child in [pid for pids in children for pid in pids]:
        # The name, in parentheses, may hold anything; the state is what follows it.
        facts = text_of(proc / child / "stat").rpartition(")")[2].split()
        if len(facts) > _CSTIME:
            spent += sum(map(int, facts[_UTIME : _CSTIME + 1])) / os.sysconf("SC_CLK_TCK")
            spent += _of_children(proc, child)
    return spent


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

    `now` is the clock of the fastest core. None if unknown. `root`: as above.
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
    """Return the voltage and speed flags of a Raspberry Pi's firmware, `now` and `since_start`; else None."""
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
    """Return the text of one cpufreq file for each processor."""
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
