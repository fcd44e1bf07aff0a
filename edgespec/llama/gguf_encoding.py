"""Encode the fields and tensor infos of a GGUF file (gguf.py shows the format)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.llama.gguf import ARRAY, HEAD, LONG, NUMBERS, STRING, WORD, TensorInfo

_VERSION = 3


def encode_head(n_tensors: int, n_fields: int) -> bytes:
    """Return a file's first bytes."""
    return HEAD.pack(b"GGUF", _VERSION, n_tensors, n_fields)


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


def encode_tensor_info(info: TensorInfo) -> bytes:
    """Return a tensor info."""
    n = len(info.shape)
    return _text(info.name.encode()) + struct.pack(f"<I{n}QIQ", n, *info.shape, info.kind, info.offset)


def _text(value: bytes) -> bytes:
    return LONG.pack(len(value)) + value
