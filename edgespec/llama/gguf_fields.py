"""The metadata of a GGUF file as it lies there, to write another file that differs in some of it.

    file     = "GGUF", version, number of tensors, number of fields, fields, tensor infos, padding, data
    field    = key, type, value
    text     = length, bytes                 array = type of the elements, their number, the elements

All numbers little-endian, lengths 8 bytes. ggml's own parser has accepted the file before (`read_header`),
so nothing is checked again here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10  # enum gguf_type

ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
"""Of the tensors' data, in bytes, where the file does not say."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_WORD, _LONG = struct.Struct("<I"), struct.Struct("<Q")
_HEAD = struct.Struct("<4sIQQ")
_VERSION = 3

Data = bytes | mmap


@dataclass(frozen=True, slots=True)
class Field:
    """One key and its value."""

    data: Data
    key: str
    kind: int
    """Of the value; of an array, that of its elements."""
    is_array: bool
    start: int
    """Where the key's length lies, bytes from the file's start."""
    value: int
    """Where the value starts; of an array, its first element."""
    n: int
    """Elements; 1 for what is no array."""
    end: int

    @property
    def raw(self) -> bytes:
        """The whole field as it lies in the file."""
        return self.data[self.start : self.end]

    @property
    def number(self) -> int | float:
        """The value, which must be a number."""
        found: int | float = struct.unpack_from("<" + _NUMBERS[self.kind], self.data, self.value)[0]
        return found

    @property
    def text(self) -> str:
        """The value, which must be a text; what is no UTF-8 in it is replaced."""
        return self.texts()[0].decode(errors="replace")

    def numbers(self) -> npt.NDArray[Any]:
        """Return a copy of the elements, which must be numbers."""
        kind = np.dtype(_NUMBERS[self.kind]).newbyteorder("<")
        return np.frombuffer(self.data[self.value : self.value + self.n * kind.itemsize], kind)

    def texts(self) -> list[bytes]:
        """Return the elements, which must be texts."""
        found, at, data, length, width = [], self.value, self.data, _LONG.unpack_from, _LONG.size
        for _ in range(self.n):
            end = at + width + length(data, at)[0]
            found.append(data[at + width : end])
            at = end
        return found


def read_fields(data: Data) -> Iterator[Field]:
    """Yield the fields of a file in their order; those after the last one asked for are not read."""
    at = _HEAD.size
    for _ in range(_HEAD.unpack_from(data)[3]):
        field = _read_field(data, at)
        yield field
        at = field.end


def _read_field(data: Data, start: int) -> Field:
    value = _skip_text(data, start)
    key = data[start + _LONG.size : value].decode(errors="replace")
    kind = _WORD.unpack_from(data, value)[0]
    value, n = value + _WORD.size, 1
    is_array = kind == ARRAY
    if is_array:
        kind, n = _WORD.unpack_from(data, value)[0], _LONG.unpack_from(data, value + _WORD.size)[0]
        value += _WORD.size + _LONG.size
    end = value
    if kind == STRING:
        for _ in range(n):
            end = _skip_text(data, end)
    else:
        end += n * struct.calcsize("<" + _NUMBERS[kind])
    return Field(data, key, kind, is_array, start, value, n, end)


def _skip_text(data: Data, at: int) -> int:
    length: int = _LONG.unpack_from(data, at)[0]
    return at + _LONG.size + length


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor's numbers are."""

    name: str
    shape: tuple[int, ...]
    """As ggml counts: the elements of a row first."""
    kind: int
    """`enum ggml_type`."""
    offset: int
    """From the start of the data."""


def read_tensor_infos(data: Data, start: int) -> tuple[list[TensorInfo], int]:
    """Return the tensors' infos, which begin where the last field ends, and where they end."""
    infos, at = [], start
    for _ in range(_HEAD.unpack_from(data)[2]):
        end = _skip_text(data, at)
        name = data[at + _LONG.size : end].decode(errors="replace")
        n = _WORD.unpack_from(data, end)[0]
        *shape, kind, offset = struct.unpack_from(f"<{n}QIQ", data, end + _WORD.size)
        infos.append(TensorInfo(name, tuple(shape), kind, offset))
        at = end + _WORD.size + struct.calcsize(f"<{n}QIQ")
    return infos, at


# --- Writing ------------------------------------------------------------------------------------


def encode_head(n_tensors: int, n_fields: int) -> bytes:
    """Return a file's first bytes."""
    return _HEAD.pack(b"GGUF", _VERSION, n_tensors, n_fields)


def encode_text(key: str, value: str) -> bytes:
    """Return a field whose value is a text."""
    return _text(key.encode()) + _WORD.pack(STRING) + _text(value.encode())


def encode_number(key: str, kind: int, value: float) -> bytes:
    """Return a field whose value is a number of the type `kind`."""
    return _text(key.encode()) + _WORD.pack(kind) + struct.pack("<" + _NUMBERS[kind], value)


def encode_numbers(key: str, kind: int, values: npt.NDArray[Any]) -> bytes:
    """Return a field whose value is an array of numbers of the type `kind`."""
    elements = values.astype(np.dtype(_NUMBERS[kind]).newbyteorder("<")).tobytes()
    return _text(key.encode()) + struct.pack("<IIQ", ARRAY, kind, len(values)) + elements


def encode_texts(key: str, values: Sequence[bytes]) -> bytes:
    """Return a field whose value is an array of texts."""
    head = _text(key.encode()) + struct.pack("<IIQ", ARRAY, STRING, len(values))
    return head + b"".join(map(_text, values))


def encode_tensor_info(info: TensorInfo) -> bytes:
    """Return an info as it lies in a file."""
    n = len(info.shape)
    return _text(info.name.encode()) + struct.pack(f"<I{n}QIQ", n, *info.shape, info.kind, info.offset)


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


def _text(value: bytes) -> bytes:
    return _LONG.pack(len(value)) + value
