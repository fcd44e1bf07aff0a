"""Small files kept between runs, which any number of processes may read and write at once.

    NAME            written whole or not at all, readable by the user only
    NAME.set-aside  the last damaged file, kept so that the user can look into it
    .lock           held by the process that writes

edgespec works without these files: one that is damaged, or of another format, is set aside. The user is told
in one line, and the run goes on as if there were no file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from edgespec.platform.locks import locked
from edgespec.platform.messages import MessageFn, once, silent

T = TypeVar("T")


class DamagedFileError(Exception):
    """A file cannot be understood; `str(error)` says why."""


class StateFile(Generic[T]):
    """A file that stores a value of type T. It is not kept open between calls."""

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        lock: str = ".lock",
        on_message: MessageFn = silent,
    ) -> None:
        """Name the file; it is not opened yet.

        `parse` turns the file's bytes into a T, and raises DamagedFileError. `lock`: the name of the lock
        file in the same folder; several files may share one. `on_message` gets each line once.
        """
        self.path = path
        self._parse = parse
        self._lock = path.with_name(lock)
        self.say = once(on_message)
        """Tells the user a line, unless it was told before."""

    def peek(self) -> T | None:
        """Return the file's value, None if there is no file; a damaged file stays where it is.

        Raises DamagedFileError and OSError.
        """
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a pipe would be waited for
                raise OSError(errno.EINVAL, "no ordinary file", str(self.path))
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return self._parse(data)

    def read(self) -> T | None:
        """Return the file's value; None if there is no file or it cannot be used. Raises OSError."""
        try:
            return self.peek()
        except DamagedFileError as error:
            problem = str(error)
        # Read again under the lock: another process may have replaced the damaged file by now.
        try:
            with self._locked():
                return self._usable()
        except OSError:  # the file cannot be set aside
            self.say(f"{self.path}: {problem}; it is not used")
        return None

    def update(self, change: Callable[[T | None], bytes]) -> None:
        """Replace the file's value, under the lock: `change` takes the old value and returns the new bytes.

        The old value is None if there is none that can be used. Raises OSError; the file is then
        unchanged.
        """
        # All processes use the same temporary name: a killed one's leftover is overwritten.
        new = self.path.with_name(f".{self.path.name}.new")
        with self._locked():
            data = change(self._usable())
            try:
                file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    write_all(file, data, 0)
                    os.fsync(file)
                finally:
                    os.close(file)
                new.replace(self.path)
            except BaseException:  # Ctrl-C too: leave no partial file behind
                new.unlink(missing_ok=True)
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, which is freed even if the process is killed. Makes the folder. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._lock, mode=0o600):
            yield

    def _usable(self) -> T | None:
        """Return the file's value, or set a damaged file aside and return None. Raises OSError."""
        try:
            return self.peek()
        except DamagedFileError as error:
            set_aside(self.path, str(error), self.say)
            return None


def set_aside(path: Path, why: str, say: MessageFn) -> None:
    """Rename a file that cannot be used, in the place of an earlier one, and say so. Raises OSError."""
    aside = path.with_name(f"{path.name}.set-aside")
    path.replace(aside)
    say(f"{path}: {why}; set aside as {aside.name}")


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError, perhaps with a part written, if the disk is full."""
    rest = memoryview(data)
    while rest:
        n = os.pwrite(file, rest, offset)
        if n == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[n:], offset + n


# --- JSON ---------------------------------------------------------------------------------------


def parse_struct(data: bytes, type_: type[T]) -> T:
    """Parse the JSON `data` as the dataclass `type_`. Raises DamagedFileError."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFileError(f"damaged: {error}") from None


FileIdentity: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""Size, times of change in ns and inode of files: another one once anything was written to one of them."""


def identity_of(*files: Path) -> FileIdentity:
    """Return the identity of a model's files. Raises OSError.

    The time at which the inode changed is in it: `cp -p` and `touch` set the other one.
    """
    facts = (file.stat() for file in files)
    return tuple((one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in facts)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What `FileTable` stores of a file; subclasses add what is known of it."""

    files: FileIdentity = ()
    """Of the file, and of the others of a split model."""


E = TypeVar("E", bound=FileEntry)


class StoredFiles(msgspec.Struct, Generic[E]):
    """The JSON of a `FileTable`."""

    files: dict[str, E]


class FileTable(Generic[E]):
    """A state file with entries by the path of a file; where nothing can be stored it is empty."""

    def __init__(self, path: Path, kind: type[StoredFiles[E]], most: int) -> None:
        """Name the state file. Of more than `most` entries, the oldest are forgotten."""
        self._state = StateFile(path, lambda data: parse_struct(data, kind), lock=f".{path.stem}.lock")
        self._most = most

    def read(self) -> dict[str, E]:
        """Return the entries, the oldest first."""
        with suppress(OSError):
            if stored := self._state.read():
                return stored.files
        return {}

    def add(self, new: dict[str, E]) -> None:
        """Store entries as the newest."""

        def added(old: StoredFiles[E] | None) -> bytes:
            kept = [(path, entry) for path, entry in old.files.items() if path not in new] if old else []
            return msgspec.json.encode(StoredFiles(dict([*kept, *new.items()][-self._most :])))

        with suppress(OSError):
            self._state.update(added)


def parse_json(data: bytes, *, form: str, version: int) -> dict[str, Any]:
    """Parse a JSON object {"format": form, "version": version, ...} whose numbers are all finite.

    Raises DamagedFileError.
    """
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise DamagedFileError("damaged: not JSON") from None
    if not isinstance(document, dict) or document.get("format") != form:
        raise DamagedFileError(f"not of {form}")
    found = document.get("version")
    if type(found) is not int or found != version:
        raise DamagedFileError(f"of format {found!a}, and this edgespec has {version}")
    return document


def _finite(text: str) -> float:
    """Parse a number, but not NaN, Infinity or 1e999, all of which Python's JSON parser accepts."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
