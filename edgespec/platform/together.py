"""Several pieces of work at once, in threads, which end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

_PATIENCE_S = 1.0


class Stopped(BaseException):
    """Ends a piece of work because another failed, or of Ctrl-C: no `except Exception` is to hold it up."""


def run_together(pieces: Sequence[Callable[[], object]], stop: Callable[[], None]) -> None:
    """Call all of `pieces`, each in a thread of its own, and return when all have returned.

    What one of them raises, or Ctrl-C here, is raised after `stop` was called, which is to make the others
    end: they have a second. The process does not wait for one that takes longer, on a network that is silent.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(piece: Callable[[], object]) -> None:
        try:
            piece()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
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
