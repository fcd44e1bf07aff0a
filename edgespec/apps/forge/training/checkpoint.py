"""Checkpoints of a training, from which it resumes.

    latest.npz     the arrays by name, and "facts" as JSON
    before.npz     the checkpoint before, in case the latest is damaged

A file is complete or missing. It ends with the SHA-256 of the rest, after the zip.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.platform.files import replacing
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError

LATEST, BEFORE = "latest.npz", "before.npz"

_DIGEST = hashlib.sha256().digest_size

Tree = Any


def save(folder: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write `tree` and `facts`, which JSON can hold, as the latest checkpoint of `folder`.

    Raises EdgespecError when they cannot be written; earlier checkpoints stay.
    """
    latest, new = folder / LATEST, folder / "new.npz"
    write_arrays(new, tree, facts)
    try:
        if latest.exists():
            latest.replace(folder / BEFORE)
        new.replace(latest)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def load(folder: Path, like: Tree, *, on_message: MessageFn = silent) -> tuple[Tree, dict[str, Any]] | None:
    """Return the newest intact checkpoint of `folder`, in the structure of `like`; None if there is none."""
    for name in (LATEST, BEFORE):
        path = folder / name
        is_last = name == BEFORE or not (folder / BEFORE).exists()
        try:
            return read_arrays(path, like)
        except FileNotFoundError:
            continue
        except DamagedFileError as error:
            instead = "training begins anew" if is_last else "the one before it is used"
            on_message(f"{path}: damaged ({error}); {instead}")
        except OSError as error:
            raise EdgespecError(f"cannot read the training: {describe_os_error(error)}") from error
    return None


def write_arrays(path: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write arrays and facts as one file, and make its folder. Raises EdgespecError."""
    named: dict[str, Any] = {f"a{name}": np.asarray(leaf) for name, leaf in _named(tree)}
    named["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **named)
            file.flush()
            with Path(file.name).open("rb") as written:
                digest = _digest(written, file.tell())
            file.write(digest)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def read_arrays(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Read what `write_arrays` wrote, in the structure of `like`.

    Raises OSError, DamagedFileError, and EdgespecError for arrays of other names or shapes.
    """
    expected = _named(like)
    with path.open("rb") as file:
        size = file.seek(-_DIGEST, SEEK_END) if path.stat().st_size > _DIGEST else 0
        wanted = file.read()
        file.seek(0)
        if not size or _digest(file, size) != wanted:
            raise DamagedFileError("its checksum is wrong")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    facts = json.loads(arrays["facts"].tobytes())
    shapes = {name: array.shape for name, array in arrays.items() if name != "facts"}
    if shapes != {f"a{name}": np.shape(leaf) for name, leaf in expected}:
        raise EdgespecError(
            f"{path}: of a training with other settings; name another folder, or remove this one"
        )
    leaves = [arrays[f"a{name}"] for name, _ in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), facts


def _digest(file: BinaryIO, n: int) -> bytes:
    """Return the SHA-256 of the next `n` bytes."""
    digest = hashlib.sha256()
    while n > 0 and (data := file.read(min(n, 1 << 20))):
        digest.update(data)
        n -= len(data)
    return digest.digest()


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
