"""The weights that edgespec's kernels take of a model, and their size in memory, from the header alone."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from edgespec.llama.gguf import TensorInfo, row_bytes, type_name
from edgespec.llama.kernel_timing import CMatrixShape, MatrixShape
from edgespec.llama.kernels import plugin_path, word_of


@dataclass(frozen=True, slots=True)
class KernelCoverage:
    """The weights of a model that the kernels take, in bytes of the file."""

    packed: int
    total: int
    """Bytes of all matrices that a pass multiplies with."""
    declined: tuple[str, ...]
    """Types that they do not take, by ggml's names, those with most bytes first."""

    @property
    def share(self) -> float:
        """Bytes that they take, of all."""
        return self.packed / self.total if self.total else 0.0


def multiplied(tensors: Iterable[TensorInfo]) -> list[MatrixShape]:
    """Return the matrices that each pass of a model multiplies with."""
    matrices = [tensor for tensor in tensors if tensor.is_matrix]
    if any(tensor.name == "output.weight" for tensor in matrices):  # else the embeddings are that matrix too
        matrices = [tensor for tensor in matrices if tensor.name != "token_embd.weight"]
    return [MatrixShape(one.kind, one.rows * one.n_matrices, one.columns) for one in matrices]


def kernel_coverage(matrices: Iterable[MatrixShape]) -> KernelCoverage | None:
    """The kernels' share of these matrices; None if they are not installed, or not for this processor."""
    packed_bytes = _asks_plugin()
    if packed_bytes is None:
        return None
    packed = total = 0
    by_type: dict[int, int] = {}
    for shape in matrices:
        n_bytes = row_bytes(shape.type, shape.columns) * shape.rows
        total += n_bytes
        if packed_bytes(shape) >= 0:
            packed += n_bytes
        else:
            by_type[shape.type] = by_type.get(shape.type, 0) + n_bytes
    declined = sorted(by_type, key=lambda kind: -by_type[kind])
    return KernelCoverage(packed, total, tuple(map(type_name, declined)))


def packing_growth(matrices: Iterable[MatrixShape]) -> int:
    """Return how many bytes more these take in memory than in the file, once packed; 0 without the kernels.

    Types below two bits are packed as whole numbers, which take up to twice the bytes of their codes.
    """
    packed_bytes = _asks_plugin()
    if packed_bytes is None or word_of("EDGESPEC_KERNELS") == "off":
        return 0
    more = 0
    for shape in matrices:
        packed = packed_bytes(shape)
        if packed >= 0:
            more += packed - row_bytes(shape.type, shape.columns) * shape.rows
    return max(0, more)


@functools.cache
def _asks_plugin() -> Callable[[MatrixShape], int] | None:
    """The function that tells a matrix's packed bytes, -1 for none; the plugin does not join ggml for it."""
    try:
        library = ctypes.CDLL(str(plugin_path()))
        ask, isa = library.es_kernels_packed_bytes, library.es_kernels_isa
    except (OSError, AttributeError):
        return None
    ask.argtypes, ask.restype = (ctypes.POINTER(CMatrixShape),), ctypes.c_int64
    isa.restype = ctypes.c_char_p
    return (lambda shape: int(ask(CMatrixShape(*shape)))) if isa() else None
