"""Read the metadata of GGUF files: fields (keys with values) and tensors, and their positions.

    file     = "GGUF", version, number of tensors, number of fields, fields, tensor infos, padding, data
    field    = key, type, value
    text     = length, bytes                 array = type of the elements, their number, the elements

All numbers are little-endian, lengths have 8 bytes. The file is not trusted: whatever its bytes, the result
is a `GGUF` with all offsets inside the metadata, or one line that says what is wrong. llama.cpp's own parser
checks the file later, when the model is loaded; it takes twice as long, and does not report where a field is
or what follows a zero byte in a text.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import foreign_function, llama
from edgespec.platform.files import why_no_file

# ---- ggml's element types of tensors: their names, the bytes of a row, and conversion to floats ----


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
    """Whether ggml has a type `kind`. Check it first: others read beyond ggml's table for unknown types."""
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
    """Return rows of floats, shape (n, width), as bytes, shape (n, row_bytes), by ggml's own quantizer.

    `width` is a multiple of `block_size(kind)`: UsageError otherwise.
    """
    n, width = rows.shape
    if width % block_size(kind):
        raise UsageError(f"rows of {width} elements cannot be of the type {type_name(kind)}")
    floats = np.ascontiguousarray(rows, np.float32)
    raw = np.empty((n, row_bytes(kind, width)), np.uint8)
    _quantize_chunk(kind, floats.ctypes.data, raw.ctypes.data, 0, n, width, None)
    return raw


# ---- reading ----


UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10  # enum gguf_type
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of numbers, each with its code in `struct` and numpy."""

TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"

ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
"""Default alignment of the tensors' data, in bytes."""

HEAD = struct.Struct("<4sIQQ")
"""A file's first bytes: magic, version, number of tensors, number of fields."""
WORD, LONG = struct.Struct("<I"), struct.Struct("<Q")
_VERSIONS = (2, 3)
_MOST_DIMENSIONS, _LONGEST_NAME = 4, 63  # of a tensor, in ggml


class Field(msgspec.Struct, frozen=True):
    """One key and its value; offsets are in bytes from the file's start."""

    key: str
    kind: int
    """`enum gguf_type` of the value, or of an array's elements."""
    value: int | float | str | None
    """A number, or a text with invalid UTF-8 replaced; None for an array."""
    n: int
    """Number of an array's elements, else 1."""
    start: int
    """Offset of the key's length, where the field begins."""
    elements: int
    """Offset of the value, or of an array's first element."""
    end: int

    @property
    def is_array(self) -> bool:
        """Whether the value is an array."""
        return self.value is None


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor's name, shape and type, and where its numbers are."""

    name: str
    shape: tuple[int, ...]
    """In ggml's order: the elements of a row first."""
    kind: int
    """`enum ggml_type`."""
    offset: int
    """Bytes from the start of the data."""

    @property
    def type(self) -> str:
        """The type as ggml names it, such as "q4_K"."""
        return type_name(self.kind)

    @property
    def columns(self) -> int:
        """Elements of a row, the first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows of a matrix, the second dimension; 1 for a vector."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def n_matrices(self) -> int:
        """Number of matrices: more than 1 if the tensor holds the experts of a layer."""
        return math.prod(self.shape[2:])

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return row_bytes(self.kind, self.columns) * math.prod(self.shape[1:])

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix: norms and biases are vectors."""
        return self.rows > 1


