"""Interrupting a running pass of the library, by Ctrl-C or from another thread (see csrc/interrupt.h)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Self

from edgespec import _core


def is_requested(interrupt: _core.Interrupt | None) -> bool:
    """Whether an interruption came that was not drained."""
    if interrupt is None:
        return False
    waiting = select.poll()
    waiting.register(interrupt.fd, select.POLLIN)
    return bool(waiting.poll(0))


class Cancellation:
    """While entered, `cancel` makes the library's current pass end and raise KeyboardInterrupt.

    A context manager; `cancel` may be called from any thread.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self.interrupt = _core.Interrupt(self._read_end)
        return self

    def cancel(self) -> None:
        """End the pass under way, or the next one before a `drain`."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls
            os.write(self._write_end, b"\0")

    def drain(self) -> None:
        """Forget earlier calls of `cancel`, so that they do not end the next pass."""
        try:
            while os.read(self._read_end, 512):
                pass
        except BlockingIOError:
            pass

    def __exit__(self, *_: object) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


class SignalPipe(Cancellation):
    """While entered, signals end the current pass too.

    A context manager for the main thread, the only one that Python delivers signals to.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            super().__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous)
        super().__exit__()
