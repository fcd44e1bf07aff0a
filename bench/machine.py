"""What every benchmark says of the machine it ran on, and how it summarises and saves its runs."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec import _core
from edgespec.llama import backend, kernels
from edgespec.platform.cpu import read_cpu

QUIET = 0.1
"""Processors that other work may keep busy before a measurement counts as disturbed."""

_T = TypeVar("_T")


def other_load() -> float:
    """Return how many processors other work kept busy over the next second; this process sleeps."""

    def busy() -> int:
        ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4]  # all but idle and waiting for I/O

    began = busy()
    time.sleep(1.0)
    return (busy() - began) / os.sysconf("SC_CLK_TCK")


def facts(loads: list[float]) -> dict[str, Any]:
    """Return the machine and the versions; `loads` are `other_load` before and after the runs."""
    if max(loads) > QUIET:
        print(
            "warning: other processes were busy: decoding threads wait for each other, so times are "
            "wrong; stop them and measure again",
            file=sys.stderr,
        )
    return {
        "processor": read_cpu().model,
        "processors": os.cpu_count(),
        "row kernels": _core.simd(),
        "kernels": kernels.load().name,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "libraries": f"numpy {np.__version__}, llama.cpp {backend.library_version()}",
        "other load": " .. ".join(f"{load:.2f}" for load in loads) + " processors, before and after",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return median, low, high


def require_kernels() -> None:
    """End the script in one line where there is nothing to compare the stock kernels with."""
    if reason := kernels.load().reason:
        raise SystemExit(f"nothing to compare, only stock kernels here: {reason}")


def in_child(function: Callable[..., _T], *arguments: object) -> _T:
    """Run `function` in a fresh process: nothing that one model leaves behind touches the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def save(name: str, result: dict[str, Any], loads: list[float], machine: str | None = None) -> None:
    """Write bench/results/NAME-MACHINE.json, unless the machine was busy."""
    if max(loads) > QUIET:
        raise SystemExit("not saved: the machine was busy")
    machine = machine or re.sub(r"[^a-z0-9]+", "-", read_cpu().model.lower()).strip("-")
    file = Path(__file__).parent / "results" / f"{name}-{machine}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"saved {file}", file=sys.stderr)
