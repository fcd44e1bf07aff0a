"""Small files kept between runs, which any number of processes may read and write at once.

    NAME                        written whole or not at all, readable by the user only
    NAME.set-aside (-2, -3 ..)  made no sense, and is kept for whoever wants to know why
    .lock                       held by the process that writes

Nothing depends on such a file: one that makes no sense is set aside, one of a later edgespec is left as it
is, and either way the next run begins anew, with one line for the user.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from edgespec.errors import EdgespecError
from edgespec.platform.messages import MessageFn, silent

T = TypeVar("T")


class DamagedError(Exception):
    """A file makes no sense; `str(error)` says how."""


class NewerError(EdgespecError):
    """A file was written by a later edgespec."""

    def __init__(self, path: Path, version: int) -> None:
        super().__init__(f"{path} was written by a later edgespec (format {version}): left alone, not used")


class KeptFile(Generic[T]):
    """A file in which something of type T is kept. Holds nothing open between calls."""

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        lock: str = ".lock",
        on_message: MessageFn = silent,
    ) -> None:
        """Name the file; it is not touched.

        `parse` returns what the bytes mean, and raises DamagedError or NewerError. `lock`: the name of the
        lock, beside the file; files may share one. `on_message` takes each line once.
        """
        self.path = path
        self._parse = parse
        self._lock = path.with_name(lock)
        self._on_message = on_message
        self._said: set[str] = set()

    def peek(self) -> T | None:
        """Return what the file holds, None where there is none; sets nothing aside.

        Raises DamagedError, NewerError and OSError.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return self._parse(data)

    def read(self) -> T | None:
        """Return what the file holds; None where there is none, or none that can be used. Raises OSError."""
        try:
            return self.peek()
        except NewerError as error:
            self.say(str(error))
            return None
        except DamagedError as error:
            problem = str(error)
        # Looked at again under the lock: perhaps another process was writing, or has put a good one there.
        try:
            with self.locked():
                return self.read_locked()
        except NewerError as error:
            self.say(str(error))
        except OSError:  # it cannot be moved away
            self.say(f"{self.path}: {problem}; it is not used")
        return None

    def update(self, change: Callable[[T | None], bytes]) -> None:
        """Write what `change` makes of what the file holds (None: nothing that can be used).

        Under the lock: what two processes write at a time is written one after the other. Raises NewerError,
        and OSError where the file cannot be written; the file is then what it was.
        """
        with self.locked():
            self.write_locked(change(self.read_locked()))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; it goes with the process, however that ends. Makes the folder. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Never deleted: a process that waits for a deleted lock file would hold a lock nobody sees.
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read_locked(self) -> T | None:
        """Return what the file holds, having set aside one that makes no sense; the lock is held.

        Raises NewerError and OSError.
        """
        try:
            return self.peek()
        except DamagedError as error:
            aside = self._free_name()
            self.path.rename(aside)
            self.say(f"{self.path}: {error}; set aside as {aside.name}")
            return None

    def write_locked(self, data: bytes) -> None:
        """Replace the file, or leave it as it was; the lock is held. Raises OSError."""
        # One name for all processes, since the lock is ours: what a killed one left is overwritten.
        new = self.temporary
        try:
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_all(file, data, 0)
                os.fsync(file)
            finally:
                os.close(file)
            new.replace(self.path)
        except BaseException:  # Ctrl-C too: no half of a file stays behind
            new.unlink(missing_ok=True)
            raise

    @property
    def temporary(self) -> Path:
        """What the file is called while it is written."""
        return self.path.with_name(f".{self.path.name}.new")

    def set_aside(self) -> list[Path]:
        """Return the files that were set aside."""
        try:
            return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.set-aside*"))
        except OSError:
            return []

    def _free_name(self) -> Path:
        taken, n = set(self.set_aside()), 1
        name = aside = self.path.with_name(f"{self.path.name}.set-aside")
        while aside in taken:
            n += 1
            aside = name.with_name(f"{name.name}-{n}")
        return aside

    def say(self, line: str) -> None:
        """Tell the user a line, once."""
        if line not in self._said:
            self._said.add(line)
            self._on_message(line)


def write_all(file: int, data: bytes, offset: int) -> None:
    """Write all of `data`: one call, unless the disk is so full that a part fits and the next call fails."""
    rest = memoryview(data)
    while rest:
        n = os.pwrite(file, rest, offset)
        if n == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[n:], offset + n


# --- JSON ---------------------------------------------------------------------------------------


def parse_struct(data: bytes, type_: type[T]) -> T:
    """Return the dataclass `type_` that the JSON `data` is. Raises DamagedError."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"damaged: {error}") from None


def parse_json(path: Path, data: bytes, *, form: str, version: int) -> dict[str, Any]:
    """Return the JSON object that `data` is: {"format": form, "version": version, ...}.

    All its numbers are finite. Raises DamagedError and NewerError; `path` is for the latter's line.
    """
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise DamagedError("damaged: not JSON") from None
    if not isinstance(document, dict) or document.get("format") != form:
        raise DamagedError(f"not of {form}")
    found = document.get("version")
    if type(found) is not int or found < version:
        raise DamagedError("damaged: no version")
    if found > version:
        raise NewerError(path, found)
    return document


def _finite(text: str) -> float:
    """Return a number of a JSON text; Python would also read NaN and Infinity, and 1e999 as such."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
