"""Bytes of model files, which are not trusted: every length is checked before it is used."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.weights.contents import BrokenModelError, Floats
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import check_file

_MOST_JSON = 64 << 20  # bytes
_MOST_DIMENSIONS = 4


class ByteReader:
    """A file in memory, read from its start on; raises BrokenModelError where it ends too early."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.at = 0
        """Where the next value begins."""

    @property
    def is_at_end(self) -> bool:
        """Whether all bytes have been read."""
        return self.at >= len(self.data)

    def skip(self, n: int) -> int:
        """Pass over `n` bytes and return where they begin."""
        start = self.at
        if n < 0 or n > len(self.data) - start:
            raise BrokenModelError(f"it ends at byte {len(self.data):,}, where more should follow")
        self.at = start + n
        return start

    def numbers(self, code: str) -> tuple[int, ...]:
        """Read little-endian numbers, given as in `struct`."""
        layout = struct.Struct(f"<{code}")
        values: tuple[int, ...] = layout.unpack_from(self.data, self.skip(layout.size))
        return values

    def number(self, code: str) -> int:
        """Read one number."""
        return self.numbers(code)[0]

    def bytes(self, n: int) -> bytes:
        """Read `n` bytes."""
        start = self.skip(n)
        return self.data[start : start + n]

    def shape(self, code: str, n: int) -> tuple[int, ...]:
        """Read the sizes of `n` dimensions; their product is no more than the file could hold."""
        if not 0 <= n <= _MOST_DIMENSIONS:
            raise BrokenModelError(f"a tensor has {n} dimensions")
        shape = self.numbers(f"{n}{code}")
        if min(shape, default=1) < 1 or math.prod(shape) > 8 * len(self.data):
            raise BrokenModelError(f"a tensor has the shape {shape}, more than the file holds")
        return shape


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, for reading. Raises UsageError if it cannot be read, EdgespecError if empty."""
    check_file(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise EdgespecError(f"{path}: an empty file; download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    yield data  # not closed: arrays may look at it; it goes with the last of them


@contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Turn what is wrong within a file into one line that names it."""
    try:
        yield
    except BrokenModelError as error:
        raise EdgespecError(f"{path}: no whole Whisper model: {error}; download it again") from None


def array_reader(
    data: mmap.mmap | bytes, start: int, shape: tuple[int, ...], kind: str
) -> Callable[[], Floats]:
    """A reader of arrays of the numpy type `kind`, or of "bf16", as floats."""

    def read() -> Floats:
        code = "<u2" if kind == "bf16" else kind
        raw: npt.NDArray[Any] = np.frombuffer(data, code, math.prod(shape), start).reshape(shape)
        if kind == "bf16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    return read


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file says
    """Return the contents of a JSON file. Raises UsageError if it is not there, EdgespecError if damaged."""
    check_file(path)
    try:
        if path.stat().st_size > _MOST_JSON:
            raise EdgespecError(f"{path}: too large for a description of a model")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise EdgespecError(f"{path}: damaged: no valid JSON; download it again") from None


def heads_in(description: object) -> tuple[tuple[int, int], ...]:
    """Return the alignment heads that a JSON description of a model names; () if it names none."""
    found = description.get("alignment_heads") if isinstance(description, dict) else None
    if not isinstance(found, list):
        return ()
    pairs = []
    for pair in found:
        match pair:
            case [int(layer), int(head)]:
                pairs.append((layer, head))
            case _:
                raise BrokenModelError(f"the alignment heads {str(found)[:80]} are no pairs")
    return tuple(pairs)


# --- Vocabularies in the byte-level form of GPT-2 -----------------------------------------------


def _byte_letters() -> dict[str, int]:
    """Return the letters that stand for bytes: printable ones for themselves, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = _byte_letters()
"""The byte behind each letter of a token's written form."""
_LETTER_OF = {byte: letter for letter, byte in LETTERS.items()}

END_OF_TEXT = "<|endoftext|>"


def token_bytes(written: str) -> bytes:
    """Return the bytes of a token in its written form. Raises BrokenModelError for other letters."""
    try:
        return bytes(LETTERS[letter] for letter in written)
    except KeyError:
        raise BrokenModelError(
            f"the token {written[:40]!r} is not written as byte-level tokens are"
        ) from None


def written_token(token: bytes) -> bytes:
    """Return the written form of a token, as GGUF files have it."""
    return "".join(_LETTER_OF[byte] for byte in token).encode()


def ordinary_tokens(written: list[str]) -> tuple[bytes, ...]:
    """Return the tokens before the special ones, which begin with <|endoftext|>."""
    n = written.index(END_OF_TEXT) if END_OF_TEXT in written else len(written)
    return tuple(map(token_bytes, written[:n]))
