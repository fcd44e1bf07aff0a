"""Weights that clients have sent, kept on the node's disk by their hash: they come over the network once.

    FOLDER/0123456789abcdef   a tensor of more than 10 MB, named by the FNV-1a hash of its bytes
    FOLDER/checked.json       size and time of the files that have been compared with their names

llama.cpp's server writes these files and, when a client names a hash, reads them without a look at what is
in them. A file that was cut short (a full disk, a node that was stopped) would make a model say nonsense. So
they are compared with their names before the server begins, each once.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec

from edgespec import _core
from edgespec.errors import EdgespecError
from edgespec.platform.files import cache_root, write_atomically
from edgespec.platform.messages import MessageFn, silent

LEAST_FREE = 1 << 30
"""Bytes that must be free on the disk: with less, nothing is kept."""

_CHECKED = "checked.json"
_NAME = re.compile(r"[0-9a-f]{16}")
_PIECE = 16 << 20


def default_folder() -> Path:
    """Return where weights are kept if the user names no folder."""
    return cache_root() / "node-weights"


def prepare(folder: Path, on_message: MessageFn = silent) -> bool:
    """Make the folder, delete damaged files, and return whether weights can be kept there.

    A message says why not, and what was deleted. Raises EdgespecError if the folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_damaged(folder, on_message)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        reason = error.strerror or error
        raise EdgespecError(f"weights cannot be kept there: {reason}", field="cache", value=folder) from error
    if free < LEAST_FREE:
        on_message(f"{folder}: {free >> 20} MiB are free on that disk: weights are not kept")
    return free >= LEAST_FREE


def kept_bytes(folder: Path) -> int:
    """Return the size of all that is kept; 0 if there is no such folder."""
    return sum(file.stat().st_size for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if _NAME.fullmatch(file.name)]


def _delete_damaged(folder: Path, on_message: MessageFn) -> None:
    index = folder / _CHECKED
    try:
        before = msgspec.json.decode(index.read_bytes(), type=dict[str, tuple[int, int]])
    except (OSError, msgspec.DecodeError):
        before = {}
    checked = {}
    for file in _files(folder):
        known = file.stat().st_size, file.stat().st_mtime_ns
        if before.get(file.name) == known or _hash(file) == int(file.name, 16):
            checked[file.name] = known
        else:
            file.unlink()
            on_message(f"{file}: damaged, deleted; the weights are sent again when they are needed")
    if checked != before:
        write_atomically(index, msgspec.json.encode(checked))


def _hash(file: Path) -> int:
    value = _core.fnv1a(b"")
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            value = _core.fnv1a(piece, value)
    return value
