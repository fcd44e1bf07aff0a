"""The processor: its name and its features, as Linux describes them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor's model name and the names of its features."""

    model: str
    flags: frozenset[str]


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Return the processor of this machine; of what the kernel does not say, the architecture or nothing."""
    try:
        first = cpuinfo.read_text(errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    flags = facts.get("flags") or facts.get("Features") or ""  # x86, ARM
    return Cpu(facts.get("model name") or platform.machine(), frozenset(flags.split()))
