"""The file of a history: tokenized documents, one after another, each with its checksum.

    file    = header, records      all numbers little-endian
    header  = "EDGEHIST", version, 16 hex digits of the fingerprint, CRC-32 of these 28 bytes
    record  = number of tokens, CRC-32 of the tokens, CRC-32 of these 8 bytes, the tokens as int32

The header's 32 bytes are the same in all versions. A record is one document and is written at once. One
that a killed process left unfinished is the last: it is ignored, and cut off by the next process that
writes. The second CRC tells it from a damaged length, which would make all that follows look unfinished.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.platform.state_file import DamagedFileError, NewerFormatError

Tokens = Sequence[int] | npt.NDArray[np.int32]

_MAGIC, _VERSION = b"EDGEHIST", 1
_HEADER = struct.Struct("<8sI16sI")
_RECORD = struct.Struct("<III")
_CRC_BYTES = 4  # the CRC of a header, and of a record's head, is the last number in it


class HistoryRecord(NamedTuple):  # made by the thousand: three times as fast as a frozen dataclass
    """One document in a file."""

    start: int
    """Where its tokens begin in the file, bytes."""
    n_tokens: int
    crc: int

    @property
    def identity(self) -> tuple[int, int]:
        """The length and CRC by which a document is recognised."""
        return self.n_tokens, self.crc


@dataclass(frozen=True, slots=True)
class HistoryContents:
    """The whole records of a file."""

    data: bytes = b""
    """The file."""
    records: tuple[HistoryRecord, ...] = ()
    end: int = 0
    """Where the next record belongs in the file, bytes; 0: the header is not there yet."""

    def raw(self, record: HistoryRecord) -> bytes:
        """Return the bytes of a record, its head included."""
        return self.data[record.start - _RECORD.size : record.start + 4 * record.n_tokens]


def encode_header(fingerprint: str) -> bytes:
    """Return a file's first bytes, for the tokenizer called `fingerprint`."""
    start = _HEADER.pack(_MAGIC, _VERSION, fingerprint[-16:].encode(), 0)[:-_CRC_BYTES]
    return start + zlib.crc32(start).to_bytes(_CRC_BYTES, "little")


def encode_tokens(tokens: Tokens, n_max: int) -> bytes:
    """Return the last `n_max` tokens as they lie in a record. Raises ValueError for what is no token."""
    ids = np.asarray(tokens[-n_max:], np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 31):
        raise ValueError(f"token ids must be in [0, 2^31), these are {ids.min()} to {ids.max()}")
    return ids.astype("<i4").tobytes()


def encode_head(document: bytes) -> tuple[bytes, tuple[int, int]]:
    """Return the head of an encoded document's record, and the record's identity."""
    n_tokens, crc = len(document) // 4, zlib.crc32(document)
    check = zlib.crc32(_RECORD.pack(n_tokens, crc, 0)[:-_CRC_BYTES])
    return _RECORD.pack(n_tokens, crc, check), (n_tokens, crc)


def places(record: bytes) -> int:
    """Return the places that an encoded record takes in memory: its tokens, and one for its end."""
    return (len(record) - _RECORD.size) // 4 + 1


def parse(path: Path, data: bytes, fingerprint: str) -> HistoryContents:
    """Return what the file `path` holds. Raises DamagedFileError if more than its last record is wrong."""
    header, expected = data[: _HEADER.size], encode_header(fingerprint)
    if header == expected:
        return _parse_records(data)
    if expected.startswith(header):
        return HistoryContents()  # its first process was killed while it wrote the header
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DamagedFileError("not a history")
    _, version, key, crc = _HEADER.unpack(header)
    if crc != zlib.crc32(header[:-_CRC_BYTES]):
        raise DamagedFileError("its header is wrong")
    if version > _VERSION:
        raise NewerFormatError(path, version)
    raise DamagedFileError(f"of another tokenizer ({key.decode(errors='replace')}) or format ({version})")


def _parse_records(data: bytes) -> HistoryContents:
    records: list[HistoryRecord] = []
    view, size, crc32, unpack = memoryview(data), _RECORD.size, zlib.crc32, _RECORD.unpack_from
    at = _HEADER.size
    while (start := at + size) <= len(data):
        n_tokens, crc, check = unpack(data, at)
        if crc32(view[at : start - _CRC_BYTES]) != check:
            if not any(view[at:]):
                break  # after a power failure, a file may be longer than what was written to it
            raise DamagedFileError(f"wrong at byte {at}")
        end = start + 4 * n_tokens
        if end > len(data):
            break
        if crc32(view[start:end]) != crc:
            if end == len(data):
                break
            raise DamagedFileError(f"wrong in the {4 * n_tokens} bytes after byte {start}")
        records.append(HistoryRecord(start, n_tokens, crc))
        at = end
    return HistoryContents(data, tuple(records), at)
