"""The models directory: tells which of the registry's files are on this machine.

    NAME.gguf            complete; its hash was right when it was put there
    NAME.json            its stamp: that hash, its size, its source
    NAME.gguf.part*      a stopped pull, which can be continued (see sources.py)
    .NAME.lock           held by the process that pulls NAME

A file whose stamp has the right hash and size is *present* and is not hashed again until
`edgespec models verify` asks for it.
"""

from __future__ import annotations

import glob
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.entries import REVISION_DIGITS, Entry, Registry
from edgespec.platform.files import replace_together, write_atomically
from edgespec.platform.kept import MODELS
from edgespec.platform.locks import locked

CONVERTED_TO = ", converted to "
"""Follows the label of the source in the stamp of a model that was converted, and before the type."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Record of a file in the store, written when it is hashed."""

    sha256: str
    size: int
    """Bytes."""
    source: str
    """Label of its source or derivation."""
    base_sha256: str | None = None
    """For a derived file, the hash of its base."""


@dataclass(frozen=True, slots=True)
class Store:
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
            return Stamp(**json.loads(self._stamp_file(entry).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
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
        """Write the stamp of the entry's file."""
        write_atomically(self._stamp_file(entry), _text_of(stamp))

    def put(self, entry: Entry, complete: Path, stamp: Stamp) -> None:
        """Make the file `complete` that of the entry, with its stamp, or change neither. Raises OSError."""
        replace_together(complete, self.file(entry), (self._stamp_file(entry), _text_of(stamp)))

    def expected_sha256(self, entry: Entry) -> str | None:
        """Return the hash the file must have: the registry's, else that of the first pull, else None."""
        if entry.sha256 or entry.derived:
            return entry.sha256  # a derived file may come out different when it is made again
        stamp = self.stamp(entry)
        return stamp.sha256 if stamp else None

    def is_present(self, entry: Entry, registry: Registry) -> bool:
        """Whether the entry's file is here, complete and current. Trusts the stamp: hashes nothing."""
        try:
            size = self.file(entry).stat().st_size
        except OSError:
            return False
        if entry.path:
            return entry.size in (None, size)
        stamp = self.stamp(entry)
        if stamp is None or stamp.size != size or entry.sha256 not in (None, stamp.sha256):
            return False
        _, was_converted, type_name = stamp.source.rpartition(CONVERTED_TO)
        if was_converted and type_name != entry.converted:
            return False
        if entry.derived:
            base_sha256 = self.expected_sha256(registry.get(entry.derived.base))
            return stamp.source == entry.derived.label and base_sha256 in (None, stamp.base_sha256)
        return True

    def pulled(self) -> list[str]:
        """Return the names of models that were pulled, stopped pulls too; not of files put here by hand."""
        files = self.root.glob("*.gguf*")
        names = {file.name.partition(".gguf")[0] for file in files}
        return sorted(
            name
            for name in names
            if self.stamp(Entry(name)) or any(self.root.glob(f"{glob.escape(name)}.gguf.part*"))
        )

    def remove_pulled(self, name: str) -> int:
        """Delete a model that `pulled` names; return its bytes. Raises EdgespecError while it is pulled."""

        def refuse() -> None:
            raise EdgespecError(f"{name} is being pulled; end that first")

        try:
            with locked(self.root / f".{name}.lock", refuse):
                found = [file for path in self._files(Entry(name)) for file in (path, *path.rglob("*"))]
                n_bytes = sum(file.stat().st_size for file in found if file.is_file())
                self.remove(Entry(name))
                return n_bytes
        except OSError as error:
            raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from None

    def remove(self, entry: Entry) -> list[Path]:
        """Delete the entry's file, stamp and partial files, and return them; never the user's own file."""
        if entry.path:
            return []
        found = self._files(entry)
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return found

    def _files(self, entry: Entry) -> list[Path]:
        """The files of the entry that are here: its file, stamp and partial files."""
        final = self.file(entry)
        parts = self.root.glob(f"{glob.escape(final.name)}.part*")
        return [path for path in (final, self._stamp_file(entry), *parts) if path.exists()]


def _text_of(stamp: Stamp) -> str:
    return json.dumps(asdict(stamp), indent=2) + "\n"
