"""Where the user's files lie, and small files written so that no reader ever sees half of one."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

from edgespec.errors import UsageError


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file, or leave the old one as it was; text as UTF-8. Its folder is made if need be.

    A symlink to a file kept elsewhere stays one, and the file's mode what it was. Raises OSError.
    """
    file = file.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(file)
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
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
