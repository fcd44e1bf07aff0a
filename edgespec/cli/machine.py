"""The report of `edgespec doctor` on the machine, and on the pairs of models that fit in its memory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from edgespec.benchmark.machine import processor_clock, temperatures, throttling
from edgespec.cli.console import message, print_line, print_table
from edgespec.energy import EnergyMeter
from edgespec.models.fitting import best_pair, fitting_pairs
from edgespec.models.registry import load_registry
from edgespec.models.sources import format_size
from edgespec.models.store import Store
from edgespec.platform.boards import device_model, device_revision
from edgespec.platform.cpu import read_cpu

Report = dict[str, Any]
"""The object that --json prints."""


def machine_report(root: Path) -> Report:
    """Return the facts that system and firmware tell; None: unknown. `root`: as for `Watch`."""
    speed, slowed = processor_clock(root), throttling(root)
    return {
        "model": device_model(root) or None,
        "revision": device_revision(root) or None,
        "processors": read_cpu(root / "proc/cpuinfo").count,
        "clock_mhz": speed and asdict(speed),
        "degrees": temperatures(root),
        "firmware": slowed and asdict(slowed),
    }


def energy_report(root: Path) -> Report:
    """Return the source of joules that would be chosen, or why there is none."""
    with EnergyMeter.choose(root, on_message=message) as meter:
        return {"source": meter.source or None, "reason": meter.reason}


def pairs_report(root: Path) -> list[Report]:
    """Return the pairs of models.toml by the memory that they need, and which of them fit."""
    registry = load_registry()
    pairs = fitting_pairs(registry, Store.default(), root)
    best = best_pair(pairs, registry, root)
    return [asdict(fit) | {"best": fit.pair == best} for fit in pairs]


# ---- text ----


def print_machine(report: Report) -> None:
    """Print what is known of the machine; leave out what it does not have."""
    if report["model"]:
        revision = f", revision {report['revision']}" if report["revision"] else ""
        print_line("board", f"{report['model']}{revision}, {report['processors']} processors")
    if speed := report["clock_mhz"]:
        now = f", now {speed['now']:.0f}" if speed["now"] else ""
        governors = f", governor {', '.join(speed['governors'])}" if speed["governors"] else ""
        print_line("clock", f"{speed['least']:.0f} to {speed['most']:.0f} MHz{now}{governors}")
    if report["degrees"]:
        hottest, degrees = [*report["degrees"].items()][-1]
        print_line("heat", f"{degrees:.0f} degrees ({hottest})")
    if slowed := report["firmware"]:
        now, since_start = (", ".join(slowed[when]) or "all is well" for when in ("now", "since_start"))
        print_line("firmware", f"now {now}; since the start {since_start}")


def print_energy(report: Report) -> None:
    """Print the source of joules, or why there is none."""
    print_line("energy", report["source"] or f"unavailable: {report['reason']}")


def print_pairs(report: list[Report]) -> None:
    """Print the pairs as a table."""
    table = Table("pair", "target", "memory", "", box=None, pad_edge=False)
    for row in report:
        fits = {True: "fits", False: "too large", None: "unknown"}[row["fits"]]
        table.add_row(row["pair"], row["target"], size(row["needed"]), fits + ", best" * row["best"])
    print_table(table)


def size(n_bytes: int | None) -> str:
    """Return a number of bytes for people."""
    return "unknown" if n_bytes is None else format_size(n_bytes)
