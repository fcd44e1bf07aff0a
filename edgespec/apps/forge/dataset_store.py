"""Datasets and trainings that are stored on disk, target by target; deleting them, or the user's texts alone.

A dataset (dataset.py) holds texts as tokens, so they can be read back. The rest of a target's folder are
checkpoints of trainings: weights, which hold no text but may have learnt it.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import BUILT_IN, SHARD_NAME, delete_texts, forge_root
from edgespec.apps.forge.draft_store import DraftStore
from edgespec.errors import EdgespecError, describe_os_error


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """Dataset and checkpoints of one target."""

    folder: Path
    target: str
    """The target's name; "" if it cannot be read."""
    sha256: str
    """Hash of the target's file, or the digits of it in the folder's name."""
    n_texts: int
    n_own: int
    """Texts from the user's history and files."""
    data_bytes: int
    checkpoint_bytes: int
    damaged: tuple[Path, ...]
    """Shards that cannot be read, or were set aside."""


def find_stored() -> list[StoredDataset]:
    """The stored data of each target, by name. Raises UsageError where no home directory is known."""
    root = forge_root()
    if not root.is_dir():
        return []
    folders = (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    found = [_inspect(path) for path in folders if re.fullmatch("[0-9a-f]{16}", path.name)]
    return sorted(found, key=lambda stored: (stored.target, stored.sha256))


def _inspect(folder: Path) -> StoredDataset:
    n_texts = n_own = n_bytes = n_other = 0
    damaged = []
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        try:
            size = file.stat().st_size
        except OSError:  # deleted by now
            continue
        name = SHARD_NAME.fullmatch(file.name)
        if not name or file.parent != folder:
            n_other += size
            continue
        n_bytes += size
        own = None if name["aside"] else _user_texts(file)
        if own is None:
            damaged.append(file)
        else:
            n_texts += len(own)
            n_own += int(own.sum())
    target, sha256 = _target_of(folder)
    return StoredDataset(folder, target, sha256, n_texts, n_own, n_bytes, n_other, tuple(sorted(damaged)))


def _target_of(folder: Path) -> tuple[str, str]:
    try:
        document = json.loads((folder / "dataset.json").read_bytes())
        return str(document["name"]), str(document["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", folder.name


def _user_texts(shard: Path) -> npt.NDArray[np.bool_] | None:
    """Return for each text of a shard whether it came from the user; None if the shard cannot be read."""
    try:
        with np.load(shard) as arrays:
            return np.asarray(arrays["source"] != BUILT_IN, np.bool_)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def delete_dataset(target_name: str, target_sha256: str) -> tuple[Path | None, int]:
    """Delete all texts of a target, and what is left of trainings on them.

    Returns the folder and its bytes; (None, 0) if there is none. Raises EdgespecError while it is in use.
    """
    folder = forge_root() / target_sha256[:16]
    if not folder.is_dir():
        return None, 0
    with DraftStore(target_name, target_sha256).locked_folder():
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
    return folder, n_bytes


def delete_user_texts(stored: StoredDataset) -> int:
    """Delete the texts that came from the user, and all damaged shards; return how many texts are gone.

    Raises EdgespecError while a draft is made for this target, and where the disk fails; each shard is then
    complete, with or without these texts.
    """
    n_gone = 0
    with DraftStore(stored.target or stored.sha256, stored.sha256).locked_folder():
        try:
            for file in sorted(stored.folder.iterdir()):
                name = SHARD_NAME.fullmatch(file.name)
                own = _user_texts(file) if name and not name["aside"] else None
                if own is not None:
                    n_gone += delete_texts(file, own)
                elif name:
                    file.unlink()
        except OSError as error:
            raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from error
    return n_gone
