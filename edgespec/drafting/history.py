"""The history: earlier prompts and answers as tokens on disk, from which later runs draft.

    cache_root()/history/                 0700
        texts.db                0600      all tokenizers' documents, in the order in which they came (SQLite)
        texts.db.set-aside                a damaged or foreign file, kept

No failure here ends a generation: each is one line for `on_message`. Any number of processes may read and
write at once; SQLite isolates them. A killed process loses at most the document that it was writing. A
power failure may damage the file, since nothing waits for the disk: each document has a checksum, and a
file that SQLite cannot read is set aside.

Rejected places (rejections.py) are in a file of the same form in a folder of their own.
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, MessageFn, describe_os_error, once, silent
from edgespec.platform.files import locked
from edgespec.platform.kept import HISTORY, Kept, set_aside

MAX_TOKENS = 524_288
"""Places that a history keeps by default: one for each token, and one for each document's end."""

Tokens = Sequence[int] | npt.NDArray[np.int32]
_T = TypeVar("_T")

_END = -1  # follows each document where the history is loaded
_FINGERPRINT = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{16}")
_WAIT_S = 10.0  # for a process that writes
_VERSION = 2
_SCHEMA = (
    "CREATE TABLE texts (id INTEGER PRIMARY KEY, owner TEXT, n_tokens INTEGER, crc INTEGER, tokens BLOB,"
    " UNIQUE (owner, n_tokens, crc))"
)
_ADD = "INSERT OR IGNORE INTO texts (owner, n_tokens, crc, tokens) VALUES (?, ?, ?, ?)"
_SHORTEN = (
    "DELETE FROM texts WHERE owner = ?1 AND id <= (SELECT max(id) FROM (SELECT id,"
    " sum(n_tokens + 1) OVER (ORDER BY id DESC) AS places FROM texts WHERE owner = ?1) WHERE places > ?2)"
)
_SIZES = "SELECT owner, count(*), sum(n_tokens) FROM texts GROUP BY owner ORDER BY owner"
_OLD_HEADER, _OLD_RECORD = 32, struct.Struct("<III")  # of version 1, a format of our own


class HistoryUpdate(NamedTuple):
    """What `History.extend` added: documents and tokens, and what it left out."""

    documents: int
    tokens: int
    duplicates: int
    """Documents that were there already, or came twice."""


class HistoryInfo(NamedTuple):
    """The size of one history."""

    fingerprint: str
    documents: int
    tokens: int

    @property
    def tokenizer(self) -> str:
        """The human-readable part of the fingerprint."""
        return self.fingerprint.rpartition("-")[0]