class GGUF(msgspec.Struct, frozen=True):
    """The metadata of one file. Arrays are read only on request: a token list has megabytes.

    If a field's type is not the one asked for, the file is damaged and an EdgespecError is raised.
    """

    path: Path
    fields: Mapping[str, Field]
    """The fields by key, in the order of the file."""
    tensors: tuple[TensorInfo, ...]
    data_start: int
    """Where the tensors' data begins."""
    n_bytes: int
    """Size of the file."""

    @property
    def expected_bytes(self) -> int:
        """Least size of the complete file: the end of its last tensor."""
        return self.data_start + max((tensor.offset + tensor.bytes for tensor in self.tensors), default=0)

    def text(self, key: str) -> str:
        """Return a text; "" if there is no such field."""
        field = self.fields.get(key)
        if field is None:
            return ""
        if not isinstance(field.value, str):
            raise self._wrong_type(key)
        return field.value

    def number(self, key: str) -> int | float:
        """Return a number. Raises KeyError if there is no such field."""
        value = self.fields[key].value
        if value is None or isinstance(value, str):
            raise self._wrong_type(key)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or an array of integers as a tuple; () if there is no such field."""
        field = self.fields.get(key)
        if field is None:
            return ()
        if field.kind not in NUMBERS or NUMBERS[field.kind] in "fd":
            raise self._wrong_type(key)
        if isinstance(field.value, (int, float)):
            return (int(field.value),)
        return tuple(map(int, self.numbers(key)))

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """Return an array of numbers, shape (n,), in its own type; empty if there is no such field."""
        field = self.fields.get(key)
        if field is None:
            return np.empty(0, np.int32)
        if not field.is_array or field.kind not in NUMBERS:
            raise self._wrong_type(key)
        return np.frombuffer(self._read(field.elements, field.end), "<" + NUMBERS[field.kind])

    def n_texts(self, key: str) -> int:
        """Return the length of an array of texts; 0 if there is no such field."""
        field = self.fields.get(key)
        if field is None:
            return 0
        if not field.is_array or field.kind != STRING:
            raise self._wrong_type(key)
        return field.n

    def raw_texts(self, key: str) -> bytes:
        """Return the raw bytes of an array of texts: each text after its length."""
        return self._read(self.fields[key].elements, self.fields[key].end) if self.n_texts(key) else b""

    def texts(self, key: str) -> list[bytes]:
        """Return the elements of an array of texts; [] if there is no such field."""
        return split_texts(self.raw_texts(key), self.n_texts(key))

    def raw(self, field: Field) -> bytes:
        """Return the raw bytes of a whole field."""
        return self._read(field.start, field.end)

    def _read(self, start: int, end: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        if len(data) < end - start:
            raise EdgespecError(f"{self.path}: became shorter while it was read")
        return data

    def _wrong_type(self, key: str) -> EdgespecError:
        return EdgespecError(f"{self.path}: damaged: '{key}' has the wrong type; download the file again")


def skip_texts(data: bytes | mmap.mmap, at: int, n: int) -> int:
    """Return the offset after the `n` texts that begin at `at`. Raises struct.error if `data` ends before."""
    unpack, width = LONG.unpack_from, LONG.size
    for _ in range(n):
        at += width + unpack(data, at)[0]
    return at


def split_texts(data: bytes, n: int) -> list[bytes]:
    """Return the first `n` texts in `data`, where each follows its length."""
    found, at, unpack, width = [], 0, LONG.unpack_from, LONG.size
    for _ in range(n):
        end = at + width + unpack(data, at)[0]
        found.append(data[at + width : end])
        at = end
    return found


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the first multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


# --- Reading ------------------------------------------------------------------------------------


class _DamagedError(Exception):
    """The metadata is no valid GGUF; `str(error)` says why."""


def read_gguf(path: Path) -> GGUF:
    """Read the metadata of the GGUF file `path`.

    Raises UsageError if the file is missing or unreadable, EdgespecError if it is no GGUF of a known version
    or its metadata is damaged or incomplete.
    """
    _check_magic(path, _first_bytes(path))
    n_bytes = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (_DamagedError, struct.error, OverflowError) as error:
        # An offset beyond the file's end, or too large for an integer: a length is wrong.
        reason = str(error) if isinstance(error, _DamagedError) else "it ends within its metadata"
        raise EdgespecError(
            f"{path}: damaged or incomplete ({n_bytes:,} bytes): {reason}; download it again"
        ) from None


def _first_bytes(path: Path) -> bytes:
    if why := why_no_file(path):
        raise UsageError(f"{path}: {why}{'; name the .gguf file in it' if path.is_dir() else ''}")
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _check_magic(path: Path, start: bytes) -> None:
    if not start:
        raise EdgespecError(f"{path}: an empty file; download it again")
    if start[:4] != b"GGUF":
        raise EdgespecError(f"{path}: not a GGUF model but {describe_file(start)}")
    little, big = (int.from_bytes(start[4:8], order) for order in ("little", "big"))
    if len(start) >= 8 and little not in _VERSIONS:
        if big in _VERSIONS:
            raise EdgespecError(f"{path}: a big-endian GGUF; download the little-endian version")
        raise EdgespecError(
            f"{path}: GGUF version {little} is not supported (only 2 and 3); "
            "download a current version of the model"
        )


def _parse(path: Path, data: mmap.mmap) -> GGUF:
    _, _, n_tensors, n_fields = HEAD.unpack_from(data)
    fields: dict[str, Field] = {}
    at = HEAD.size
    for _ in range(n_fields):
        field = _read_field(data, at)
        if not field.key or field.key in fields:
            raise _DamagedError(f"the key {field.key[:64]!r} is there twice or has no name")
        fields[field.key] = field
        at = field.end
    alignment = _alignment(fields)
    if alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"{ALIGNMENT_KEY} is no power of 2")
    tensors, at = _read_tensor_infos(data, at, n_tensors, alignment)
    return GGUF(path, fields, tensors, aligned(at, alignment), len(data))


def _alignment(fields: Mapping[str, Field]) -> int:
    field = fields.get(ALIGNMENT_KEY)
    return field.value if field and isinstance(field.value, int) else ALIGNMENT


def _read_text(data: mmap.mmap, at: int) -> tuple[str, int]:
    end = at + LONG.size + LONG.unpack_from(data, at)[0]
    if end > len(data):
        raise _DamagedError("it ends within a text")
    return data[at + LONG.size : end].decode(errors="replace"), end


def _read_field(data: mmap.mmap, start: int) -> Field:
    key, at = _read_text(data, start)
    kind, at = WORD.unpack_from(data, at)[0], at + WORD.size
    if kind == STRING:
        text, end = _read_text(data, at)
        return Field(key, kind, text, 1, start, at, end)
    if kind in NUMBERS:
        number = struct.Struct("<" + NUMBERS[kind])
        return Field(key, kind, number.unpack_from(data, at)[0], 1, start, at, at + number.size)
    if kind != ARRAY:
        raise _DamagedError(f"{key[:64]!r} has the unknown type {kind}")
    kind, n = struct.unpack_from("<IQ", data, at)
    at += WORD.size + LONG.size
    if kind == STRING:
        end = skip_texts(data, at, n)
    elif kind in NUMBERS:
        end = at + n * struct.calcsize("<" + NUMBERS[kind])
    else:
        raise _DamagedError(f"{key[:64]!r} is an array of the unknown type {kind}")
    if end > len(data):
        raise _DamagedError(f"it ends within {key[:64]!r}")
    return Field(key, kind, None, n, start, at, end)


def _read_tensor_infos(
    data: mmap.mmap, at: int, n_tensors: int, alignment: int
) -> tuple[tuple[TensorInfo, ...], int]:
    """Return the tensor infos, which begin at `at`, and where they end."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for _ in range(n_tensors):
        name, at = _read_text(data, at)
        n_dimensions, at = WORD.unpack_from(data, at)[0], at + WORD.size
        if len(name.encode()) > _LONGEST_NAME or name in infos or n_dimensions > _MOST_DIMENSIONS:
            raise _DamagedError(f"the tensor {name[:_LONGEST_NAME]!r} is not as it should be")
        layout = struct.Struct(f"<{n_dimensions}QIQ")
        *shape, kind, start = layout.unpack_from(data, at)
        at += layout.size
        info = TensorInfo(name, tuple(shape), kind, start)
        if not is_type(kind) or info.columns % block_size(kind):
            raise _DamagedError(f"the tensor {name!r} has the unknown type {kind}, or no whole rows of it")
        if start != offset:
            raise _DamagedError(f"the tensor {name!r} begins at {start}, not at {offset}")
        infos[name] = info
        offset = aligned(start + info.bytes, alignment)
    return tuple(infos.values()), at


