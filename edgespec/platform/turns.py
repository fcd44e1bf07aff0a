"""Locks that are handed over in the order in which they were asked for, among threads and among processes."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path


class Turns:
    """Threads that take turns at the processors. A context manager, entered once at a time by each thread.

    `threading.Lock` goes to whoever is fastest: a thread that lets go of it and wants it again would keep it.
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
        """Let those who wait have their turns, and take the next one; called by whoever has the turn."""
        self.__exit__()
        self.__enter__()


class SharedTurns(Turns):
    """Turns that are also shared with other processes, by lock files in a folder; a dead one loses its turn.

    Whoever comes next holds the second file while it waits for the first: a process that lets go of its turn
    and wants it again waits behind it, if its turn took longer than the system takes to wake the other.
    """

    def __init__(self, folder: Path) -> None:
        """Share turns with all who name this folder. Raises OSError."""
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
