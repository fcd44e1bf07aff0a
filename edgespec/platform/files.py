"""Where the user's files lie, and files written so that no reader ever sees half of one."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from edgespec.errors import UsageError


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file as `replacing` does, text as UTF-8. Its folder is made if need be. Raises OSError."""
    file.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `file` when all is written; else the old one stays as it was.

    A symlink to a file kept elsewhere stays one, and the file's mode what it was. Raises OSError.
    """
    file = file.resolve()
    temporary = beside(file)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if file.is_file():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        temporary.replace(file)
    except BaseException:  # Ctrl-C too: no half of a file stays behind
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def beside(file: Path) -> Path:
    """Return a name in the same folder that no other file, process or thread has."""
    # A file's own name may be as long as the system allows: this one is not made of it.
    return file.with_name(f".edgespec-{os.getpid()}-{threading.get_ident()}.tmp")


def cache_root() -> Path:
    """Return the user's cache directory of edgespec."""
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "edgespec"


def expand_user(path: str | Path) -> Path:
    """Return `path` with a leading ~ replaced; UsageError where no home directory is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: its home directory is not known; set HOME, or name a full path") from None
