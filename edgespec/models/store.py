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
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.models.entries import REVISION_DIGITS, Entry, Registry
from edgespec.platform.files import cache_root, expand_user, write_atomically

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
    """The models directory."""

    root: Path

    @classmethod
    def default(cls) -> Store:
        """Return the store at $EDGESPEC_MODELS_DIR, or in the user's cache directory."""
        if root := os.environ.get("EDGESPEC_MODELS_DIR"):
            return cls(expand_user(root).absolute())
        return cls(cache_root() / "models")

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
        write_atomically(self._stamp_file(entry), json.dumps(asdict(stamp), indent=2) + "\n")

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

    def remove(self, entry: Entry) -> list[Path]:
        """Delete the entry's file, stamp and partial files, and return them; never the user's own file."""
        if entry.path:
            return []
        final = self.file(entry)
        found = [
            path
            for path in (final, self._stamp_file(entry), *self.root.glob(f"{glob.escape(final.name)}.part*"))
            if path.exists()
        ]
        for path in found:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return found
