"""Importance of a model's weights: the mean square of each column's input over some texts.

Types of about two bits keep the columns that matter most exact (llama.cpp, tools/imatrix: sums of squared
activations of each matrix, for experts of each expert).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.gguf import read_gguf
from edgespec.llama.kv_cache import create_context
from edgespec.llama.quantize import Importance
from edgespec.llama.weights import Model
from edgespec.platform.files import check_file

CHUNK = 512
"""Tokens that are read together, as llama.cpp's tool does."""

_F32, _I32 = 0, 26  # enum ggml_type


class _CTensor(ctypes.Structure):
    """`struct ggml_tensor` of the pinned llama.cpp (csrc/kernels/ggml_abi.h)."""


_CTensor._fields_ = (
    ("type", ctypes.c_int32),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int32),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_CTensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
)

_op_name = foreign_function("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p)
_name = foreign_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)


class _SquareSums:
    """Sums of squares of each matrix, filled while the model reads."""

    def __init__(self) -> None:
        self.squares: dict[str, npt.NDArray[np.float64]] = {}
        self.counts: dict[str, npt.NDArray[np.float64]] = {}
        self.problem: BaseException | None = None

    def look(self, address: int, asks: bool, _data: int) -> bool:
        """If `asks`, return whether an operation is a product with weights; else add its input."""
        try:
            kind = _op_name(address)
            if kind not in (b"MUL_MAT", b"MUL_MAT_ID"):
                return not asks
            node = _CTensor.from_address(address)
            weights = node.src[0].contents
            name = weights.name.decode(errors="replace")
            if not name.endswith(".weight") or _name(ctypes.addressof(weights)) != weights.name:
                return not asks
            if not asks:
                self._add(name, node, weights, routed=kind == b"MUL_MAT_ID")
        except BaseException as error:  # noqa: BLE001 - raised again behind the library's frames
            self.problem = error
            return False
        return True

    def _add(self, name: str, node: _CTensor, weights: _CTensor, *, routed: bool) -> None:
        numbers = _array(node.src[1].contents, _F32)
        n_matrices = int(weights.ne[2]) if routed else 1
        squares = self.squares.setdefault(name, np.zeros((n_matrices, int(weights.ne[0]))))
        counts = self.counts.setdefault(name, np.zeros(n_matrices))
        if not routed:
            rows = numbers.reshape(-1, numbers.shape[-1])
            squares[0] += np.einsum("ij,ij->j", rows, rows)
            counts[0] += len(rows)
            return
        chosen = _array(node.src[2].contents, _I32)[0, 0]  # (tokens, experts of each)
        rows = np.broadcast_to(numbers[0], (*chosen.shape, numbers.shape[-1]))
        for expert in np.unique(chosen):
            of_it = rows[chosen == expert]
            squares[expert] += np.einsum("ij,ij->j", of_it, of_it)
            counts[expert] += len(of_it)

    def importance(self) -> Importance:
        """Return the means; for an expert that no token chose, all columns count alike."""
        return {
            name: np.where(
                self.counts[name][:, None] > 0, squares / np.maximum(self.counts[name][:, None], 1), 1.0
            )
            .astype(np.float32)
            .reshape(-1)
            for name, squares in self.squares.items()
        }


def _array(tensor: _CTensor, kind: int) -> npt.NDArray[Any]:
    """The values of a tensor in this process's memory, without a copy: (ne3, ne2, ne1, ne0)."""
    if tensor.type != kind or not tensor.data:
        raise EdgespecError("a product's activations are not where they were expected")
    number: Any = ctypes.c_float if kind == _F32 else ctypes.c_int32
    end = sum((tensor.ne[i] - 1) * tensor.nb[i] for i in range(4)) + 4
    flat = np.ctypeslib.as_array((number * (end // 4)).from_address(tensor.data))
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)


def measure_importance(
    path: Path,
    texts: Sequence[Sequence[int]],
    *,
    n_threads: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Importance:
    """Return the importance of the columns of all matrices while the model reads `texts`, one after another.

    `texts`: tokens, read in chunks of `CHUNK`; the shorter rest of a text is left out.
    `on_progress` takes the number of tokens read and the total.
    Raises EdgespecError if nothing can be measured.
    """
    tokens = [token for text in texts for token in text]
    n_chunks = len(tokens) // CHUNK
    if not n_chunks:
        raise EdgespecError(f"{len(tokens)} tokens of text are too few to measure by; give {CHUNK} or more")
    sums = _SquareSums()
    look = llama.ggml_backend_sched_eval_callback(sums.look)
    with Model(path) as model:
        context = create_context(
            model,
            n_ctx=CHUNK,
            n_threads=n_threads,
            n_batch=CHUNK,
            n_logits_max=1,
            n_sequences=1,
            on_operation=look,
        )
        try:
            for i in range(n_chunks):
                chunk = (ctypes.c_int32 * CHUNK)(*tokens[i * CHUNK : (i + 1) * CHUNK])
                llama.llama_memory_clear(llama.llama_get_memory(context), True)
                code = llama.llama_decode(context, llama.llama_batch_get_one(chunk, CHUNK))
                if sums.problem:
                    raise sums.problem
                if code:
                    raise EdgespecError(f"{path}: the library cannot read a text: code {code}")
                on_progress((i + 1) * CHUNK, n_chunks * CHUNK)
        finally:
            llama.llama_free(context)
    return sums.importance()


# ---- files that llama.cpp's imatrix tool writes: GGUF, and the older form (.dat) ----

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_MATRICES, _LONGEST_NAME, _MOST_COLUMNS = 1 << 16, 256, 1 << 28


def read_importance(path: Path) -> Importance:
    """Return the importance that a file holds.

    Raises UsageError if there is no such file, EdgespecError in one line if it is damaged or something else.
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
    """Return for each matrix the sums of squares and the number of rows summed."""
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
