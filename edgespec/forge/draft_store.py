"""Where drafts of one target are made and kept: their names, a folder under a lock, a place among the models.

A candidate is made in a folder of its own in the models directory, under a lock, and gets its name when it is
complete. A killed run leaves nothing but that folder, which the next one removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.forge.dataset import forge_root
from edgespec.models.draft_records import DraftRecord, read_record, record_file, write_record
from edgespec.models.pull import hash_file
from edgespec.models.registry import add_local, check_name, load_registry, remove_local
from edgespec.models.sources import check_disk
from edgespec.models.store import Store
from edgespec.platform.locks import locked


class DraftStore:
    """The drafts of one target."""

    def __init__(self, target_name: str, target_sha256: str) -> None:
        """Work in the models directory; nothing is written yet."""
        self._target = target_name
        self._root = Store.default().root
        self._folder = self._root / f".drafts-of-{target_sha256[:16]}"

    def check_name(self, name: str, *, replace: bool) -> None:
        """Raise UsageError for a name that cannot be given, or is taken (unless it may `replace` a draft)."""
        check_name(name)
        entry, file = load_registry().entries.get(name), self._root / f"{name}.gguf"
        if entry and (entry.path != file or not record_file(file).exists()):
            raise UsageError("a model of that name exists already; choose another", field="name", value=name)
        if (entry or file.exists()) and not replace:
            problem = "a draft of that name exists already; choose another name, or replace it with --force"
            raise UsageError(problem, field="name", value=name)

    def free_name(self, stem: str) -> str:
        """Return `stem`, or with a number after it, so that neither a model nor a file has that name."""
        registry, n, name = load_registry(), 1, stem
        while name in registry.entries or name in registry.pairs or (self._root / f"{name}.gguf").exists():
            n += 1
            name = f"{stem}-{n}"
        return name

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Hold the lock of this target's drafts, and a folder that is gone afterwards.

        Raises EdgespecError if another process holds it, and where the disk fails.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with locked(self._root / f"{self._folder.name}.lock", self._refuse):
                try:
                    shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
                    self._folder.mkdir()
                    yield self._folder
                finally:
                    shutil.rmtree(self._folder, ignore_errors=True)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error

    def _refuse(self) -> None:
        raise EdgespecError(
            f"another process makes drafts for {self._target}; wait until it has ended, or end it"
        )

    def check_space(self, n_bytes: int) -> None:
        """Raise EdgespecError unless the disk holds so many bytes of candidates."""
        check_disk(self._root, n_bytes, f"drafts for {self._target}")

    def keep(self, made: Path, record: DraftRecord) -> Path:
        """Give a candidate its name and its place among the models, in place of an older one of that name.

        Raises OSError and EdgespecError; then there is no new draft, and no half of one.
        """
        file = self._root / f"{record.name}.gguf"
        size, sha256 = made.stat().st_size, hash_file(made)
        replaces = record.name in load_registry().entries
        made.replace(file)
        try:
            write_record(file, record)
            if replaces:
                remove_local(record.name)
            add_local(record.name, file, size, sha256)
        except BaseException:
            if not replaces:
                record_file(file).unlink(missing_ok=True)
                file.unlink(missing_ok=True)
            raise
        return file


def remove_draft(name: str) -> tuple[DraftRecord | None, list[Path]]:
    """Remove a draft that was made here: its name, its file and its record.

    Returns the record, None if it was damaged, and the files that were deleted. Raises UsageError for a name
    that no made draft has.
    """
    file = draft_file(name)
    try:
        record = read_record(file)
    except EdgespecError:
        record = None
    if name in load_registry().entries:
        remove_local(name)
    gone = [path for path in (file, record_file(file)) if path.exists()]
    for path in gone:
        path.unlink()
    return record, gone


def remove_data(target_name: str, target_sha256: str) -> tuple[Path | None, int]:
    """Remove all texts that are kept for a target, and what is left of trainings on them.

    Returns the folder and its bytes; (None, 0) if it is not here. Raises EdgespecError while it is in use.
    """
    folder = forge_root() / target_sha256[:16]
    if not folder.is_dir():
        return None, 0
    with DraftStore(target_name, target_sha256).opened():  # refuses while a draft is being made
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    return folder, n_bytes


def draft_file(name: str) -> Path:
    """Return the file of a draft that was made here. Raises UsageError for a name that none has.

    One whose name was removed from models.toml is found by its file.
    """
    entry = load_registry().entries.get(name)
    file = entry.path if entry else Store.default().root / Path(f"{name}.gguf").name
    if file is None or not record_file(file).exists():
        raise UsageError(f"no draft that was made here is called {name!r}; see `edgespec draft list`")
    return file
