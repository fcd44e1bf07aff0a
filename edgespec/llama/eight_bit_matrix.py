"""A matrix beside a model's own, with 8 bits a number: products by edgespec's kernels, or by the C core."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.llama.ggml_types import from_floats, type_number
from edgespec.llama.kernels import Plugin
from edgespec.platform.forks import finalize

_Q8_0 = type_number("q8_0")
_Floats = npt.NDArray[np.float32]


class EightBitMatrix:
    """A matrix of Q8_0 and its products. Two threads must not use it at once.

    Not multiplied by numpy: threads of its library wait busily for 30 ms after each product, on the
    processors that the target's pass needs then.
    """

    def __init__(self, matrix: _Floats, n_threads: int, plugin: Plugin | None) -> None:
        """Quantize `matrix`, (rows, columns); `plugin`: the kernels, where they are used.

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

        Raises ValueError for others.
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
