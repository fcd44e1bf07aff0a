"""The user's directories, files replaced atomically (no reader sees half of one), locks between processes.

A file that the user names for results is checked before the work (`check_writable`, `check_folder`). A lock
is freed even if the process that holds it is killed.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from edgespec.errors import EdgespecError, UsageError

_TRIED = 1024  # bytes that are written to see whether a disk is full


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
    with _temporary(file) as temporary:
        with temporary.open("wb") as stream:
            yield stream
            _complete(stream, file)
        temporary.replace(file)


def replace_together(complete: Path, file: Path, *others: tuple[Path, str | bytes]) -> None:
    """Replace `file` by the file `complete`, and `others` by their new content, text as UTF-8.

    A full disk changes none of them: all is written before the first is replaced. Raises OSError.
    """
    with ExitStack() as stack:
        written = []
        for number, (other, content) in enumerate(others):
            other.resolve().parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(_temporary(other.resolve(), number))
            with temporary.open("wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                _complete(stream, other)
            written.append((temporary, other.resolve()))
        for new, old in [(complete, file), *written]:
            new.replace(old)


@contextmanager
def _temporary(file: Path, number: int = 0) -> Iterator[Path]:
    """Yield a temporary path for new content of `file`; leave no partial file, even after Ctrl-C."""
    temporary = temporary_path(file).with_suffix(f".{number}.tmp" if number else ".tmp")
    try:
        yield temporary
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _complete(stream: BinaryIO, file: Path) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    if file.is_file():
        os.fchmod(stream.fileno(), stat.S_IMODE(file.stat().st_mode))


def text_of(file: Path) -> str:
    """Return the text of a system file without surrounding space; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def lines_of(file: Path) -> list[str]:
    """Return the lines of a system file; none if it cannot be read."""
    return text_of(file).splitlines()


def read_text_file(file: Path, field: str = "") -> str:
    """Return the text of a user's file, in UTF-8; `field`: the option that names it. Raises UsageError."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("not UTF-8 text; convert it first", field=field, value=file) from None
    except OSError as error:
        raise UsageError(str(error.strerror), field=field, value=file) from None


def why_no_file(path: Path) -> str:
    """Return why `path` is no regular file, such as "a directory"; "" if it is one.

    Models are read at random positions, and opening a pipe would wait for its other end.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        return f"cannot be read: {error.strerror}"
    except (OSError, ValueError):  # a NUL in the name
        return "no such file"
    if stat.S_ISREG(mode):
        return ""
    if stat.S_ISDIR(mode):
        return "a directory"
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return f"not a regular file but {kind}"


def check_file(path: Path, field: str = "") -> None:
    """Raise UsageError unless `path` is a regular file; `field`: the option that names it."""
    if why := why_no_file(path):
        raise UsageError(f"{path}: {why}", field=field)


@contextmanager
def own_file(path: Path) -> Iterator[int]:
    """Open an ordinary file of this user for reading, without following links or waiting for pipes.

    Raises OSError for anything else.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise PermissionError(errno.EPERM, "no ordinary file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC
    file = os.open(path, flags)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "no ordinary file of this user")
        yield file
    finally:
        os.close(file)


def begins_with(path: Path, *magics: bytes) -> bool:
    """Whether `path` is an ordinary file of this user that begins with one of these."""
    try:
        with own_file(path) as file:
            return os.pread(file, max(map(len, magics)), 0).startswith(magics)
    except OSError:
        return False


TEMPORARY = r"\.edgespec-\d+-\d+(\.\d+)?\.tmp"
"""Names of `temporary_path`, as a regular expression."""


def temporary_path(file: Path) -> Path:
    """Return a temporary path in the same folder, unique to this process and thread."""
    # Not derived from the file's name, which may already be as long as the system allows.
    return file.with_name(f".edgespec-{os.getpid()}-{threading.get_ident()}.tmp")


def cache_root() -> Path:
    """Return edgespec's cache directory for this user."""
    return user_folder("XDG_CACHE_HOME") / "edgespec"


