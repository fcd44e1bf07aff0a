"""Text on standard input, where there is any: a pipe may be open without anybody writing to it."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.platform.files import lines_of

PATIENCE_S = 1.0
"""Seconds that a program which started this process with a pipe may take to begin to write."""
TOLD_AFTER_S = 3.0


def read_piped(on_message: Callable[[str], None]) -> bytes:
    """The content of a file or a pipe on standard input; nothing for a terminal, a device, or none at all.

    Programs often start others with a pipe or socket that they never write to nor close: where the pipe comes
    from such a program, and not from a shell's `|`, nothing is what it has not begun to send by PATIENCE_S.
    """
    try:
        descriptor = sys.stdin.fileno() if sys.stdin else -1
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # closed
        return b""
    if stat.S_ISREG(mode):
        return sys.stdin.buffer.read()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if stat.S_ISSOCK(mode) or _held_by_ancestor(descriptor):
        if not _has_begun(descriptor, PATIENCE_S):
            on_message("nothing came through standard input, which is open: the prompt is used alone")
            return b""
    elif not _has_begun(descriptor, TOLD_AFTER_S):
        on_message("waiting for the text that is piped to standard input; `< /dev/null` runs without it")
    return sys.stdin.buffer.read()


def _has_begun(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(1000 * seconds))


def _held_by_ancestor(descriptor: int) -> bool:
    """Whether a process that this one descends from could write into the pipe.

    A shell closes its ends of a pipeline's pipes; who writes into them is no ancestor.
    """
    try:
        pipe = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return False
    return any(_writes(process, pipe) for process in _ancestors())


def _ancestors() -> Iterator[Path]:
    pid = os.getppid()
    while pid > 0:
        process = Path(f"/proc/{pid}")
        yield process
        parents = [line for line in lines_of(process / "status") if line.startswith("PPid:")]
        pid = int(parents[0].split()[1]) if parents else 0


def _writes(process: Path, pipe: Path) -> bool:
    try:
        held = list((process / "fd").iterdir())
    except OSError:  # of another user, or gone
        return False
    for file in held:
        try:
            if file.readlink() == pipe and _is_writable(process / "fdinfo" / file.name):
                return True
        except OSError:
            continue
    return False


def _is_writable(fdinfo: Path) -> bool:
    flags = [line.split()[1] for line in lines_of(fdinfo) if line.startswith("flags:")]
    return bool(flags) and int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY
