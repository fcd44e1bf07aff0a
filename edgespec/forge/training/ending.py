"""Signals that end long work at its next good moment, instead of where it just is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def ending() -> Iterator[threading.Event]:
    """Give an event that the first SIGINT or SIGTERM sets; a second one ends the work at once.

    Outside of the main thread, which gets no signals, it is never set.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, previous[number])
        asked.set()

    for one in (signal.SIGINT, signal.SIGTERM):
        previous[one] = signal.signal(one, note)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
