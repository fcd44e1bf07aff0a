"""Weights that clients have sent, kept on the node's disk by their hash: they come over the network once.

    FOLDER/0123456789abcdef   a tensor of 64 KB or more, named by the FNV-1a hash of its bytes
    FOLDER/part               one that is being written (csrc/rpc_transport/kept.cpp)
    FOLDER/checked.json       size and time of the files that have been compared with their names
    FOLDER/.lock              held by the node that keeps weights here

When a client names a hash, llama.cpp's server reads the file without a look at what is in it. A damaged one
would make a model say nonsense. So a file gets its name when it is complete, and files are compared with
their names before the server begins, each once.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from filelock import lock_descriptor

from edgespec import _core
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from edgespec.platform.messages import MessageFn, silent

LEAST_FREE = 1 << 30
"""Bytes that must be free on the disk: with less, nothing is kept."""

_CHECKED, _LOCK, _PART = "checked.json", ".lock", "part"
_NAME = re.compile(r"[0-9a-f]{16}")
_PIECE = 16 << 20


@contextmanager
def held(folder: Path, on_message: MessageFn = silent) -> Iterator[bool]:
    """Make the folder, hold it inside the block against other nodes, and yield whether it is held.

    A message says if another node holds it. Raises EdgespecError if the folder cannot be made.
    """
    with _lock_file(folder) as lock:
        reason = _why_not_locked(lock)
        if reason:
            on_message(f"{folder}: {reason}: this one keeps none; --cache DIR names another folder")
        yield not reason


@contextmanager
def refuse_in_use(folder: Path) -> Iterator[None]:
    """Hold the folder inside the block. Raises EdgespecError if a node that runs holds it."""
    with _lock_file(folder) as lock:
        if reason := _why_not_locked(lock):
            raise EdgespecError(f"{folder}: {reason}; end it first")
        yield


def prepare(folder: Path, on_message: MessageFn = silent) -> bool:
    """Delete damaged files from a folder that is held, and return whether weights can be kept there.

    A message says why not, and what was deleted. Raises EdgespecError if the folder cannot be read.
    """
    try:
        (folder / _PART).unlink(missing_ok=True)
        _delete_damaged(folder, on_message)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unusable(folder, error) from error
    if free < LEAST_FREE:
        on_message(f"{folder}: {free >> 20} MiB are free on that disk: weights are not kept")
    return free >= LEAST_FREE


def kept_bytes(folder: Path) -> int:
    """Return the size of all that is kept; 0 if there is no such folder."""
    return sum(file.stat().st_size for file in _files(folder))


def _lock_file(folder: Path) -> IO[str]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return (folder / _LOCK).open("w")
    except OSError as error:
        raise _unusable(folder, error) from error


def _why_not_locked(lock: IO[str]) -> str:
    """Lock the file; return why it cannot be, "" if it is."""
    try:
        if lock_descriptor(lock.fileno(), blocking=False):
            return ""
    except OSError as error:
        return f"cannot be locked ({error.strerror})"
    return "another node keeps weights there"


def _unusable(folder: Path, error: OSError) -> EdgespecError:
    reason = error.strerror or error
    return EdgespecError(f"weights cannot be kept there: {reason}", field="cache", value=folder)


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
