"""The history: earlier prompts and answers as tokens on disk, from which later runs draft.

    cache_root()/history/                                   0700
        qwen2-0123456789abcdef.tokens             0600      one tokenizer's documents, oldest first
        qwen2-0123456789abcdef.tokens.set-aside   (-2 ..)   was damaged or foreign, and kept
        .qwen2-0123456789abcdef.lock                        held by the process that writes

No failure here ends a generation: each is one line for `on_message`.

A file holds tokenized documents, one after another, each with its checksum:

    file    = header, records      all numbers little-endian
    header  = "EDGEHIST", version, 16 hex digits of the fingerprint, CRC-32 of these 28 bytes
    record  = number of tokens, CRC-32 of the tokens, CRC-32 of these 8 bytes, the tokens as int32

The header's 32 bytes are the same in all versions. A record is one document and is written at once. One
that a killed process left unfinished is the last: it is ignored, and cut off by the next process that
writes. The second CRC tells it from a damaged length, which would make all that follows look unfinished.

Rejected places (rejections.py) are a file of the same form with another first word, one for each target.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.platform.kept import HISTORY, Kept
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, StateFile, write_all

MAX_TOKENS = 524_288
"""Places that a history keeps by default: one for each token, and one for each document's end."""

_END = -1  # follows each document where the history is loaded

_FINGERPRINT = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{16}")


Tokens = Sequence[int] | npt.NDArray[np.int32]

_VERSION = 1
_HEADER = struct.Struct("<8sI16sI")
_RECORD = struct.Struct("<III")
_CRC_BYTES = 4  # the CRC of a header, and of a record's head, is the last number in it


@dataclass(frozen=True, slots=True)
class RecordKind:
    """What the records of a file are."""

    kept: Kept
    magic: bytes
    """The file's first 8 bytes."""
    suffix: str
    """The end of its name."""
    noun: str
    """What the file is, in words."""
    owner: str
    """Whose its fingerprint is: "tokenizer"."""

    @property
    def files(self) -> re.Pattern[str]:
        """The names of such files, those set aside included; group 1 is the fingerprint."""
        return re.compile(rf"({_FINGERPRINT.pattern})\{self.suffix}(?:\.set-aside(?:-\d+)?)?")


DOCUMENTS = RecordKind(HISTORY, b"EDGEHIST", ".tokens", "history", "tokenizer")
"""Prompts and answers."""


class HistoryRecord(NamedTuple):  # made by the thousand: three times as fast as a frozen dataclass
    """Where one document stands in a history's file, and how it is recognised."""

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


def encode_header(fingerprint: str, kind: RecordKind = DOCUMENTS) -> bytes:
    """Return a file's first bytes, for the tokenizer (or what else `kind` says) called `fingerprint`."""
    start = _HEADER.pack(kind.magic, _VERSION, fingerprint[-16:].encode(), 0)[:-_CRC_BYTES]
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


def parse(data: bytes, fingerprint: str, kind: RecordKind = DOCUMENTS) -> HistoryContents:
    """The content of a file. Raises DamagedFileError if more than its last record is wrong."""
    header, expected = data[: _HEADER.size], encode_header(fingerprint, kind)
    if header == expected:
        return _parse_records(data)
    if expected.startswith(header):
        return HistoryContents()  # its first process was killed while it wrote the header
    if len(header) < _HEADER.size or not header.startswith(kind.magic):
        raise DamagedFileError(f"not a {kind.noun}")
    _, version, key, crc = _HEADER.unpack(header)
    if crc != zlib.crc32(header[:-_CRC_BYTES]):
        raise DamagedFileError("its header is wrong")
    raise DamagedFileError(f"of another {kind.owner} ({key.decode(errors='replace')}) or format ({version})")


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


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """What `History.extend` added: documents and tokens, and what it left out."""

    documents: int
    tokens: int
    duplicates: int
    """Documents that were there already, or came twice."""


