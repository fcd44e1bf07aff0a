"""Forked processes: what a process loaded cannot be used in its child, where its threads are missing.

A fork copies the memory and one thread. A pass over a model would wait for the other threads for ever, and so
would a lock that one of them held, or whoever frees what they work on.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from threading import RLock
from types import TracebackType
from typing import Any

from edgespec.errors import UsageError


class HomeProcess:
    """The process that loaded something, which a process forked from it must not use."""

    def __init__(self, name: str) -> None:
        """Remember this process, for what errors call `name`."""
        self._name = name
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process; a child forked from it is another."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise UsageError in a forked child."""
        if not self.is_here:
            raise UsageError(
                f"{self._name} was loaded before this process was forked, and its threads stayed in the "
                'parent: load one here, or start processes with multiprocessing.get_context("spawn")'
            )


class HomeLock(HomeProcess):
    """A reentrant lock that raises UsageError in a forked child, where nobody may be left to release it."""

    def __init__(self, name: str) -> None:
        """Make a lock of what errors call `name`."""
        super().__init__(name)
        self._lock = RLock()

    def __enter__(self) -> None:
        self.require()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def finalize(owner: object, free: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:  # noqa: ANN401 - any arguments
    """Return a `weakref.finalize` that frees nothing in a forked child, whose end frees its copy."""
    return weakref.finalize(owner, _free_at_home, os.getpid(), free, args)


def _free_at_home(pid: int, free: Callable[..., object], args: tuple[Any, ...]) -> None:
    if os.getpid() == pid:
        free(*args)
