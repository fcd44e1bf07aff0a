"""What making drafts left on disk, target by target; and deleting from it what came from the user's texts.

A dataset (dataset.py) has texts as tokens with their hidden states, from which the text can be had back. The
rest of a target's folder are checkpoints of trainings: weights, which hold no text but may know of it.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.forge.dataset import BUILT_IN, forge_root
from edgespec.platform.files import replacing

_SHARD = re.compile(r"\d{5}\.npz")
_ASIDE = re.compile(r"\d{5}\.npz\.set-aside")
_Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class KeptData:
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


def find_kept(root: Path | None = None) -> list[KeptData]:
    """Return what is kept for each target, by name. Raises UsageError where no home directory is known."""
    root = forge_root() if root is None else root
    if not root.is_dir():
        return []
    found = [_look_at(folder) for folder in root.iterdir() if folder.is_dir()]
    return sorted(found, key=lambda kept: (kept.target, kept.sha256))


def _look_at(folder: Path) -> KeptData:
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
    return KeptData(folder, name, sha256, n_texts, n_own, n_bytes, n_other, tuple(sorted(damaged)))


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


def delete_own(kept: KeptData) -> int:
    """Delete the texts that came from the user, and all damaged files; return how many texts are gone.

    A shard is replaced by one without these texts. Raises EdgespecError if another process writes there, and
    where the disk fails; each shard is then as it was, or without them.
    """
    n_gone = 0
    with _locked(kept.folder):
        for shard in sorted(kept.folder.iterdir()):
            if _ASIDE.fullmatch(shard.name):
                shard.unlink()
            if not _SHARD.fullmatch(shard.name):
                continue
            own = _own_texts(shard)
            if own is None or own.all():
                shard.unlink()
                n_gone += 0 if own is None else len(own)
            elif own.any():
                with np.load(shard) as stored:
                    rest: Any = _without(dict(stored), own)
                with replacing(shard) as file:
                    np.savez(file, **rest)
                n_gone += int(own.sum())
    return n_gone


def delete_all(kept: KeptData) -> None:
    """Delete a target's texts and checkpoints. Raises EdgespecError as `delete_own`."""
    with _locked(kept.folder):
        shutil.rmtree(kept.folder)


def _without(shard: _Arrays, gone: npt.NDArray[np.bool_]) -> _Arrays:
    """Return the arrays of a shard without the texts that are `gone`."""
    kept = ~gone
    rows = shard["length"] - 1 - shard["first"]
    of_text = {"tokens": np.repeat(kept, shard["length"]), "features": np.repeat(kept, rows)}
    return {name: array[of_text.get(name, kept)] for name, array in shard.items()}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a dataset's writer."""
    try:
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EdgespecError(
                    f"{folder}: another process writes there, so nothing of it was deleted; end `edgespec "
                    "draft make` first, then say it again"
                ) from None
            yield
    except OSError as error:
        raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from error
