"""The models directory as the place of drafts: their names and records, and a locked folder to make them in.

Drafts are made in a hidden folder of the models directory, under a lock; the best is moved out and gets a
name. A killed run leaves nothing but that folder, which the next run removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.draft_records import DraftRecord, read_record, record_file, record_text
from edgespec.models.hashes import hash_file
from edgespec.models.registry import check_name, load_registry, remove_local, user_models_file, with_local
from edgespec.models.sources import check_disk
from edgespec.models.store import Store
from edgespec.platform.files import replace_together
from edgespec.platform.locks import locked


def check_draft_name(name: str, *, replace: bool) -> None:
    """Raise UsageError for a name that is invalid or taken; `replace`: a draft may have it."""
    check_name(name)
    entry, file = load_registry().entries.get(name), Store.default().root / f"{name}.gguf"
    if entry and (entry.path != file or not record_file(file).exists()):
        raise UsageError("a model of that name exists already; choose another", field="name", value=name)
    if (entry or file.exists()) and not replace:
        problem = "a draft of that name exists already; choose another name, or replace it with --force"
        raise UsageError(problem, field="name", value=name)


class DraftStore:
    """The models directory for the drafts of one target."""

    def __init__(self, target_name: str, target_sha256: str) -> None:
        self._target = target_name
        self._root = Store.default().root
        self._folder = self._root / f".drafts-of-{target_sha256[:16]}"

    def free_name(self, stem: str) -> str:
        """Return `stem`, with a number after it where a model or a file has that name."""
        registry, n, name = load_registry(), 1, stem
        while name in registry.entries or name in registry.pairs or (self._root / f"{name}.gguf").exists():
            n += 1
            name = f"{stem}-{n}"
        return name

    @contextmanager
    def locked_folder(self) -> Iterator[Path]:
        """Hold the lock of this target's drafts, and give an empty folder that is removed afterwards.

        Raises EdgespecError if another process holds the lock, and where the disk fails.
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
        """Raise EdgespecError unless the disk has room for `n_bytes` of drafts."""
        check_disk(self._root, n_bytes, f"drafts for {self._target}")

    def store(self, made: Path, record: DraftRecord) -> Path:
        """Move a draft among the models under its name, in place of an older one; return its file.

        Raises OSError and EdgespecError; then nothing is stored.
        """
        file = self._root / f"{record.name}.gguf"
        entries = with_local(record.name, file, made.stat().st_size, hash_file(made))
        replace_together(made, file, (record_file(file), record_text(record)), (user_models_file(), entries))
        return file


def remove_draft(name: str) -> tuple[DraftRecord | None, list[Path]]:
    """Remove the name, file and record of a draft that was made here.

    Returns the record, None if it was damaged, and the deleted files. Raises UsageError for a name that no
    made draft has, EdgespecError for a damaged record where no draft is made.
    """
    file = draft_file(name)
    try:
        record = read_record(file)
    except EdgespecError:
        if file.parent != Store.default().root:  # where drafts are made
            raise
        record = None
    if name in load_registry().entries:
        remove_local(name)
    gone = [path for path in (file, record_file(file)) if path.is_file()]
    for path in gone:
        path.unlink()
    return record, gone


def draft_file(name: str) -> Path:
    """Return the file of a draft that was made here, even if models.toml no longer names it.

    Raises UsageError for a name that no made draft has.
    """
    entry = load_registry().entries.get(name)
    file = entry.path if entry else Store.default().root / Path(f"{name}.gguf").name
    if file is None or not record_file(file).exists():
        raise UsageError(f"no draft that was made here is called {name!r}; see `edgespec draft list`")
    return file
