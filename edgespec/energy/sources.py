"""What of this machine tells energy, in the order in which it is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from edgespec.energy.base import Finding
from edgespec.energy.power import AssumedPower, find_battery, find_ina, find_pmic
from edgespec.energy.rapl import find_rapl
from edgespec.errors import UsageError

ASSUMED = "assumption"


def survey(
    root: Path = Path("/"), *, assume_watts: float | None = None, vcgencmd: Path | None = None
) -> tuple[Finding, ...]:
    """Return what was found of each kind of source, the one to choose first being the first available.

    `root` is the folder below which all paths are looked for, `vcgencmd` a Raspberry Pi's command where
    it is not in one of its usual places. Raises UsageError for `assume_watts` that are no power.
    """
    found = [find_rapl(root), find_pmic(root, vcgencmd), find_ina(root), find_battery(root)]
    if assume_watts is not None:
        if not (math.isfinite(assume_watts) and assume_watts > 0):
            problem = "not a number above 0; give the power of this machine in watts, such as 15"
            raise UsageError(problem, field="assume_watts", value=f"{assume_watts:g}")
        found.insert(0, Finding(ASSUMED, AssumedPower(assume_watts), present=True))
    return tuple(found)


def why_none(found: Sequence[Finding]) -> str:
    """Return in one line why none of them is available."""
    present = [finding for finding in found if finding.present]
    told = present or [finding for finding in found if "virtual machine" in finding.reason]
    told = told or [finding for finding in found if "no sensor of its current" in finding.reason]
    if told:
        return f"{told[0].kind}: {told[0].reason}"
    return "this machine shows no energy counter or power sensor: " + "; ".join(
        finding.reason for finding in found
    )
