"""The models directory: which of the registry's files are here.

    NAME.gguf            complete, and of the right hash when it was put there
    NAME.json            its stamp: that hash, its size, where it came from
    NAME.gguf.part*      a pull that was stopped and can go on (see sources.py)
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

from edgespec.models.entries import Entry, Registry
from edgespec.platform.files import cache_root, expand_user, write_atomically


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is known of a file in the store: written when it was hashed."""

    sha256: str
    size: int
    """Bytes."""
    source: str
    """The label of the source or derivation it came from."""
    base_sha256: str | None = None
    """Of a derived file: the hash of the file it was made from."""


@dataclass(frozen=True, slots=True)
class Store:
    """The models directory: `NAME.gguf` (complete, of the right hash) and `NAME.json` (its stamp)."""

    root: Path

    @classmethod
    def default(cls) -> Store:
        """Return the store at $EDGESPEC_MODELS_DIR, or in the user's cache directory."""
        if root := os.environ.get("EDGESPEC_MODELS_DIR"):
            return cls(expand_user(root).absolute())
        return cls(cache_root() / "models")

    def file(self, entry: Entry) -> Path:
        """Return where the entry's file is, or will be."""
        return entry.path or self.root / f"{entry.name}.gguf"

    def _stamp_file(self, entry: Entry) -> Path:
        return self.root / f"{entry.name}.json"

    def stamp(self, entry: Entry) -> Stamp | None:
        """Return what was recorded of the entry's file; None if nothing readable was."""
        try:
            return Stamp(**json.loads(self._stamp_file(entry).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # no stamp, or a damaged one: the file is hashed again

    def write_stamp(self, entry: Entry, stamp: Stamp) -> None:
        """Record what the entry's file is."""
        write_atomically(self._stamp_file(entry), json.dumps(asdict(stamp), indent=2) + "\n")

    def expected_sha256(self, entry: Entry) -> str | None:
        """Return the hash the file must have: the registry's, else that of the first pull, else None."""
        if entry.sha256 or entry.derived:
            return entry.sha256  # a derived file may come out anew, so its own past does not bind it
        stamp = self.stamp(entry)
        return stamp.sha256 if stamp else None

    def is_present(self, entry: Entry, registry: Registry) -> bool:
        """Whether the entry's file is there, complete and current. Hashes nothing: the stamp is trusted."""
        try:
            size = self.file(entry).stat().st_size
        except OSError:
            return False
        if entry.path:
            return entry.size in (None, size)
        stamp = self.stamp(entry)
        if stamp is None or stamp.size != size or entry.sha256 not in (None, stamp.sha256):
            return False
        if entry.derived:
            base_sha256 = self.expected_sha256(registry.get(entry.derived.base))
            return stamp.source == entry.derived.label and base_sha256 in (None, stamp.base_sha256)
        return True

    def remove(self, entry: Entry) -> list[Path]:
        """Delete the entry's file, stamp and what a stopped pull left; a file of the user's own stays."""
        if entry.path:
            return []
        final = self.file(entry)
        gone = [
            path
            for path in (final, self._stamp_file(entry), *self.root.glob(f"{glob.escape(final.name)}.part*"))
            if path.exists()
        ]
        for path in gone:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return gone
