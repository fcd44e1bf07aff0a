"""Files of importance that llama.cpp's imatrix tool writes: GGUF, and the older form (.dat)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import read_gguf
from edgespec.llama.importance import Importance
from edgespec.platform.files import check_file

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_MATRICES, _LONGEST_NAME, _MOST_COLUMNS = 1 << 16, 256, 1 << 28


def read_importance(path: Path) -> Importance:
    """Return the importance that a file holds.

    Raises UsageError if there is no such file, EdgespecError in one line if it is damaged or another thing.
    """
    check_file(path, "imatrix")
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        found = _read_gguf(path) if is_gguf else _read_dat(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", field="imatrix") from error
    except (struct.error, ValueError, UnicodeDecodeError):
        found = {}
    if not found:
        problem = "no importance matrix of llama.cpp, or damaged; make one with its imatrix tool"
        raise EdgespecError(f"{path}: {problem}")
    for name, numbers in found.items():
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise EdgespecError(f"{path}: damaged: {name} holds numbers that are no mean squares")
    return found


def _read_gguf(path: Path) -> Importance:
    """Sums of squares and the rows that they were taken over, for each matrix."""
    gguf = read_gguf(path)
    tensors = {tensor.name: tensor for tensor in gguf.tensors if tensor.kind == 0}

    def numbers(name: str) -> npt.NDArray[np.float32]:
        tensor = tensors[name]
        read = np.fromfile(path, np.float32, tensor.bytes // 4, offset=gguf.data_start + tensor.offset)
        if len(read) < tensor.bytes // 4:
            raise ValueError(name)
        return read.reshape(tensor.rows, -1)

    found = {}
    for name in tensors:
        matrix = name.removesuffix(_SUMS)
        if matrix == name or matrix + _COUNTS not in tensors:
            continue
        sums, counts = numbers(name), numbers(matrix + _COUNTS).reshape(-1, 1)
        if len(sums) != len(counts):
            raise ValueError(name)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), 1)
        found[matrix] = means.astype(np.float32).reshape(-1)
    return found


def _read_dat(data: bytes) -> Importance:
    """The older form: for each matrix its name, the number of passes, and sums of means."""
    (n_matrices,) = struct.unpack_from("<i", data)
    if not 0 < n_matrices <= _MOST_MATRICES:
        raise ValueError(n_matrices)
    found, at = {}, 4
    for _ in range(n_matrices):
        (length,) = struct.unpack_from("<i", data, at)
        if not 0 < length <= _LONGEST_NAME:
            raise ValueError(length)
        name = data[at + 4 : at + 4 + length].decode()
        at += 4 + length
        n_passes, n_columns = struct.unpack_from("<ii", data, at)
        if not 0 < n_columns <= _MOST_COLUMNS or n_passes < 0:
            raise ValueError(n_columns)
        sums = np.frombuffer(data, "<f4", n_columns, at + 8)
        at += 8 + 4 * n_columns
        found[name] = (sums / max(1, n_passes)).astype(np.float32)
    return found