USER_FOLDERS = {"XDG_CACHE_HOME": "~/.cache", "XDG_CONFIG_HOME": "~/.config"}
"""Variables of the XDG standard, and the folders without them."""


def user_folder(variable: str) -> Path:
    """Return the folder that a variable of USER_FOLDERS names, or the usual one.

    As the standard requires, a relative path is ignored (`ignored_folders`).
    """
    folder = expand_user(os.environ.get(variable) or USER_FOLDERS[variable])
    return folder if folder.is_absolute() else expand_user(USER_FOLDERS[variable])


def ignored_folders() -> dict[str, str]:
    """Return the variables of USER_FOLDERS that are set to a relative path, and their values."""
    given = {name: os.environ.get(name, "") for name in USER_FOLDERS}
    return {name: value for name, value in given.items() if value and not expand_user(value).is_absolute()}


def config_root() -> Path:
    """Return edgespec's configuration directory for this user."""
    return user_folder("XDG_CONFIG_HOME") / "edgespec"


def expand_user(path: str | Path) -> Path:
    """Return `path` with a leading ~ replaced. Raises UsageError if the home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: its home directory is not known; set HOME, or name a full path") from None


# ---- files of results ----


@contextmanager
def _told(path: Path, field: str, kind: type[EdgespecError], what: str = "file") -> Iterator[Path]:
    """Yield the file to replace at `path`: a symlink's target. An OSError is one line that names `field`."""
    try:
        file = Path(os.path.realpath(path))
        if file.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        yield file
    except OSError as error:
        kind = EdgespecError if error.errno == errno.ENOSPC else kind
        problem = f"cannot be written: {error.strerror or error}; choose another {what}"
        raise kind(problem, field=field, value=path) from None


def check_writable(path: Path, field: str, what: str = "file") -> None:
    """Check, before long work, that a file can be written at `path`; leave nothing behind.

    Raises UsageError, which names `field` and the reason, if not; EdgespecError if the disk is full.
    """
    with _told(path, field, UsageError, what) as file:
        if file.exists() and not file.is_file():  # a pipe, a device
            return
        temporary = temporary_path(file)
        try:
            temporary.write_bytes(bytes(_TRIED))
        finally:
            temporary.unlink(missing_ok=True)


def check_folder(path: Path, field: str) -> None:
    """Check, before long work, that files can be written in a folder, which need not exist yet.

    Raises as `check_writable`.
    """
    whole = Path(os.path.realpath(path))
    there = next(one for one in (whole, *whole.parents) if one.exists())
    try:
        check_writable(there / ".edgespec", field, "folder")
    except EdgespecError as error:
        raise type(error)(error.problem, field=field, value=path) from None


def write_file(path: Path, data: bytes, *, field: str) -> None:
    """Write a file such that a complete one exists at any time, the old or the new one.

    Raises EdgespecError in one line that names `field` and the file; the old one is unchanged then.
    """
    with _told(path, field, EdgespecError) as file:
        if file.exists() and not file.is_file():
            file.write_bytes(data)
        else:
            with replacing(file) as stream:
                stream.write(data)


_EVERY_S = 0.01  # a lock that another process holds is tried again


@contextmanager
def locked(path: Path, on_busy: Callable[[], None] | str = lambda: None, *, mode: int = -1) -> Iterator[None]:
    """Hold the lock file `path`; if it is missing, create it with `mode`, -1: the umask's.

    `on_busy`, if another process holds it: a text is raised as EdgespecError; a function is called once, then
    the lock is waited for. Raises OSError.
    """
    from filelock import FileLock, Timeout  # 50 ms, which few runs need

    # Never deleted: a process waiting for a deleted lock file would then hold a lock that no other sees.
    lock = FileLock(path, mode=mode, poll_interval=_EVERY_S, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if isinstance(on_busy, str):
            raise EdgespecError(on_busy) from None
        on_busy()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
