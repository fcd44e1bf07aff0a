"""SHA-256 of model files without reading them again: what was hashed once is kept.

    cache_root()/hashes.json    path -> size, time of the last change, SHA-256

A file of the models directory has its hash in its stamp (store.py), also where a link leads to it. For any
other file it is computed once, and again only when size or time differ. Where nothing can be kept, each call
hashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from edgespec.models.entries import Entry
from edgespec.models.pull import hash_file
from edgespec.models.store import Store
from edgespec.platform.kept import HASHES
from edgespec.platform.state_file import FileEntry, FileTable, StoredFiles

SHA256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""64 lower-case hexadecimal digits, for records that msgspec checks."""

_MOST = 64  # files that are remembered: the oldest are forgotten


class _FileHash(FileEntry, frozen=True):
    sha256: SHA256


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a model's file, in lower-case hex.

    `on_bytes` takes the bytes read so far, if the file has to be hashed. Raises OSError if it cannot be read.
    """
    path = path.resolve()
    if known := known_sha256(path):
        return known
    stat = path.stat()
    found = _FileHash(stat.st_size, stat.st_mtime_ns, hash_file(path, on_bytes))
    _table().add({str(path): found})
    return found.sha256


def known_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a model's file where it is known, else None: nothing is hashed.

    Raises OSError if the file cannot be read.
    """
    path = path.resolve()
    stat, store = path.stat(), Store.default()
    for file in store.root.glob("*.gguf"):
        stamp = store.stamp(Entry(file.stem)) if _is_same(file, stat) else None
        if stamp and stamp.size == stat.st_size:
            return stamp.sha256
    known = _table().read().get(str(path))
    return known.sha256 if known and known.holds(stat) else None


def _is_same(file: Path, stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), stat)
    except OSError:
        return False


def _table() -> FileTable[_FileHash]:
    return FileTable(HASHES.path(), StoredFiles[_FileHash], _MOST)
