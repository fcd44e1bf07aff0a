"""Run several pieces of work at once, in threads; if one fails, all end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

_PATIENCE_S = 1.0


class StopRequest(BaseException):
    """Ends a piece of work because another failed or Ctrl-C came; no `except Exception` catches it."""


def run_together(pieces: Sequence[Callable[[], object]], stop: Callable[[], None]) -> None:
    """Call all of `pieces`, each in its own thread, and return when all have returned.

    If one raises, or Ctrl-C comes here, `stop` is called, which should make the others end; they get a second
    each. Then the exception is raised. The process does not wait for a thread that hangs on a dead network.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(piece: Callable[[], object]) -> None:
        try:
            piece()
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            ended.put(error)
        else:
            ended.put(None)

    threads = [threading.Thread(target=run, args=(piece,), daemon=True) for piece in pieces]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            if error := ended.get():
                raise error
    except BaseException:
        stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_PATIENCE_S)
        raise
