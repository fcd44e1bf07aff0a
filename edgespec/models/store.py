"""The models directory: which of the registry's files are on this machine, and their hashes.

    NAME.gguf            complete; its hash was right when it was stored
    NAME.json            its stamp: that hash, its size, its source
    NAME.gguf.part*      a stopped pull, which can be continued (hub.py)
    .NAME.lock           held by the process that pulls NAME

A file whose stamp has the right hash is *present*. Hashes are kept in cache_root()/hashes.json. A file is
hashed again if its size, times or inode changed (`identity_of`), and when `edgespec models verify` asks for
it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import asdict

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.registry import REVISION_DIGITS, Entry, Registry, other_files
from edgespec.platform.files import begins_with, locked, replace_together, write_atomically
from edgespec.platform.kept import HASHES, MODELS, FileEntry, FileTable, StoredFiles, identity_of

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
    """Return the SHA-256 of a model if it is known, else None: nothing is hashed.

    Raises OSError if a file cannot be read.
    """
    hashes = [_known(one.resolve()) for one in (path, *other_files(path))]
    return combined([one for one in hashes if one]) if all(hashes) else None


def combined(hashes: list[str]) -> str:
    """Return the SHA-256 of a model whose files have these hashes, in order."""
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
    """Store the hash of a file's present content. Raises OSError if there is no such file."""
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


CONVERTED_TO = ", converted to "
"""Follows the label of the source in the stamp of a model that was converted, and before the type."""


class Stamp(msgspec.Struct, frozen=True):
    """Record of a file in the store, written when it is hashed."""

    sha256: str
    size: int
    """Bytes."""
    source: str
    """Label of its source or derivation."""
    base_sha256: str | None = None
    """For a derived file, the hash of its base."""


