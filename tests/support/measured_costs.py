"""The costs of an engine's passes, measured in a fraction of a second."""

from __future__ import annotations

from edgespec.apps.energy.meter import EnergyMeter
from edgespec.drafting.measure import measure


def measured(engine, *, budget_s=0.3):
    """What `edgespec profile` would measure of `engine`, without energy."""
    meter = EnergyMeter(None, reason="not wanted")
    return measure(
        engine.target,
        engine.draft_in_use,
        n_threads=1,
        budget_s=budget_s,
        meter=meter,
    )
