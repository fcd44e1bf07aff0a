"""Who computes when: locks that are granted in the order of requests, and idle time."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path


class Turns:
    """Threads that take turns at the processors. A context manager, entered once at a time by each thread.

    `threading.Lock` goes to the fastest: a thread that releases it and requests it again would keep it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def __enter__(self) -> None:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            self._changed.wait_for(lambda: self._waiting[0] is turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()

    def hand_over(self) -> None:
        """Give waiting threads their turns, and then take the next one; called by the holder of the turn."""
        self.__exit__()
        self.__enter__()


class SharedTurns(Turns):
    """Turns that are also shared with other processes, by lock files in a folder; a dead one loses its turn.

    The next process holds the second file while it waits for the first: a process that gives up its turn and
    requests it again waits behind it, if its turn took longer than the system takes to wake the other.
    """

    def __init__(self, folder: Path) -> None:
        """Share turns with all processes that use this folder. Raises OSError."""
        super().__init__()
        self._turn, self._next = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in ("turn", "next")
        )

    def __enter__(self) -> None:
        super().__enter__()
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_UN)
        super().__exit__()

    def __del__(self) -> None:
        for descriptor in (self._turn, self._next):
            with suppress(OSError):
                os.close(descriptor)


QUIET_S = 1.0
"""Seconds without work after which time counts as idle."""


class IdleTime:
    """The time in which nothing is under way, for a thread whose work would slow that down."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_under_way = 0
        self._idle_since = time.monotonic()
        self.turn = threading.Lock()
        """Held by the thread that works in it."""
        self.is_over = False
        """Whether nothing more comes, so that all time is idle."""

    def note(self, n_under_way: int) -> None:
        """Note how much is under way now."""
        with self._changed:
            self._n_under_way, self._idle_since = n_under_way, time.monotonic()
            self._changed.notify_all()

    def finish(self) -> None:
        """Note that nothing more will come."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until nothing has been under way for a while, or the program ends."""
        with self._changed:
            while not self.is_over and threading.main_thread().is_alive():
                left = self._idle_since + QUIET_S - time.monotonic()
                if not self._n_under_way and left <= 0:
                    return
                self._changed.wait(QUIET_S if self._n_under_way else left)