class History:
    """The documents of one tokenizer, on disk.

        history = History(tokenizer_fingerprint(model.header), on_message=print)
        store.extend(history.load(n_vocab=model.n_vocab))
        history.append(prompt + answer)

    Holds no file open between calls, so there is nothing to close.
    """

    def __init__(
        self,
        fingerprint: str,
        *,
        kept: Kept = HISTORY,
        max_tokens: int = MAX_TOKENS,
        on_message: MessageFn = silent,
    ) -> None:
        """Name the history; no file is touched.

        `fingerprint`: what `tokenizer_fingerprint` returned. `kept`: the folder, and the word for what is in
        it. `max_tokens`: the bound, in places (see MAX_TOKENS). `on_message` takes lines that the user should
        know, each once. Raises ValueError for an invalid fingerprint or a bound below 2.
        """
        if not _FINGERPRINT.fullmatch(fingerprint) or max_tokens < 2:
            raise ValueError(f"no history can be called {fingerprint!r} and keep {max_tokens} tokens")
        self.fingerprint = fingerprint
        self.max_tokens = max_tokens
        self.path = kept.path() / "texts.db"
        self._name = kept.name
        self._say = once(on_message)

    def load(self, capacity: int = MAX_TOKENS, *, n_vocab: int | None = None) -> npt.NDArray[np.int32]:
        """Return the newest documents, the oldest of them first, each followed by -1.

        The array is at most `capacity` long, the -1 counted; the document that does not fit keeps its
        end. `n_vocab`: an id the model does not have becomes -1 too, as models of one fingerprint may
        differ in their padding. Raises nothing: if it cannot be read, one line says so, and the
        array is empty.
        """

        def newest(db: sqlite3.Connection) -> list[npt.NDArray[np.int32]]:
            _check(db)
            found: list[npt.NDArray[np.int32]] = []
            n_free = capacity
            for tokens in self._texts(db, "DESC"):
                if n_free < 2:
                    break
                found.append(np.append(tokens[-(n_free - 1) :], np.int32(_END)))
                n_free -= len(found[-1])
            return found[::-1]

        found = self._run(newest, "cannot be read") or []
        loaded = np.concatenate([np.empty(0, np.int32), *found])
        loaded[loaded.view(np.uint32) >= (1 << 31 if n_vocab is None else n_vocab)] = _END
        return loaded

    def texts(self) -> list[npt.NDArray[np.int32]]:
        """Return the whole documents, oldest first.

        Raises EdgespecError, which names the file, for one that is damaged, foreign or cannot be read.
        """
        with _readable(self.path) as db:
            return list(self._texts(db, "ASC")) if db else []

    def append(self, tokens: Tokens) -> bool:
        """Store one document; return False if that failed (one line says why). See `extend`."""
        return self.extend([tokens]) is not None

    def extend(self, documents: Iterable[Tokens]) -> HistoryUpdate | None:
        """Store documents, in one write; return None if that failed, and then none was stored.

        A document longer than the bound keeps its end. One with the length and CRC of a stored document
        counts as the same: it is not stored again, and the older copy stays where it is. The oldest
        documents beyond the bound are deleted. Raises ValueError for tokens that are negative or no int32.
        """
        encoded = [_encoded(tokens, self.max_tokens - 1) for tokens in documents]
        encoded = [document for document in encoded if document]

        def added(db: sqlite3.Connection) -> HistoryUpdate:
            new = [document for document in encoded if _add(db, self.fingerprint, document)]
            if new:
                db.execute(_SHORTEN, (self.fingerprint, self.max_tokens))
            return HistoryUpdate(len(new), sum(map(len, new)) // 4, len(encoded) - len(new))

        return self._run(added, "cannot be written, nothing is added", make=True)

    def _texts(self, db: sqlite3.Connection, order: str) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the documents whose checksums are right."""
        found = f"SELECT crc, tokens FROM texts WHERE owner = ? ORDER BY id {order}"  # noqa: S608
        for crc, tokens in db.execute(found, (self.fingerprint,)):
            if crc == zlib.crc32(tokens):
                yield np.frombuffer(tokens, "<i4")

    def _run(self, work: Callable[[sqlite3.Connection], _T], failed: str, *, make: bool = False) -> _T | None:
        """Do `work` in one transaction; return None if there is no file, unless `make` creates it.

        A damaged file is set aside first. Any other failure is one line, changes nothing, and gives None.
        """

        def attempt() -> _T | None:
            old = _old_files(self.path)
            with _open(self.path, make=make or bool(old), old=old) as db:
                return work(db) if db else None

        try:
            try:
                return attempt()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
            with locked(self.path.with_name(".lock"), mode=0o600):
                self._set_aside_damaged()
            return attempt()
        except (OSError, sqlite3.Error) as error:
            self._say(f"the {self._name} {failed}: {_why(self.path, error)}")
            return None

    def _set_aside_damaged(self) -> None:
        """Rename the file, unless another process has done so by now."""
        try:
            with _open(self.path) as db:
                if db:
                    _check(db)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            set_aside(self.path, str(error), self._say)


def find_histories(kept: Kept = HISTORY) -> list[HistoryInfo]:
    """Return the sizes of the histories in the file of `kept`.

    Changes nothing. Raises EdgespecError, which names the file, for one that is damaged or cannot be read.
    """
    with _readable(kept.path() / "texts.db") as db:
        return [HistoryInfo(*row) for row in db.execute(_SIZES)] if db else []


@contextmanager
def _open(path: Path, *, make: bool = False, old: Sequence[Path] = ()) -> Iterator[sqlite3.Connection | None]:
    """Open the file for one transaction; None if there is none, unless `make` makes it.

    `old`: files of version 1 to import.
    """
    if make:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    elif not path.exists():
        yield None
        return
    with closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as db:
        for pragma in ("synchronous=OFF", "secure_delete=ON", "auto_vacuum=FULL"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN IMMEDIATE" if make else "BEGIN")
        with db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            is_empty = not version and not db.execute("SELECT 1 FROM sqlite_master").fetchone()
            if make and is_empty:
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA user_version={_VERSION}")
            elif is_empty:  # another process makes it just now
                yield None
                return
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"of format {version}")
            for file in old:
                for document in _documents_of_version_1(file):
                    _add(db, file.stem, document)
            yield db
    for file in old:
        file.unlink(missing_ok=True)


@contextmanager
def _readable(path: Path) -> Iterator[sqlite3.Connection | None]:
    try:
        with _open(path) as db:
            yield db
    except (OSError, sqlite3.Error) as error:
        raise EdgespecError(f"{_why(path, error)}; not used") from None


def _old_files(path: Path) -> list[Path]:
    return [*path.parent.glob("*.tokens"), *path.parent.glob("*.rejected")]


def _documents_of_version_1(file: Path) -> Iterator[bytes]:
    """Yield the documents of a file that earlier versions wrote, up to the first damaged one."""
    data = file.read_bytes()
    at = _OLD_HEADER
    while (start := at + _OLD_RECORD.size) <= len(data):
        n_tokens, crc, _ = _OLD_RECORD.unpack_from(data, at)
        at = start + 4 * n_tokens
        if zlib.crc32(data[start:at]) != crc or not n_tokens:
            return
        yield data[start:at]


def _encoded(tokens: Tokens, n_max: int) -> bytes:
    """Return the last `n_max` tokens as int32. Raises ValueError for invalid tokens."""
    ids = np.asarray(tokens[-n_max:], np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 31):
        raise ValueError(f"token ids must be in [0, 2^31), these are {ids.min()} to {ids.max()}")
    return ids.astype("<i4").tobytes()


def _add(db: sqlite3.Connection, owner: str, document: bytes) -> bool:
    """Add an encoded document; return whether it was new."""
    row = owner, len(document) // 4, zlib.crc32(document), document
    return db.execute(_ADD, row).rowcount > 0


def _check(db: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a database whose pages or index are damaged."""
    (found,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(f"damaged: {found}")


def _is_damage(error: Exception) -> bool:
    """Whether the file is no database of ours, rather than busy, full or forbidden."""
    return type(error) is sqlite3.DatabaseError


def _why(path: Path, error: OSError | sqlite3.Error) -> str:
    return describe_os_error(error) if isinstance(error, OSError) else f"{path}: {error}"