class Store(msgspec.Struct, frozen=True):
    """The directory of models: files, stamps of what was verified, partial downloads."""

    root: Path

    @classmethod
    def default(cls) -> Store:
        """Return the store at $EDGESPEC_MODELS_DIR, or in the user's cache directory."""
        return cls(MODELS.path())

    def file(self, entry: Entry) -> Path:
        """Return the path of the entry's file, which may not exist."""
        return entry.path or self.root / f"{entry.name}.gguf"

    def _stamp_file(self, entry: Entry) -> Path:
        return self.root / f"{entry.name}.json"

    def stamp(self, entry: Entry) -> Stamp | None:
        """Return the stamp of the entry's file; None if there is none or it is damaged."""
        try:
            return msgspec.json.decode(self._stamp_file(entry).read_bytes(), type=Stamp)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # the file is then hashed again

    def hub_files(self, repo: str, revision: str) -> list[str]:
        """Return the paths in a repository of the hub of all files that were pulled from it."""
        found = []
        for file in sorted(self.root.glob(f"hf--{glob.escape(repo.replace('/', '--'))}--*.json")):
            stamp = self.stamp(Entry(name=file.name.removesuffix(".json")))
            name, _, at = stamp.source.rpartition("@") if stamp else ("", "", "")
            is_here = file.with_suffix(".gguf").exists()
            if is_here and name.startswith(f"hub {repo}/") and at == revision[:REVISION_DIGITS]:
                found.append(name.removeprefix(f"hub {repo}/"))
        return found

    def write_stamp(self, entry: Entry, stamp: Stamp) -> None:
        """Write the stamp of the entry's file, which has just been hashed. Raises OSError."""
        file = self.file(entry)
        if file.exists() and file.stat().st_size == stamp.size:
            remember(file, stamp.sha256)
        write_atomically(self._stamp_file(entry), _text_of(stamp))

    def install(self, entry: Entry, complete: Path, stamp: Stamp) -> None:
        """Make `complete` the entry's file, with its stamp, or change nothing. Raises OSError."""
        replace_together(complete, self.file(entry), (self._stamp_file(entry), _text_of(stamp)))
        remember(self.file(entry), stamp.sha256)

    def _has_hash(self, path: Path, sha256: str) -> bool:
        """Whether a file has this hash, which is computed only if unknown (`sha256_of`)."""
        try:
            return file_sha256(path) == sha256
        except OSError:
            return False

    def expected_sha256(self, entry: Entry) -> str | None:
        """Return the hash the file must have: the registry's, else that of the first pull, else None."""
        if entry.sha256 or entry.derived:
            return entry.sha256  # a derived file may come out different when it is made again
        stamp = self.stamp(entry)
        return stamp.sha256 if stamp else None

    def is_present(self, entry: Entry, registry: Registry) -> bool:
        """Whether the entry's file exists, complete and current; hashed only if it may have changed."""
        try:
            size = self.file(entry).stat().st_size
        except OSError:
            return False
        if entry.path:
            return entry.size in (None, size) and self._is_own(entry)
        stamp = self.stamp(entry)
        if stamp is None or stamp.size != size or entry.sha256 not in (None, stamp.sha256):
            return False
        if not self._has_hash(self.file(entry), stamp.sha256):
            return False
        _, was_converted, type_name = stamp.source.rpartition(CONVERTED_TO)
        if was_converted and type_name != entry.converted:
            return False
        if entry.derived:
            base_sha256 = self.expected_sha256(registry.get(entry.derived.base))
            return stamp.source == entry.derived.label and base_sha256 in (None, stamp.base_sha256)
        return True

    def _is_own(self, entry: Entry) -> bool:
        """Whether all files of the user's own model are those that were added."""
        if entry.packed or not entry.path or not entry.sha256:
            return True
        parts = zip(other_files(entry.path), entry.parts, strict=False)
        files = [(entry.path, entry.sha256), *parts]
        return all(self._has_hash(path, sha256) for path, sha256 in files if sha256)

    def _is_pulled(self, entry: Entry) -> bool:
        stamp = self.stamp(entry)
        return stamp is not None and self._has_hash(self.file(entry), stamp.sha256)

    def pulled(self) -> list[str]:
        """Return the names of pulled models, stopped pulls included, but not of files stored by hand."""
        names = {file.name.partition(".gguf")[0] for file in self.root.glob("*.gguf*")}
        return sorted(name for name in names if self._is_pulled(Entry(name)) or self._parts(Entry(name)))

    def remove_pulled(self, name: str) -> int:
        """Delete a model that `pulled` names; return its bytes. Raises EdgespecError during its pull."""
        entry = Entry(name)
        try:
            with locked(self.root / f".{name}.lock", f"{name} is being pulled; end that first"):
                files = self._files(entry) if self._is_pulled(entry) else self._parts(entry)
                found = [file for path in files for file in (path, *path.rglob("*"))]
                n_bytes = sum(file.stat().st_size for file in found if file.is_file())
                _delete(files)
                return n_bytes
        except OSError as error:
            raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from None

    def remove(self, entry: Entry) -> list[Path]:
        """Delete the entry's file, stamp and partial files, and return them; never the user's own file."""
        if entry.path:
            return []
        found = self._files(entry)
        _delete(found)
        return found

    def _files(self, entry: Entry) -> list[Path]:
        """Return the entry's existing files: its file, stamp and partial files."""
        final = [path] if (path := self.file(entry)).is_file() or path.is_symlink() else []
        return [*final, *([self._stamp_file(entry)] if self._has_stamp(entry) else []), *self._parts(entry)]

    def _has_stamp(self, entry: Entry) -> bool:
        """Whether the stamp's file holds a stamp, damaged or not."""
        file = self._stamp_file(entry)
        if self.stamp(entry) or not begins_with(file, b"{"):
            return self.stamp(entry) is not None
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return True
        return False

    def _parts(self, entry: Entry) -> list[Path]:
        """Return the entry's partial files, and the folders of files that belong to them."""
        name = self.file(entry).name
        files = re.compile(rf"{re.escape(name)}\.part(\.json|\.converted|\.part\.[^.]{{8}}(\.npz)?)?")
        folders = (f"{name}.part.wheels", f"{name}.part.beside")
        found = self.root.glob(f"{glob.escape(name)}.part*")
        return [
            path
            for path in found
            if (path.is_file() if files.fullmatch(path.name) else path.name in folders and path.is_dir())
            and not path.is_symlink()
        ]


def _text_of(stamp: Stamp) -> str:
    return json.dumps(asdict(stamp), indent=2) + "\n"


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