# ---- files that are given as a GGUF by mistake ----

_OLD_GGML = (
    "a Whisper model of whisper.cpp (`edgespec quantize FILE --type q8_0` makes a GGUF of it, for "
    "`edgespec transcribe`), or a GGML file of 2023; download a language model as GGUF"
)
_MAGICS = (
    (b"version https://git-lfs", "a git-lfs pointer; fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x80\x02", "a Python pickle (a PyTorch checkpoint?); convert the model to GGUF first"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    *((magic, _OLD_GGML) for magic in (b"ggjt", b"tjgg", b"lmgg", b"fmgg")),
)


def describe_file(start: bytes) -> str:
    """Return the likely kind of a file that begins with `start` and, if possible, what to do."""
    for magic, description in _MAGICS:
        if start.startswith(magic):
            return description
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 30:
        return "a safetensors file; convert the model to GGUF first"
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (a download that needs a login, or the wrong link); download the file itself"
    if not any(start):
        return "zeros (an interrupted download); download it again"
    if all(byte >= 32 or byte in b"\t\r\n\f" for byte in start):
        return "a text file"
    return "an unknown kind of file"


# ---- writing ----

_VERSION = 3


def encode_text(key: str, value: str) -> bytes:
    """Return a field whose value is a text."""
    return _text(key.encode()) + WORD.pack(STRING) + _text(value.encode())


def encode_number(key: str, kind: int, value: float) -> bytes:
    """Return a field whose value is a number of the type `kind`."""
    return _text(key.encode()) + WORD.pack(kind) + struct.pack("<" + NUMBERS[kind], value)


def encode_numbers(key: str, kind: int, values: npt.NDArray[Any]) -> bytes:
    """Return a field whose value is an array of numbers of the type `kind`."""
    elements = values.astype(np.dtype(NUMBERS[kind]).newbyteorder("<")).tobytes()
    return _text(key.encode()) + struct.pack("<IIQ", ARRAY, kind, len(values)) + elements


def encode_texts(key: str, values: Sequence[bytes]) -> bytes:
    """Return a field whose value is an array of texts."""
    head = _text(key.encode()) + struct.pack("<IIQ", ARRAY, STRING, len(values))
    return head + b"".join(map(_text, values))


def encode_start(
    fields: Sequence[bytes], tensors: Iterable[tuple[str, tuple[int, ...], int]]
) -> tuple[list[TensorInfo], bytes]:
    """Return a file's tensors with their places, and what comes before their data.

    `tensors`: name, shape and type of each. The data of each is padded to a multiple of ALIGNMENT.
    """
    infos: list[TensorInfo] = []
    offset = 0
    for tensor in tensors:
        infos.append(TensorInfo(*tensor, offset))
        offset = aligned(offset + infos[-1].bytes)
    start = HEAD.pack(b"GGUF", _VERSION, len(infos), len(fields)) + b"".join(fields)
    for info in infos:
        n = len(info.shape)
        described = struct.pack(f"<I{n}QIQ", n, *info.shape, info.kind, info.offset)
        start += _text(info.name.encode()) + described
    return infos, padded(start)


def padded(data: bytes) -> bytes:
    """Return `data`, filled up to a multiple of ALIGNMENT."""
    return data.ljust(aligned(len(data)), b"\0")


def _text(value: bytes) -> bytes:
    return LONG.pack(len(value)) + value
