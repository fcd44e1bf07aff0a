"""Matrices of draft heads that edgespec itself reads and multiplies: mapped from a file, and of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.errors import EdgespecError
from edgespec.llama.gguf import from_floats, read_gguf, row_bytes, to_floats, type_number
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.kernels import Plugin
from edgespec.platform.processes import finalize

EMBEDDINGS = "token_embd.weight"
_Q8_0 = type_number("q8_0")
_Floats = npt.NDArray[np.float32]


class MappedMatrix:
    """A matrix in a model's file, whose rows are read as floats.

    It is mapped, so that only the pages of used rows are in memory.
    """

    def __init__(self, header: GGUFHeader, name: str) -> None:
        """Map the tensor of that name. Raises EdgespecError if the file has none."""
        for path in (header.path, *header.other_parts):
            gguf = header.gguf if path == header.path else read_gguf(path)
            for tensor in gguf.tensors:
                if tensor.name == name:
                    size = row_bytes(tensor.kind, tensor.columns)
                    start = gguf.data_start + tensor.offset
                    self._rows = np.memmap(path, np.uint8, "r", start, (tensor.rows, size))
                    self._kind, self.n_embd = tensor.kind, tensor.columns
                    return
        raise EdgespecError(f"{header.path}: no {name} in it; a head cannot draft for it")

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the rows of `tokens`, shape (len(tokens), n_embd)."""
        return to_floats(self._rows[np.asarray(tokens, np.int64)], self._kind, self.n_embd)


class EightBitMatrix:
    """A matrix of Q8_0 and its products. Two threads must not use it at once.

    numpy does not multiply them: its library's threads spin for 30 ms after each product, on processors that
    the target's pass then needs.
    """

    def __init__(self, matrix: _Floats, n_threads: int, plugin: Plugin | None) -> None:
        """Quantize `matrix`, (rows, columns); `plugin`: the kernels, if they are used.

        Raises MemoryError.
        """
        rows = from_floats(np.ascontiguousarray(matrix), _Q8_0)
        self._rows = None if plugin else rows
        self._n_threads = n_threads
        if plugin:
            make, self._multiply, free = plugin.matrices()
            self._address = make(_Q8_0, *matrix.shape, rows.ctypes.data, rows.nbytes)
            if not self._address:
                raise MemoryError(f"no memory for a matrix of {matrix.shape}")
            finalize(self, free, self._address)

    def multiply(self, vectors: _Floats, out: _Floats) -> None:
        """Write the products with `vectors`, (n, columns), into `out`, (n, rows), both contiguous.

        Raises ValueError for other shapes.
        """
        if self._rows is not None:
            _core.multiply(self._rows, vectors, out)
            return
        if not (
            vectors.flags.c_contiguous and out.flags.c_contiguous and out.dtype == vectors.dtype == np.float32
        ):
            raise ValueError("vectors and products must be contiguous float32")
        sizes = vectors.ctypes.data, vectors.size, out.ctypes.data, out.size
        if self._multiply(self._address, len(vectors), *sizes, self._n_threads) != 0:
            raise ValueError(f"vectors of shape {vectors.shape}, products of {out.shape}: not of this matrix")
