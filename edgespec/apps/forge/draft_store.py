"""Drafts in the models directory, their names and records; and what they are made from, shown and deleted.

Drafts are made in a hidden folder of the models directory, under a lock; the best is moved out and gets a
name. A killed run leaves nothing but that folder, which the next run removes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.forge.dataset import BUILT_IN, SHARDS, TrainingText, delete_texts, read_texts
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.draft_records import DraftRecord, read_record, record_file, record_text
from edgespec.models.registry import check_name, load_registry, remove_local, user_models_file, with_local
from edgespec.models.store import Store, hash_file
from edgespec.platform.files import locked, replace_together
from edgespec.platform.kept import FORGE, DamagedFileError


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

        Raises EdgespecError if another process holds the lock, and if the disk fails.
        """
        busy = f"another process makes drafts for {self._target}; wait until it has ended, or end it"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with locked(self._root / f"{self._folder.name}.lock", busy):
                try:
                    shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
                    self._folder.mkdir()
                    yield self._folder
                finally:
                    shutil.rmtree(self._folder, ignore_errors=True)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error

    def store(self, made: Path, record: DraftRecord) -> Path:
        """Move a draft into the models directory under its name, replacing an older one; return its file.

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


# ---- datasets and trainings, target by target ----
#
# A dataset (dataset.py) holds texts as tokens, so they can be read back. The rest of a target's folder are
# checkpoints of trainings: weights, which hold no text but may have learnt it.


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """Dataset and checkpoints of one target."""

    path: Path
    target: str | None
    """The target's name; None if it cannot be read."""
    target_sha256: str
    """Hash of the target's file, or the digits of it in the folder's name."""
    texts: int
    own_texts: int
    """Texts from the user's history and files."""
    data_bytes: int
    checkpoint_bytes: int
    damaged: tuple[Path, ...]
    """Shards that cannot be read, or were set aside."""


def find_stored() -> list[StoredDataset]:
    """The stored data of each target, by name. Raises UsageError if no home directory is known."""
    root = FORGE.path()
    if not root.is_dir():
        return []
    folders = (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    found = [_inspect(path) for path in folders if re.fullmatch("[0-9a-f]{16}", path.name)]
    return sorted(found, key=lambda stored: (stored.target or "", stored.target_sha256))


def _inspect(folder: Path) -> StoredDataset:
    n_texts = n_own = n_bytes = n_other = 0
    damaged = []
    for file in sorted(folder.rglob("*")):
        try:
            size = file.stat().st_size if file.is_file() else 0
        except OSError:  # deleted by now
            continue
        if file.parent != folder or not file.match(SHARDS):
            n_other += size
            continue
        n_bytes += size
        try:
            texts = _texts(file, checked=True)
        except (OSError, DamagedFileError):
            damaged.append(file)
        else:
            n_texts, n_own = n_texts + len(texts), n_own + sum(map(_is_own, texts))
    try:
        document = json.loads((folder / "dataset.json").read_bytes())
        target, sha256 = str(document["name"]) or None, str(document["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        target, sha256 = None, folder.name
    return StoredDataset(folder, target, sha256, n_texts, n_own, n_bytes, n_other, tuple(damaged))


def _is_own(text: TrainingText) -> bool:
    return text.source != BUILT_IN


def _texts(shard: Path, *, checked: bool) -> list[TrainingText]:
    if shard.suffix != ".npz":
        raise DamagedFileError("set aside")
    return read_texts(shard, checked=checked)


def delete_dataset(target_name: str, target_sha256: str) -> tuple[Path | None, int]:
    """Delete all texts of a target, and the remains of trainings on them.

    Returns the folder and its bytes; (None, 0) if there is none. Raises EdgespecError while it is in use.
    """
    folder = FORGE.path() / target_sha256[:16]
    if not folder.is_dir():
        return None, 0
    with DraftStore(target_name, target_sha256).locked_folder():
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    return folder, n_bytes


def delete_user_texts(stored: StoredDataset) -> int:
    """Delete the texts that came from the user, and all damaged shards; return how many texts are gone.

    Raises EdgespecError while a draft is made for this target, and if the disk fails; each shard is then
    complete, with or without these texts.
    """
    n_gone = 0
    with DraftStore(stored.target or stored.target_sha256, stored.target_sha256).locked_folder():
        try:
            for file in sorted(stored.path.glob(SHARDS)):
                try:
                    n_gone += delete_texts(file, _texts(file, checked=False), _is_own)
                except DamagedFileError:
                    file.unlink()
        except OSError as error:
            raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from error
    return n_gone
