"""Time the kernels alone, over weights in memory, and the hardware's limits: reading, arithmetic.

`WeightStream` is the plugin's C interface for this (csrc/kernels/timing.cpp). ggml is not loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgespec.errors import EdgespecError
from edgespec.platform.closing import Closing
from edgespec.platform.machine import cache_bytes


class CPrefetch(ctypes.Structure):
    """`struct es_prefetch`."""

    _fields_ = (("level", ctypes.c_int32), ("bytes", ctypes.c_int64))


class Prefetch(msgspec.Struct, frozen=True):
    """How weights are prefetched; results do not depend on it."""

    level: int = 2
    """Cache level to prefetch into: 1, past the others, or 2."""
    bytes: int = 8192
    """How far ahead."""

    def for_c(self) -> CPrefetch:
        """Return the plugin's C struct."""
        return CPrefetch(self.level, self.bytes)


class MatrixShape(NamedTuple):
    """A matrix of weights to be timed: ggml's type, rows, columns."""

    type: int
    """ggml's number."""
    rows: int
    columns: int


class CMatrixShape(ctypes.Structure):
    """`struct es_shape`."""

    _fields_ = (("type", ctypes.c_int32), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64))


def beyond_caches() -> int:
    """Return a stream size at which no cache still holds any of the stream on the next round.

    Four times their size is too little: prefetching into level 2 then seems up to 10 % faster than with
    a model, because the last level still holds some of it on the next round. For a server's cache, which
    others fill too, twice the size is enough.
    """
    cache = cache_bytes()
    return max(128 << 20, min(16 * cache, max(1 << 30, 2 * cache)))


class WeightStream(Closing):
    """Memory full of weights; each timing continues where the last one ended. Close it, or use `with`."""

    def __init__(self, plugin: Path, isa: str, size: int) -> None:
        """Fill `size` bytes, much more than caches hold, for the kernels of `isa` in the library `plugin`.

        Raises EdgespecError if that library has no such kernels, or there is not enough memory.
        """
        pointer, double, int64, size_t = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64, ctypes.c_size_t
        try:
            library = ctypes.CDLL(str(plugin))
            set_isa, new = library.es_kernels_set_isa, library.es_kernels_stream_new
            self._free = library.es_kernels_stream_free
            self._products, self._read = library.es_kernels_time_products, library.es_kernels_time_read
            self._packed_bytes, self._peak = library.es_kernels_packed_bytes, library.es_kernels_peak
        except (OSError, AttributeError) as error:
            raise EdgespecError(f"{error}; install edgespec again") from error
        set_isa.argtypes = (ctypes.c_char_p,)
        new.argtypes, new.restype = (size_t,), pointer
        self._free.argtypes, self._free.restype = (pointer,), None
        self._products.argtypes = (
            pointer,
            ctypes.POINTER(CMatrixShape),
            int64,
            int64,
            CPrefetch,
            ctypes.c_int,
        )
        self._read.argtypes = (pointer, size_t, CPrefetch, ctypes.c_int)
        self._peak.argtypes = (int64, ctypes.c_int)
        self._products.restype = self._read.restype = self._peak.restype = double
        self._packed_bytes.argtypes, self._packed_bytes.restype = (ctypes.POINTER(CMatrixShape),), int64
        if set_isa(isa.encode()):
            raise EdgespecError(f"{plugin} has no kernels for {isa} on this processor")
        self._stream = new(size)
        if not self._stream:
            raise EdgespecError(f"no memory for {size >> 20} MiB of weights")

    def products(self, shapes: Sequence[MatrixShape], n: int, prefetch: Prefetch, n_threads: int) -> float:
        """Return the seconds of multiplying `n` tokens with matrices of `shapes`, one after another.

        Raises ValueError if one of them cannot be packed, or is larger than the stream.
        """
        packed = (CMatrixShape * len(shapes))(*(CMatrixShape(*shape) for shape in shapes))
        return _valid(
            self._products(self._stream, packed, len(shapes), n, prefetch.for_c(), n_threads), shapes
        )

    def read(self, size: int, prefetch: Prefetch, n_threads: int) -> float:
        """Return the seconds of reading `size` bytes, a multiple of 128 KiB."""
        return _valid(self._read(self._stream, size, prefetch.for_c(), n_threads), size)

    def packed_bytes(self, shape: MatrixShape) -> int:
        """Return the bytes of a packed matrix. Raises ValueError if it cannot be packed."""
        return int(_valid(self._packed_bytes(CMatrixShape(*shape)), shape))

    def peak(self, rounds: int, n_threads: int) -> float:
        """Return the multiply-adds per second of the instruction set's dot product, from registers."""
        return _valid(self._peak(rounds, n_threads), rounds)

    def close(self) -> None:
        """Free the memory of the weights."""
        self._free(self._stream)
        self._stream = None


def _valid(value: float, asked: object) -> float:
    if value < 0:
        raise ValueError(f"the kernels cannot time {asked}")
    return value
