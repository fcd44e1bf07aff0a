"""A folder of files within a limit of bytes: those unused for longest are deleted, and only our own.

    FOLDER/                       0700, made here or the user's own
        NAME                      0600, of our form; begins with our magic
        .edgespec-PID-THREAD.tmp  one that is being written
        .lock                     held by the process that writes or deletes

What does not fit this form (another name or beginning, a folder, a link, a pipe, another user's file) is not
ours: it is not used, not counted and not deleted. Readers need no lock: a file that is deleted stays mapped.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from edgespec.platform.files import TEMPORARY, begins_with, own_file, temporary_path
from edgespec.platform.locks import locked


class BoundedFolder:
    """The files of one kind in a folder."""

    def __init__(
        self,
        path: Path,
        names: str,
        magic: bytes,
        used_ns: Callable[[os.stat_result], int] = lambda found: found.st_mtime_ns,
    ) -> None:
        """Name the folder. `names`: a regular expression; `magic`: the bytes that they begin with.

        `used_ns`: when a file was used last.
        """
        self.path = path
        self._form, self._magic, self._used_ns = re.compile(names), magic, used_ns
        self._ours: set[str] = set()  # names whose beginning was looked at

    def make(self) -> None:
        """Make the folder if there is none. Raises OSError where it cannot be made or read."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.scandir(self.path).close()

    def names(self) -> list[str]:
        """Return the names of our files, in no order; none of a folder that cannot be read."""
        try:
            with os.scandir(self.path) as found:
                named = {one.name for one in found if self._form.fullmatch(one.name)}
        except OSError:
            return []
        known = self._ours & named
        self._ours = known | {name for name in named - known if self._is_ours(name)}
        return [*self._ours]

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open a file that this user alone can have written or read. Raises OSError; never waits."""
        with own_file(self.path / name) as file:
            if os.fstat(file).st_mode & 0o077:
                raise PermissionError(errno.EPERM, "others can read or write it")
            yield file

    def delete(self, name: str) -> bool:
        """Delete a file if it is ours; return whether it is gone."""
        if self._is_ours(name):
            with suppress(OSError):
                (self.path / name).unlink()
                self._ours.discard(name)
                return True
        return False

    def locked(self, on_busy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Hold the folder's lock, as `locks.locked` does."""
        return locked(self.path / ".lock", on_busy, mode=0o600)

    def make_room(self, n_bytes: int, limit: int, before_ns: int) -> bool:
        """Delete files used before `before_ns` until `n_bytes` more fit; return whether they do."""
        found = []
        for name in self.names():
            with suppress(OSError):
                facts = (self.path / name).lstat()
                found.append((self._used_ns(facts), facts.st_size, name))
        total = n_bytes + sum(size for _, size, _ in found)
        for used_ns, size, name in sorted(found):  # those unused for longest first
            if total <= limit or used_ns >= before_ns:
                break
            if self.delete(name):
                total -= size
        return total <= limit

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file that is called `name` after the block; on an error nothing is left.

        Needs the lock. Raises OSError, also where something is called so that is no ordinary file.
        """
        file, new = self.path / name, temporary_path(self.path / name)
        for left in self.path.iterdir():  # by a process that was killed
            if re.fullmatch(TEMPORARY, left.name) and self._is_ours(left.name):
                left.unlink(missing_ok=True)
        try:
            with open(new, "xb", opener=partial(os.open, mode=0o600)) as stream:
                yield stream
            if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, f"{name} is no ordinary file")
            new.replace(file)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _is_ours(self, name: str) -> bool:
        file = self.path / name
        return begins_with(file, self._magic) or (
            bool(self._form.fullmatch(name)) and begins_with(file, b"") and not file.stat().st_size
        )
