"""Ctrl-C that also ends a pass of the library which is under way (see csrc/interrupt.h)."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Self

from edgespec import _core


class SignalPipe:
    """While entered, signals make the library's current pass end and raise KeyboardInterrupt.

    A context manager for the main thread: Python delivers signals nowhere else.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        try:
            self._previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            os.close(self._read_end)
            os.close(self._write_end)
            raise
        self.interrupt = _core.Interrupt(self._read_end)
        return self

    def drain(self) -> None:
        """Forget the signals so far: what starts now is not to be ended by them."""
        try:
            while os.read(self._read_end, 512):
                pass
        except BlockingIOError:
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous)
        os.close(self._read_end)
        os.close(self._write_end)
