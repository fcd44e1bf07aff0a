"""Whether the machine runs on its battery, as Linux shows it in /sys/class/power_supply."""

from __future__ import annotations

from pathlib import Path

from edgespec.platform.files import text_of

_STORES = {"Battery", "UPS"}


def on_battery(root: Path = Path("/")) -> bool:
    """Return whether a battery of the machine feeds it; a machine without a battery is on mains.

    A battery that discharges says so itself. Where none says what it does (some do not while a charge limit
    holds them), the machine is on battery if it has plugs (types Mains and USB) and none of them is online.
    Batteries of mice and headphones, of scope Device, do not count. `root`: where /sys is.
    """
    supplies = list((root / "sys/class/power_supply").glob("*"))
    stores = [
        supply
        for supply in supplies
        if text_of(supply / "type") in _STORES and text_of(supply / "scope") != "Device"
    ]
    states = {text_of(store / "status") for store in stores}
    if "Discharging" in states:
        return True
    if not stores or states - {"Unknown", ""}:
        return False
    plugs = [text_of(supply / "online") for supply in supplies if supply not in stores]
    return "0" in plugs and "1" not in plugs
