"""Locks between processes, which are freed even if a process is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_EVERY_S = 0.01  # a lock that another process holds is tried again


@contextmanager
def locked(path: Path, on_busy: Callable[[], None] = lambda: None, *, mode: int = -1) -> Iterator[None]:
    """Hold the lock file `path`, which is made with `mode`, -1: the umask's, if it is not there.

    `on_busy` is called once if another process holds it; where that raises nothing, the lock is waited for.
    Raises OSError.
    """
    # Never deleted: a process waiting for a deleted lock file would then hold a lock that no other sees.
    lock = FileLock(path, mode=mode, poll_interval=_EVERY_S, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_busy()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
