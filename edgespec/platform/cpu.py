"""The processor: its name and its features, as Linux describes them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from edgespec.platform.files import text_of
from edgespec.platform.limits import ROOT, cpu_quota

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


@dataclass(frozen=True, slots=True)
class Cpu:
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
    """Return the best number of threads: one for each fast core that may be used, as far as a quota goes.

    A quota is rounded to the nearest whole number: threads that wait for each other spend a quota that is
    a little above one more on waiting. `root`: where /proc and /sys are.
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
    capacities = {cpu: _capacity(cpu, root) for cpu in usable}
    least = _NEARLY_AS_FAST * max(capacities.values())
    return {cpu for cpu, capacity in capacities.items() if capacity >= least}


def _capacity(cpu: int, root: Path) -> int:
    """Return the kernel's figure for a processor's speed, of 1024 for the fastest; 0 if it has none."""
    try:
        return int(text_of(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"))
    except ValueError:
        return 0


def _numbers(file: Path) -> set[int]:
    """Return the numbers of a list such as "0-3,8"; none of a file that is missing or says something else."""
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
    """Return the name of an ARM core, which the kernel gives as numbers; "" for other processors."""
    implementer, part = (processor.get(f"CPU {name}", "") for name in ("implementer", "part"))
    if not (implementer and part):
        return ""
    known = _ARM_CORES.get(part) if implementer == _ARM else None
    return known or f"processor {part} of implementer {implementer}"
