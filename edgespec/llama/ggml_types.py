"""ggml's element types of tensors: their names, the bytes of a row, and conversion to floats."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from edgespec.errors import UsageError
from edgespec.llama.backend import foreign_function, llama

F32 = 0  # enum ggml_type


class _Traits(ctypes.Structure):  # the start of struct ggml_type_traits
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


_traits = foreign_function("ggml_get_type_traits", ctypes.POINTER(_Traits), ctypes.c_int)


_quantize_chunk = foreign_function(
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    *(ctypes.c_int64,) * 3,
    ctypes.c_void_p,
)


def is_type(kind: int) -> bool:
    """Whether ggml has a type `kind`. Call it first: the others read beyond ggml's table if there is none."""
    return 0 <= kind < llama.GGML_TYPE_COUNT and _traits(kind).contents.size > 0


def type_name(kind: int) -> str:
    """Return a type's name, such as "q4_K"."""
    name: bytes = _traits(kind).contents.name
    return name.decode()


def type_number(name: str) -> int:
    """Return the `enum ggml_type` of a name such as "q4_0". Raises UsageError if there is none."""
    for kind in filter(is_type, range(llama.GGML_TYPE_COUNT)):
        if type_name(kind).lower() == name.lower():
            return kind
    raise UsageError(f"unknown type of tensors {name!r}")


def block_size(kind: int) -> int:
    """Return how many elements are quantized together; a row's length is a multiple of it."""
    return int(_traits(kind).contents.block)


def row_bytes(kind: int, width: int) -> int:
    """Return the bytes of a row of `width` elements."""
    traits = _traits(kind).contents
    return int(width // traits.block * traits.size)


def to_floats(raw: npt.NDArray[np.uint8], kind: int, width: int) -> npt.NDArray[np.float32]:
    """Return rows of bytes, shape (n, row_bytes), as floats, shape (n, width), by ggml's own function."""
    if kind == F32:
        return raw.view(np.float32)
    rows = np.empty((len(raw), width), np.float32)
    _traits(kind).contents.to_float(raw.ctypes.data, rows.ctypes.data, rows.size)
    return rows


def from_floats(rows: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.uint8]:
    """Return rows of floats, shape (n, width), as rows of bytes, by ggml's own quantizer.

    `width` is a multiple of `block_size(kind)`: UsageError otherwise.
    """
    n, width = rows.shape
    if width % block_size(kind):
        raise UsageError(f"rows of {width} elements cannot be of the type {type_name(kind)}")
    floats = np.ascontiguousarray(rows, np.float32)
    raw = np.empty((n, row_bytes(kind, width)), np.uint8)
    _quantize_chunk(kind, floats.ctypes.data, raw.ctypes.data, 0, n, width, None)
    return raw
