"""What making drafts left on disk, target by target; and deleting from it what came from the user's texts.

A dataset (dataset.py) has texts as tokens with their hidden states, from which the text can be had back. The
rest of a target's folder are checkpoints of trainings: weights, which hold no text but may know of it.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.forge.dataset import BUILT_IN, forge_root
from edgespec.forge.draft_store import DraftStore
from edgespec.platform.files import replacing

_SHARD = re.compile(r"\d{5}\.npz")
_ASIDE = re.compile(r"\d{5}\.npz\.set-aside")
_Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """What is kept for one target."""

    folder: Path
    target: str
    """Its name; "" if that cannot be read."""
    sha256: str
    """Of its file, or the digits of it that the folder is called by."""
    n_texts: int
    n_own: int
    """Of them, the texts that came from the user's history and files."""
    data_bytes: int
    checkpoint_bytes: int
    damaged: tuple[Path, ...]
    """Files of texts that cannot be read, or were set aside."""


def find_stored(root: Path | None = None) -> list[StoredDataset]:
    """Return what is kept for each target, by name. Raises UsageError where no home directory is known."""
    root = forge_root() if root is None else root
    if not root.is_dir():
        return []
    found = [_look_at(folder) for folder in root.iterdir() if folder.is_dir()]
    return sorted(found, key=lambda kept: (kept.target, kept.sha256))


def _look_at(folder: Path) -> StoredDataset:
    n_texts = n_own = n_bytes = n_other = 0
    damaged = []
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        try:
            size = file.stat().st_size
        except OSError:  # deleted by now
            continue
        if file.parent != folder or not (_SHARD.fullmatch(file.name) or _ASIDE.fullmatch(file.name)):
            n_other += size
            continue
        n_bytes += size
        own = None if _ASIDE.fullmatch(file.name) else _own_texts(file)
        if own is None:
            damaged.append(file)
        else:
            n_texts += len(own)
            n_own += int(own.sum())
    name, sha256 = _target_of(folder)
    return StoredDataset(folder, name, sha256, n_texts, n_own, n_bytes, n_other, tuple(sorted(damaged)))


def _target_of(folder: Path) -> tuple[str, str]:
    try:
        document = json.loads((folder / "dataset.json").read_bytes())
        return str(document["name"]), str(document["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", folder.name


def _own_texts(shard: Path) -> npt.NDArray[np.bool_] | None:
    """Return for each text of a shard whether it came from the user; None if that cannot be read."""
    try:
        with np.load(shard) as arrays:
            return np.asarray(arrays["source"] != BUILT_IN, np.bool_)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


# ---- deleting ----


def delete_user_texts(kept: StoredDataset) -> int:
    """Delete the texts that came from the user, and all damaged files; return how many texts are gone.

    A file of texts is replaced by one without them. Raises EdgespecError while a draft is made for this
    target, and where the disk fails; each file is then as it was, or without them.
    """
    n_gone = 0
    with DraftStore(kept.target or kept.sha256, kept.sha256).opened():
        try:
            for file in sorted(kept.folder.iterdir()):
                if _SHARD.fullmatch(file.name):
                    n_gone += _delete_own(file)
                elif _ASIDE.fullmatch(file.name):
                    file.unlink()
        except OSError as error:
            raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from error
    return n_gone


def _delete_own(shard: Path) -> int:
    own = _own_texts(shard)
    if own is None or own.all():
        shard.unlink()
        return 0 if own is None else len(own)
    if own.any():
        with np.load(shard) as stored:
            rest: Any = _without(dict(stored), own)
        with replacing(shard) as file:
            np.savez(file, **rest)
    return int(own.sum())


def _without(shard: _Arrays, gone: npt.NDArray[np.bool_]) -> _Arrays:
    """Return the arrays of a shard without the texts that are `gone`."""
    kept = ~gone
    rows = shard["length"] - 1 - shard["first"]
    of_text = {"tokens": np.repeat(kept, shard["length"]), "features": np.repeat(kept, rows)}
    return {name: array[of_text.get(name, kept)] for name, array in shard.items()}
