"""Signals that end long work at its next good moment, instead of where it just is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Asked:
    """Whether a signal asked the work to end; true from then on."""

    def __init__(self) -> None:
        """Nobody asked yet."""
        self._asked = self._waits = False

    def __bool__(self) -> bool:
        return self._asked

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        """While entered, a signal ends what waits there at once; the work is asked to end, as elsewhere."""
        self._waits = True
        try:
            yield
        except KeyboardInterrupt:
            if not self._asked:
                raise
        finally:
            self._waits = False

    def note(self) -> None:
        """Ask the work to end; called by the handler of a signal."""
        self._asked = True
        if self._waits:
            raise KeyboardInterrupt


@contextmanager
def ending(asked: Asked) -> Iterator[None]:
    """While entered, the first SIGINT or SIGTERM asks the work to end; a second one ends it at once.

    Outside of the main thread, which gets no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        asked.note()

    for one in (signal.SIGINT, signal.SIGTERM):
        previous[one] = signal.signal(one, note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
