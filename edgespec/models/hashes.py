"""SHA-256 of models without reading them again: what was hashed once is kept.

    cache_root()/hashes.json    path -> identity of the file, SHA-256

A hash counts while the file's identity is the same (`identity_of`). Where nothing can be kept, each call
hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from edgespec.models.hub_names import other_files
from edgespec.platform.kept import HASHES
from edgespec.platform.state_file import FileEntry, FileTable, StoredFiles, identity_of

SHA256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""64 lower-case hexadecimal digits, for records that msgspec checks."""

_CHUNK = 1 << 20  # bytes read at once
_MOST = 256  # files that are remembered: the oldest are forgotten


class _FileHash(FileEntry, frozen=True):
    sha256: SHA256


def sha256_of(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a model, in lower-case hex: of its file, or of the hashes of all parts.

    `on_bytes` takes the bytes read so far of a file that has to be hashed. Raises OSError if one cannot be
    read.
    """
    return combined([file_sha256(one, on_bytes) for one in (path, *other_files(path))])


def known_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a model where it is known, else None: nothing is hashed.

    Raises OSError if a file cannot be read.
    """
    hashes = [_known(one.resolve()) for one in (path, *other_files(path))]
    return combined([one for one in hashes if one]) if all(hashes) else None


def combined(hashes: list[str]) -> str:
    """Return the SHA-256 of a model whose files have these, in their order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of one file. Raises OSError if it cannot be read."""
    if known := _known(path.resolve()):
        return known
    before = identity_of(path)
    sha256 = hash_file(path, on_bytes)
    if identity_of(path) == before:
        remember(path, sha256)
    return sha256


def remember(path: Path, sha256: str) -> None:
    """Keep the hash of a file as it is now. Raises OSError if there is no such file."""
    path = path.resolve()
    _table().add({str(path): _FileHash(files=identity_of(path), sha256=sha256)})


def _known(path: Path) -> str | None:
    identity, known = identity_of(path), _table().read().get(str(path))
    return known.sha256 if known and known.files == identity else None


def _table() -> FileTable[_FileHash]:
    return FileTable(HASHES.path(), StoredFiles[_FileHash], _MOST)


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the file's SHA-256 in lower-case hex; `on_bytes` takes the number of bytes read so far."""
    digest, done = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(buffer[:n])
            done += n
            on_bytes(done)
    return digest.hexdigest()
