"""Facts about the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from edgespec.llama.backend import library_version
from edgespec.platform.cpu import device_model, read_cpu
from edgespec.platform.machine import governors
from edgespec.platform.memory import total_bytes

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
