"""`edgespec energy`: what measures this machine's joules, how to make it readable, and the idle power."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edgespec.apps.energy.meter import EnergyMeter, measure_idle, store_idle_power
from edgespec.cli.console import message, out, print_line, print_table
from edgespec.cli.groups import shown
from edgespec.cli.options import JsonOption, WattsOption
from edgespec.cli.progress import WorkDisplay
from edgespec.platform.kept import IDLE_POWER
from edgespec.platform.metering import Meter

ROOT = Path("/")
"""Root of the /proc and /sys that are searched for sources; tests replace it."""

_Report = dict[str, Any]


@shown("Measure", "edgespec energy --json")
def energy_command(
    *,
    idle: Annotated[bool, typer.Option(help="Measure the power of the idle machine, and keep it.")] = True,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, max=3600.0, help="How long to measure it, in seconds.")
    ] = 10.0,
    assume_watts: WattsOption = None,
    json: JsonOption = False,
) -> int:
    """Report what measures this machine's joules, and how to make it readable; measure the idle power.

    Do not use the machine meanwhile. The exit code is 0 even if no source is available.
    """
    with EnergyMeter.choose(ROOT, assume_watts, on_message=message) as meter:
        watts, warning = meter.idle_w, ""
        kept = None if watts is None else IDLE_POWER.path()
        if idle and meter.available and not meter.estimated:
            watts, kept, warning = _measured_idle(meter, seconds)
        report: _Report = {
            "sources": [
                {
                    "name": finding.source.name if finding.source else finding.kind,
                    "available": finding.source is not None,
                    "reason": finding.reason,
                    "fix": list(finding.fix),
                }
                for finding in meter.found
            ],
            "chosen": meter.source or None,
            "estimated": meter.estimated,
            "reason": meter.reason,
            "interval_s": meter.interval_s,
            "idle_w": watts,
            "kept": str(kept) if kept else None,
        }
    if json:
        out.print_json(data=report)
    else:
        _print(report)
    if warning:
        message(warning)
    return 0


def know_idle(meter: Meter, seconds: float = 10.0) -> None:
    """Measure and store the idle power of our meter's source, unless it is stored already.

    On a busy machine a message says that it was not measured, and net joules stay unavailable.
    """
    if not isinstance(meter, EnergyMeter) or meter.idle_w is not None:
        return
    if meter.available and not meter.estimated:
        watts, _, warning = _measured_idle(meter, seconds)
        if warning:
            message(warning)
        else:
            meter.idle_w = watts


def _measured_idle(meter: EnergyMeter, seconds: float) -> tuple[float | None, Path | None, str]:
    """Return the watts, the file that stores them, and the fault of the measurement, "" if none."""
    what = f"measuring the idle machine for {seconds:g} s"
    with WorkDisplay() as display:
        watts, fault = measure_idle(
            meter, seconds, on_progress=lambda done_s: display.show(what, done_s, seconds)
        )
    if watts is None or fault:
        return watts, None, fault
    return watts, store_idle_power(meter.source, watts, ROOT, message), ""


def _print(report: _Report) -> None:
    table = Table("source", "", "why", box=None, pad_edge=False)
    for source in report["sources"]:
        table.add_row(source["name"], "available" if source["available"] else "unavailable", source["reason"])
    print_table(table)
    for source in report["sources"]:
        if source["fix"]:
            out.print(f"\nto make {source['name']} available:")
            for line in source["fix"]:
                out.print(f"    {line}")
    out.print()
    if report["chosen"] is None:
        print_line("chosen", f"unavailable: {report['reason']}")
        print_line(
            "",
            "joules are not measured here; --assume-watts WATTS makes estimates, labelled as such, "
            "of a power you know, as from a meter at the plug",
        )
        return
    print_line("chosen", report["chosen"] + (" (estimated)" if report["estimated"] else ""))
    if interval_s := report["interval_s"]:
        print_line("finest", f"a sample every {interval_s:g} s: windows of many of them only")
    print_line("idle", _idle(report))


def _idle(report: _Report) -> str:
    if report["idle_w"] is None:
        return "unavailable" + (": an assumption says nothing of it" if report["estimated"] else "")
    return f"{report['idle_w']:.2f} W" + (f", kept in {report['kept']}" if report["kept"] else "")
