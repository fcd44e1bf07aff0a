"""Files by which the user's other programs find a process that runs, held locked as long as it lives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from edgespec.platform.files import own_file, temporary_path


@contextmanager
def announced(file: Path, content: bytes) -> Iterator[None]:
    """Let `living` find `content` inside the block. Where no file can be written, nobody finds it."""
    descriptor = None
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = temporary_path(file)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if lock_descriptor(descriptor, blocking=False):
            os.write(descriptor, content)
            new.replace(file)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            os.close(descriptor)


def living(folder: Path) -> Iterator[bytes]:
    """Yield what the user's processes that live announce in `folder`; delete the files of others.

    A file of another user, or one that others may read or write, is not believed.
    """
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError), own_file(file) as descriptor:
            found = os.fstat(descriptor)
            if lock_descriptor(descriptor, blocking=False):
                file.unlink(missing_ok=True)
            elif not found.st_mode & 0o077:
                yield os.pread(descriptor, found.st_size, 0)
