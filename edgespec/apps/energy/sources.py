"""The energy sources of this machine, in the order of preference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from edgespec.apps.energy.base import SourceFinding
from edgespec.apps.energy.power import AssumedPower, find_battery, find_ina, find_pmic
from edgespec.apps.energy.rapl import find_rapl
from edgespec.errors import UsageError

ASSUMED = "assumption"


def survey(
    root: Path = Path("/"), *, assume_watts: float | None = None, vcgencmd: Path | None = None
) -> tuple[SourceFinding, ...]:
    """Return a finding for each kind of source; the first available one is the best.

    All paths are looked up below `root`. `vcgencmd`: path of a Raspberry Pi's command, if it is not in a
    usual place. Raises UsageError unless `assume_watts` is finite and above 0.
    """
    found = [find_rapl(root), find_pmic(root, vcgencmd), find_ina(root), find_battery(root)]
    if assume_watts is not None:
        if not (math.isfinite(assume_watts) and assume_watts > 0):
            problem = "not a number above 0; give the power of this machine in watts, such as 15"
            raise UsageError(problem, field="assume_watts", value=f"{assume_watts:g}")
        found.insert(0, SourceFinding(ASSUMED, AssumedPower(assume_watts), present=True))
    return tuple(found)


def why_none(found: Sequence[SourceFinding]) -> str:
    """Return in one line why no source is available."""
    present = [finding for finding in found if finding.present]
    told = present or [finding for finding in found if "virtual machine" in finding.reason]
    told = told or [finding for finding in found if "no sensor of its current" in finding.reason]
    if told:
        return f"{told[0].kind}: {told[0].reason}"
    return "this machine shows no energy counter or power sensor: " + "; ".join(
        finding.reason for finding in found
    )
