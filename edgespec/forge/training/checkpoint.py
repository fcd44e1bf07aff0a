"""What a training needs to go on: kept every few minutes, so that nothing ends it for good.

    latest.npz     the arrays by name, and "facts" as JSON
    before.npz     the one before it, for when that is damaged

Files are written whole or not at all, and checked by the zip format's checksums when they are read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.platform.files import replacing
from edgespec.platform.messages import MessageFn, silent

LATEST, BEFORE = "latest.npz", "before.npz"

_OTHER = "{}: of a training with other settings; name another folder, or remove this one"

Tree = Any
"""Arrays in any nesting that JAX knows."""


class DamagedError(Exception):
    """A checkpoint cannot be used; `str(error)` says why."""


def save(folder: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Keep `tree` and `facts`, which JSON can hold, as the latest checkpoint of `folder`.

    Raises EdgespecError when they cannot be written; the checkpoints that are there stay.
    """
    latest = folder / LATEST
    new = folder / "new.npz"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_arrays(new, tree, facts)
        if latest.exists():
            latest.replace(folder / BEFORE)
        new.replace(latest)
    except OSError as error:
        raise EdgespecError(f"cannot keep the training: {describe_os_error(error)}") from error


def load(folder: Path, like: Tree, *, on_message: MessageFn = silent) -> tuple[Tree, dict[str, Any]] | None:
    """Return the newest sound checkpoint of `folder`, in the nesting of `like`; None if there is none.

    A damaged one is said in a line.
    """
    for name in (LATEST, BEFORE):
        path = folder / name
        is_last = name == BEFORE or not (folder / BEFORE).exists()
        try:
            return read_arrays(path, like)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            instead = "training begins anew" if is_last else "the one before it is used"
            on_message(f"{path}: damaged ({error}); {instead}")
        except OSError as error:
            raise EdgespecError(f"cannot read the training: {describe_os_error(error)}") from error
    return None


def write_arrays(path: Path, tree: Tree, facts: Mapping[str, Any]) -> None:
    """Write arrays and facts as one file, whole or not at all. Raises OSError."""
    named: dict[str, Any] = {f"a{name}": np.asarray(leaf) for name, leaf in _named(tree)}
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **named)


def read_arrays(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Return what `write_arrays` wrote, in the nesting of `like`.

    Raises OSError, DamagedError, and EdgespecError for arrays of other names or shapes than those of `like`.
    """
    leaves = []
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts = json.loads(stored["facts"].tobytes())
            expected = _named(like)
            if {"facts", *(f"a{name}" for name, _ in expected)} != set(stored.files):
                raise EdgespecError(_OTHER.format(path))
            for name, leaf in expected:
                array = stored[f"a{name}"]
                if array.shape != np.shape(leaf):
                    raise EdgespecError(_OTHER.format(path))
                leaves.append(array)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise DamagedError(" ".join(str(error).split()) or type(error).__name__) from None
    return jax.tree.unflatten(jax.tree.structure(like), leaves), facts


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
