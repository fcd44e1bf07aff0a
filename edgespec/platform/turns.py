"""A lock that is handed over in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque


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
