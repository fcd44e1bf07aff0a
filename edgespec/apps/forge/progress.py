"""Progress and messages of making a draft, and what may stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.signals import Cancellation


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Progress of one stage, such as "writing" or "training head"."""

    stage: str
    share: float
    """0 to 1."""
    detail: str = ""
    left_s: float | None = None
    """Seconds left, where the stage knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Where a stage reports to, and what may stop it."""

    on_progress: Callable[[StageProgress], None] = lambda _progress: None
    on_message: MessageFn = silent
    signals: Cancellation | None = None
    """Lets Ctrl-C end a running pass."""
