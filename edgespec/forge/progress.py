"""How far making a draft is, as its stages tell it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.signals import Cancellation


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far one stage is."""

    stage: str
    """Such as "writing" or "training head"."""
    share: float
    """0 to 1."""
    detail: str = ""
    """Figures, in words."""
    left_s: float | None = None
    """Seconds that are left, where the stage itself knows; None: to be told from the share."""


ProgressFn = Callable[[StageProgress], None]
"""Called often."""


def unseen(_step: StageProgress) -> None:
    """Ignore the progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What long work tells, and what may stop it."""

    on_progress: ProgressFn = unseen
    on_message: MessageFn = silent
    """Takes lines that the user should know."""
    signals: Cancellation | None = None
    """Lets Ctrl-C end a running pass."""