@dataclass(frozen=True, slots=True)
class HistoryInfo:
    """The size of one history: documents, tokens, bytes."""

    path: Path
    tokenizer: str
    """The readable part of the fingerprint."""
    documents: int
    tokens: int
    bytes: int
    """Size of the file."""
    modified: float | None
    """When it was last written, seconds since 1970; None: there is no file. Documents have no times."""
    problem: str = ""
    """Why the file cannot be used, in one line."""
    set_aside: tuple[Path, ...] = ()
    """Files kept because they were damaged or foreign."""


class History:
    """The documents of one tokenizer, on disk. Any number of processes may use it at once.

        history = History(tokenizer_fingerprint(model), on_message=print)
        store.extend(history.load(n_vocab=model.n_vocab))
        history.append(prompt + answer)

    Holds no file open between calls, so there is nothing to close.
    """

    def __init__(
        self,
        fingerprint: str,
        *,
        root: Path | None = None,
        max_tokens: int = MAX_TOKENS,
        kind: RecordKind = DOCUMENTS,
        on_message: MessageFn = silent,
    ) -> None:
        """Name the history; no file is touched.

        `fingerprint`: what `tokenizer_fingerprint` returned. `root`: the directory, by default
        that of `kind`. `max_tokens`: the bound, in places (see MAX_TOKENS). `on_message` takes lines
        that the user should know, each once. Raises ValueError for what is no fingerprint or a bound
        below 2.
        """
        if not _FINGERPRINT.fullmatch(fingerprint) or max_tokens < 2:
            raise ValueError(f"no history can be called {fingerprint!r} and keep {max_tokens} tokens")
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens
        self.kind = kind
        self.path = (kind.kept.path() if root is None else root) / f"{fingerprint}{kind.suffix}"
        self._file = StateFile(
            self.path,
            lambda data: parse(data, fingerprint, kind),
            lock=f".{fingerprint}.lock",
            on_message=on_message,
        )

    def load(self, capacity: int = MAX_TOKENS, *, n_vocab: int | None = None) -> npt.NDArray[np.int32]:
        """Return the newest documents, oldest of them first, each followed by -1.

        The array is at most `capacity` long, the -1 counted; the document that does not fit keeps its
        end. `n_vocab`: an id the model does not have becomes -1 too, as models of one fingerprint may
        differ in their padding. Raises nothing: what cannot be read is one line, and empty.
        """
        try:
            contents = self._file.read() or HistoryContents()
        except OSError as error:
            self._file.say(f"the {self.kind.noun} cannot be read: {describe_os_error(error)}")
            contents = HistoryContents()
        chosen: list[tuple[int, int]] = []
        n_free = max(0, capacity)
        for record in reversed(contents.records):
            if n_free < 2:
                break
            n = min(record.n_tokens, n_free - 1)
            chosen.append((record.start // 4 + record.n_tokens - n, n))
            n_free -= n + 1
        stored = np.frombuffer(contents.data, "<i4", len(contents.data) // 4)
        loaded = np.full(sum(n + 1 for _, n in chosen), _END, np.int32)
        at = 0
        for start, n in reversed(chosen):
            loaded[at : at + n] = stored[start : start + n]
            at += n + 1
        loaded[loaded.view(np.uint32) >= (1 << 31 if n_vocab is None else n_vocab)] = _END
        return loaded

    def peek(self) -> list[npt.NDArray[np.int32]]:
        """Return the whole documents, oldest first, and change nothing.

        Raises EdgespecError, which names the file, for one that is damaged, foreign or cannot be read.
        """
        try:
            contents = self._file.peek() or HistoryContents()
        except DamagedFileError as error:
            raise EdgespecError(f"{self.path}: {error}; not used") from None
        except OSError as error:
            raise EdgespecError(f"the {self.kind.noun} cannot be read: {describe_os_error(error)}") from error
        return [
            np.frombuffer(contents.data, "<i4", record.n_tokens, record.start) for record in contents.records
        ]

    def append(self, tokens: Tokens) -> bool:
        """Store one document; False where it could not be (one line says why). See `extend`."""
        return self.extend([tokens]) is not None

    def extend(self, documents: Iterable[Tokens]) -> HistoryUpdate | None:
        """Store documents, in one write; None where they could not be, and then none of them was.

        A document longer than the bound keeps its end. One with the length and CRC of a stored document
        counts as the same: it is not stored again, and the older copy stays where it is. A file a quarter
        larger than the bound is rewritten with the newest documents within the bound. Raises ValueError for
        tokens that are negative or no int32.
        """
        encoded = [encode_tokens(tokens, self.max_tokens - 1) for tokens in documents]
        try:
            with self._locked():
                return self._extend([document for document in encoded if document])
        except OSError as error:
            self._file.say(
                f"the {self.kind.noun} cannot be written, nothing is added: {describe_os_error(error)}"
            )
        return None

    def clear(self) -> list[Path]:
        """Delete the history and what was set aside of it; return the files that are gone. Raises OSError."""
        if not self.path.parent.exists():
            return []
        with self._locked():
            gone = [self.path, *self._file.set_aside(), self._file.temporary]
            gone = [path for path in gone if path.is_file() and not path.is_symlink()]
            for path in gone:
                path.unlink()
            return gone

    def info(self) -> HistoryInfo:
        """Return the facts of the history. Changes nothing and raises nothing."""
        contents, size, modified, problem = HistoryContents(), 0, None, ""
        try:
            stat = self.path.stat()
            size, modified = stat.st_size, stat.st_mtime
            contents = self._file.peek() or HistoryContents()
        except FileNotFoundError:
            pass
        except DamagedFileError as error:
            problem = f"damaged: {error}; the next run sets it aside"
        except OSError as error:
            problem = describe_os_error(error)
        return HistoryInfo(
            path=self.path,
            tokenizer=self.fingerprint.rpartition("-")[0],
            documents=len(contents.records),
            tokens=sum(record.n_tokens for record in contents.records),
            bytes=size,
            modified=modified,
            problem=problem,
            set_aside=tuple(self._file.set_aside()),
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._file.locked():
            yield

    def _extend(self, encoded: list[bytes]) -> HistoryUpdate:
        contents = self._file.read_locked() or HistoryContents()
        known = {record.identity for record in contents.records}
        new: list[bytes] = []
        tokens = duplicates = 0
        for document in encoded:
            head, identity = encode_head(document)
            if identity in known:
                duplicates += 1
                continue
            known.add(identity)
            new.append(head + document)
            tokens += identity[0]
        n_places = tokens + len(new) + sum(record.n_tokens + 1 for record in contents.records)
        if n_places > self.max_tokens * 5 // 4:
            self._rewrite([*(contents.raw(record) for record in contents.records), *new])
        elif new:
            self._write_at(contents.end, b"".join(new))
        return HistoryUpdate(len(new), tokens, duplicates)

    def _write_at(self, end: int, records: bytes) -> None:
        """Append, or leave the whole records as they were."""
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, end)  # an unfinished record, if there is one
            try:
                write_all(file, records if end else encode_header(self.fingerprint, self.kind) + records, end)
            except OSError:
                os.ftruncate(file, end)
                raise
        finally:
            os.close(file)

    def _rewrite(self, records: list[bytes]) -> None:
        n_free, first = self.max_tokens, len(records)
        while first > 0 and (n_free := n_free - places(records[first - 1])) >= 0:
            first -= 1
        self._file.write_locked(b"".join([encode_header(self.fingerprint, self.kind), *records[first:]]))


def find_histories(root: Path | None = None, kind: RecordKind = DOCUMENTS) -> list[History]:
    """Return the files of a kind in its directory, by name; a file set aside counts."""
    root = kind.kept.path() if root is None else root
    if not root.exists():
        return []
    names = {match[1] for path in root.iterdir() if (match := kind.files.fullmatch(path.name))}
    return [History(name, root=root, kind=kind) for name in sorted(names)]
