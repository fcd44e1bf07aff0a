"""Read Whisper models of whisper.cpp: one file ggml-NAME.bin.

    file   = magic, 11 sizes and types, mel filters, vocabulary, tensors until the end
    token  = length, bytes
    tensor = number of dimensions, length of the name, type, sizes (innermost first), name, data

All numbers are 32-bit integers, little-endian. Types of data are ggml's.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.weights.reading import (
    END_OF_TEXT,
    BrokenModelError,
    ByteReader,
    SourceTensor,
    WhisperContents,
    WhisperSizes,
    array_reader,
    blamed,
    check_sizes,
    mapped,
    n_ordinary,
)
from edgespec.llama.gguf import F32, block_size, is_type, row_bytes, to_floats
from edgespec.models.on_disk import WHISPER_CPP_MAGIC

_LONGEST_TOKEN, _LONGEST_NAME = 1 << 10, 1 << 8
_F16 = 1


def read_whisper_cpp(path: Path) -> WhisperContents:
    """Return the model in `path`, its numbers unread. Raises UsageError and EdgespecError."""
    with mapped(path) as data, blamed(path):
        reader = ByteReader(data)
        if reader.bytes(4) != WHISPER_CPP_MAGIC:
            raise BrokenModelError("it does not begin as whisper.cpp's models do")
        *numbers, n_mels, _type = reader.numbers("11i")
        sizes = WhisperSizes(n_mels, *numbers)
        check_sizes(sizes)
        n_filters, n_bins = reader.numbers("ii")
        if not (0 < n_filters <= n_mels and 0 < n_bins <= 1 << 12):
            raise BrokenModelError(f"mel filters of {n_filters} by {n_bins}")
        reader.skip(4 * n_filters * n_bins)
        tokens = _tokens(reader, sizes.n_vocab)
        return WhisperContents(path, sizes, tokens, (), _tensors(reader, data))


def _tokens(reader: ByteReader, n_vocab: int) -> tuple[bytes, ...]:
    n = reader.number("i")
    if not 0 < n <= n_vocab:
        raise BrokenModelError(f"a vocabulary of {n:,} tokens")
    tokens = []
    for _ in range(n):
        length = reader.number("i")
        if not 0 <= length <= _LONGEST_TOKEN:
            raise BrokenModelError(f"a token of {length:,} bytes")
        tokens.append(reader.bytes(length))
    # Files made from the hub's vocabulary have <|endoftext|> too: 50,257 tokens, of English models as well.
    ordinary = tokens[: n_ordinary(n_vocab)]
    return tuple(b"" if token == END_OF_TEXT.encode() else token for token in ordinary)


def _tensors(reader: ByteReader, data: mmap.mmap) -> dict[str, SourceTensor]:
    tensors = {}
    while not reader.is_at_end:
        n, length, kind = reader.numbers("iii")
        sizes = reader.shape("i", n)
        if not 0 < length <= _LONGEST_NAME:
            raise BrokenModelError(f"a tensor's name has {length:,} letters")
        name = reader.bytes(length).decode(errors="replace")
        if not is_type(kind) or not sizes or sizes[0] % block_size(kind):
            raise BrokenModelError(f"the tensor {name[:60]!r} has the unknown type {kind}")
        shape = sizes[::-1]
        start = reader.skip(row_bytes(kind, sizes[0]) * math.prod(sizes[1:]))
        if name.endswith(".bias") and len(shape) == 2 and shape[1] == 1:  # of a convolution
            shape = shape[:1]
        tensors[name] = SourceTensor(shape, _reader(data, start, shape, kind))
    return tensors


def _reader(data: mmap.mmap, start: int, shape: tuple[int, ...], kind: int) -> Callable[[], Floats]:
    if kind in (F32, _F16):
        return array_reader(data, start, shape, "<f4" if kind == F32 else "<f2")

    def read() -> Floats:
        width, rows = shape[-1], math.prod(shape[:-1])
        n_bytes = row_bytes(kind, width)
        raw = np.frombuffer(data, np.uint8, rows * n_bytes, start).reshape(rows, n_bytes)
        return to_floats(raw, kind, width).reshape(shape)

    return read
