"""SHA-256 of model files without reading them again: what was hashed once is kept.

    cache_root()/hashes.json    path -> size, time of the last change, SHA-256

A file of the models directory has its hash in its stamp (store.py), also where a link leads to it. For any
other file it is computed once, and again only when size or time differ. Where nothing can be kept, each call
hashes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from edgespec.models.entries import Entry
from edgespec.models.pull import hash_file
from edgespec.models.store import Store
from edgespec.platform.kept import HASHES
from edgespec.platform.state_file import StateFile, parse_struct

SHA256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""64 lower-case hexadecimal digits, for records that msgspec checks."""

_MOST = 64  # files that are remembered: the oldest are forgotten


@dataclass(frozen=True, slots=True)
class _FileHash:
    size: int
    mtime_ns: int
    sha256: SHA256


@dataclass(frozen=True, slots=True)
class _HashTable:
    files: dict[str, _FileHash] = field(default_factory=dict)
    """Path -> hash, in the order of hashing."""


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a model's file, in lower-case hex.

    `on_bytes` takes the bytes read so far, if the file has to be hashed. Raises OSError if it cannot be read.
    """
    path = path.resolve()
    if known := known_sha256(path):
        return known
    stat = path.stat()
    found = _FileHash(stat.st_size, stat.st_mtime_ns, hash_file(path, on_bytes))
    _remember(_kept(), str(path), found)
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
    known = _read(_kept()).files.get(str(path))
    if known and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return known.sha256
    return None


def _is_same(file: Path, stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), stat)
    except OSError:
        return False


def _kept() -> StateFile[_HashTable]:
    return StateFile(HASHES.path(), lambda data: parse_struct(data, _HashTable), lock=".hashes.lock")


def _read(kept: StateFile[_HashTable]) -> _HashTable:
    try:
        return kept.read() or _HashTable()
    except OSError:
        return _HashTable()


def _remember(kept: StateFile[_HashTable], path: str, found: _FileHash) -> None:
    def added(old: _HashTable | None) -> bytes:
        files = {name: one for name, one in (old or _HashTable()).files.items() if name != path}
        newest = [*files.items(), (path, found)][-_MOST:]
        return msgspec.json.encode(_HashTable(dict(newest)))

    try:
        kept.update(added)
    except OSError:
        return  # hashed again the next time
