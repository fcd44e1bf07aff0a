"""Measure the power of the idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.apps.energy.meter import EnergyMeter
from edgespec.platform.other_load import MOST_OTHER_LOAD, OtherLoad

_STEP_S = 0.1  # between two calls of on_progress


@dataclass(frozen=True, slots=True)
class IdlePower:
    """The measured power of the idle machine."""

    watts: float | None
    """None if unknown; `reason` says why."""
    reason: str = ""
    warning: str = ""
    """Why the figure is unreliable, in one line; else ""."""


def measure_idle(
    meter: EnergyMeter,
    seconds: float = 10.0,
    *,
    on_progress: Callable[[float], None] = lambda _done_s: None,
    load: OtherLoad | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> IdlePower:
    """Return the mean power over `seconds` in which this process sleeps.

    `on_progress` takes the seconds that have passed. `load` tells how busy other programs are.
    """
    if meter.estimated:
        return IdlePower(None, "an assumption says nothing of the idle machine")
    load = load or OtherLoad()
    window = meter.begin()
    n_steps = max(1, round(seconds / _STEP_S))
    try:
        for step in range(n_steps):
            on_progress(seconds * step / n_steps)
            sleep(seconds / n_steps)
    finally:
        measured = meter.end(window)
    on_progress(seconds)
    if measured.joules is None:
        return IdlePower(None, measured.reason)
    if not measured.joules or not measured.seconds:
        return IdlePower(None, f"{meter.source} stood still for {measured.seconds:.1f} s: measure for longer")
    busy, warning = load.processors(), ""
    if busy is not None and busy > MOST_OTHER_LOAD:
        warning = (
            f"the machine was busy: other programs kept {busy:.1f} processors busy; this idle power is too "
            "high and was not kept: stop other programs and run edgespec energy again"
        )
    return IdlePower(measured.joules / measured.seconds, warning=warning)
