"""The user's directories, and files replaced atomically: no reader sees half of one."""

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
    """Write a file as `replacing` does, text as UTF-8; makes its folder if missing. Raises OSError."""
    file.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `file` at the end of the block; on an error `file` is unchanged.

    Symlinks are followed and the file's mode is kept. Raises OSError.
    """
    file = file.resolve()
    temporary = temporary_path(file)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if file.is_file():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        temporary.replace(file)
    except BaseException:  # Ctrl-C too: leave no partial file behind
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def text_of(file: Path) -> str:
    """Return the text of a file of the system without space around it; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    return text_of(file).splitlines()


def temporary_path(file: Path) -> Path:
    """Return a temporary path in the same folder, unique to this process and thread."""
    # Not derived from the file's name, which may already be as long as the system allows.
    return file.with_name(f".edgespec-{os.getpid()}-{threading.get_ident()}.tmp")


def cache_root() -> Path:
    """Return edgespec's cache directory for this user."""
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "edgespec"


def config_root() -> Path:
    """Return edgespec's configuration directory for this user."""
    return expand_user(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "edgespec"


def expand_user(path: str | Path) -> Path:
    """Return `path` with a leading ~ replaced. Raises UsageError if the home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: its home directory is not known; set HOME, or name a full path") from None
