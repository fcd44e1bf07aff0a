"""How far making a draft is, as its stages tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """How far one stage is."""

    stage: str
    """Such as "writing" or "training head"."""
    share: float
    """0 to 1."""
    detail: str = ""
    """Figures, in words."""
    left_s: float | None = None
    """Seconds that are left, where the stage itself knows; None: to be told from the share."""


ProgressFn = Callable[[Step], None]
"""Called often."""


def unseen(_step: Step) -> None:
    """Ignore the progress."""
