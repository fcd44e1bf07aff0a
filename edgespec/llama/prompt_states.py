"""States of prompts on disk: what was read is written there, and a later process goes on from it.

    FOLDER/                                      0700
        MODEL-BEFORE-OWN.state                   0600, a piece of a sequence
            magic, checksum, length of the header    32 bytes
            its tokens, and the sizes of states      JSON
            the states, as llama.cpp writes them

What deletes the oldest, and what else lies in the folder: platform/bounded_folder.py.

Where cells can be copied by themselves, a piece is the cells of PIECE tokens, or of fewer at a sequence's
end: what sequences begin with alike is written once, and a sequence that grows is not written again. A
recurrent state, and a sliding window, belong to the whole sequence: there a piece is all of it.

MODEL is a hash of all that the bits depend on (`model_key`), OWN one of all tokens up to the piece's end,
BEFORE one of those up to its beginning. So a name stands for one content, whoever writes it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from edgespec.decoding.session import n_common
from edgespec.errors import EdgespecError
from edgespec.llama.choices import StateRoom
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.rollback import State
from edgespec.llama.selftest import build_hash
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.bounded_folder import BoundedFolder
from edgespec.platform.closing import Closing
from edgespec.platform.kept import STATES
from edgespec.platform.messages import MessageFn
from edgespec.platform.state_file import DamagedFileError

PIECE = 256
"""Tokens of a piece whose cells are copied by themselves."""

LEAST = 32
"""Tokens: reading fewer again takes no longer than looking for them."""

LONG = 1024
"""Tokens of a sequence under way that are not written yet: with more, they are."""

_MOST_WAITING = 256 << 20  # bytes of copies that are not written yet
_START = "0" * 32  # BEFORE of a first piece
(_MAGIC,) = STATES.magics
_HEAD = struct.Struct("<24sII")


class _PieceHeader(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    """Tokens and bytes of each state: that of the piece, then copies of earlier states of the sequence."""


class _PiecePlace(NamedTuple):
    model: str
    before: str
    own: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.before}-{self.own}.state"

    @classmethod
    def after(cls, model: str, before: str, tokens: Sequence[int]) -> _PiecePlace:
        digest = hashlib.blake2b(before.encode() + array("i", tokens).tobytes(), digest_size=16)
        return cls(model, before, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece to be written."""

    place: _PiecePlace
    header: _PieceHeader
    states: list[State]
    used_ns: int
    """Its time of use: those of a sequence are later the nearer they are to its beginning."""
    replaces: list[_PiecePlace]
    """Pieces that say no more than this one."""

    @property
    def n_bytes(self) -> int:
        return sum(state.nbytes for state in self.states)


class _Found(NamedTuple):
    """A piece on disk that goes on with a sequence."""

    place: _PiecePlace
    header: _PieceHeader
    at: int
    """Tokens before it."""
    n: int
    """Tokens that it gives."""


ReachFn: TypeAlias = Callable[[_PieceHeader, int], int]
"""Takes a piece's header and how many of its tokens are the sequence's; returns how many of them it gives."""


class StateFolder(Closing):
    """The files of all models in one folder, written in a thread. A context manager.

    What cannot be read or written is told in one line, and the work goes on without.
    """

    def __init__(self, room: StateRoom, on_message: MessageFn) -> None:
        """Make the folder if there is none; `on_message` takes lines that the user should know."""
        self._path, self._limit = room
        self._folder = state_files(room.path)
        self._on_message = on_message
        self._said: set[str] = set()
        self._headers: dict[_PiecePlace, _PieceHeader] = {}
        self._changed = threading.Condition()
        self._queue: deque[_Piece] = deque()
        self._n_waiting = 0
        self._pending: set[_PiecePlace] = set()
        self._is_closed = self._is_refused = False
        self._thread: threading.Thread | None = None
        try:
            self._folder.make()
        except OSError as error:
            self._refuse(error)

    def say(self, line: str) -> None:
        """Tell the user a line, unless it was told before."""
        if line not in self._said:
            self._said.add(line)
            self._on_message(line)

    def tell(self, line: str) -> None:
        """Give a line to whoever listens, for the user."""
        self._on_message(line)

    def say_too_slow(self) -> None:
        """Tell the user that states are lost, unless none is written anyway."""
        if not self._is_refused:
            self.say(f"{self._path}: not all states are kept: they come faster than they are written")

    def _refuse(self, error: Exception) -> None:
        self._is_refused = True
        why = error.strerror if isinstance(error, OSError) else str(error)
        self.say(f"states of prompts are not kept: {self._path}: {why}")

    # ---- reading ----

    def places(self, model: str) -> set[_PiecePlace]:
        """Return the places of a model's files."""
        parts = (name.removesuffix(".state").split("-") for name in self._folder.names())
        found = {_PiecePlace(*part) for part in parts if part[0] == model}
        for gone in self._headers.keys() - found:
            del self._headers[gone]
        return found

    def header(self, place: _PiecePlace) -> _PieceHeader | None:
        """Return the header of a file; None if there is none that can be used: a damaged one is deleted."""
        if place not in self._headers:
            try:
                with self._folder.opened(place.name) as file:
                    self._headers[place], _ = _read_header(file, place)
            except (DamagedFileError, OSError) as error:
                self._give_up(place, error)
        return self._headers.get(place)

    def find(self, model: str, tokens: Sequence[int], n_piece: int, reach: ReachFn) -> list[_Found]:
        """Return the pieces, of at most `n_piece` tokens, that give most of the beginning of `tokens`."""
        found: list[_Found] = []
        before, at, places = _START, 0, self.places(model)
        while at < len(tokens):
            rest = tokens[at : at + n_piece]
            wanted = _PiecePlace.after(model, before, rest)
            candidates = [wanted] if wanted in places else [one for one in places if one.before == before]
            pieces = [
                _Found(place, header, at, reach(header, n_common(header.tokens, rest)))
                for place in candidates
                if (header := self.header(place))
            ]
            best = max(pieces, key=lambda piece: piece.n, default=None)
            if best is None or not best.n:
                break
            found.append(best)
            if best.n < n_piece:
                break
            before, at = best.place.own, at + best.n
        return found

    def load(self, found: _Found) -> list[State] | None:
        """Return the states of a piece, mapped; None if it cannot be used: a damaged file is deleted."""
        try:
            with self._folder.opened(found.place.name) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                header, start = _read_header(file, found.place)
                mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
            if zlib.crc32(mapped[_HEAD.size :]) != _HEAD.unpack_from(mapped)[1]:
                raise DamagedFileError("damaged: its checksum is another")
        except (DamagedFileError, OSError) as error:
            self._give_up(found.place, error)
            return None
        states = []
        for _, n_bytes in header.sizes:
            states.append(np.frombuffer(mapped, np.uint8, n_bytes, start))
            start += n_bytes
        return states

    def _give_up(self, place: _PiecePlace, error: DamagedFileError | OSError) -> None:
        """Delete a damaged file; one that is gone needs no word."""
        path = self._path / place.name
        self._headers.pop(place, None)
        if isinstance(error, DamagedFileError):
            if self._folder.delete(place.name):
                self.say(f"{path}: {error}; deleted")
        elif not isinstance(error, FileNotFoundError):
            self.say(f"{path}: {error.strerror or error}; not used")

    def touch(self, place: _PiecePlace, used_ns: int) -> None:
        """Note that a piece was used."""
        with suppress(OSError):
            os.utime(self._path / place.name, ns=(used_ns, used_ns))

    # ---- writing ----

    def known(self, model: str) -> set[_PiecePlace]:
        """Return the places of a model's files, and of those to be written."""
        with self._changed:
            pending = set(self._pending)
        return pending | self.places(model)

    def takes(self, *, waits: bool) -> bool:
        """Whether a piece can be put now; `waits`: once others are written."""
        with self._changed:
            while waits and self._n_waiting > _MOST_WAITING and not self._is_refused:
                self._changed.wait()
            return not (self._is_refused or self._is_closed or self._n_waiting > _MOST_WAITING)

    def put(self, piece: _Piece) -> None:
        """Let the thread write a piece."""
        with self._changed:
            self._queue.append(piece)
            self._pending.add(piece.place)
            self._n_waiting += piece.n_bytes
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prompt-states", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                piece = self._queue.popleft()
            try:
                if not self._is_refused:
                    self._write(piece)
            except Exception as error:  # noqa: BLE001 - whoever waits for this thread would wait for ever
                self._refuse(error)
            with self._changed:
                self._n_waiting -= piece.n_bytes
                self._pending.discard(piece.place)
                self._changed.notify_all()

    def _write(self, piece: _Piece) -> None:
        header = msgspec.json.encode(piece.header)
        checksum = zlib.crc32(header)
        for state in piece.states:
            checksum = zlib.crc32(state.data, checksum)
        with self._folder.locked():
            size = _HEAD.size + len(header) + piece.n_bytes
            if not self._folder.make_room(size, self._limit, piece.used_ns):
                limit = f"the limit, {self._limit / 1e6:,.0f} MB, is too small for those in use"
                self.say(f"{self._path}: not all states are kept: {limit}")
                return
            with self._folder.writing(
                piece.place.name
            ) as file:  # not synced: after a power cut the checksum tells
                file.write(_HEAD.pack(_MAGIC, checksum, len(header)))
                file.write(header)
                for state in piece.states:
                    file.write(state.data)
                file.flush()
                os.utime(file.fileno(), ns=(piece.used_ns, piece.used_ns))
            for place in piece.replaces:
                self._folder.delete(place.name)

    def close(self) -> None:
        """Write what waits, and end the thread; Ctrl-C leaves out what is not begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread:
            try:
                self._thread.join()
            except KeyboardInterrupt:
                self._queue.clear()
                self._thread.join()
                raise


def state_files(folder: Path) -> BoundedFolder:
    """Return the files of states in a folder."""
    return BoundedFolder(folder, STATES.names, _MAGIC)


def _read_header(file: int, place: _PiecePlace) -> tuple[_PieceHeader, int]:
    """Return the header of an open file, and where the states begin. Raises DamagedFileError and OSError."""
    try:
        magic, _, size = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
        header = msgspec.json.decode(os.pread(file, size, _HEAD.size), type=_PieceHeader)
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError):
        raise DamagedFileError("damaged: no header") from None
    start = _HEAD.size + size
    if (
        magic != _MAGIC
        or _PiecePlace.after(place.model, place.before, header.tokens) != place
        or not header.sizes
    ):
        raise DamagedFileError("damaged: its header is another file's")
    if start + sum(n_bytes for _, n_bytes in header.sizes) != os.fstat(file).st_size:
        raise DamagedFileError("damaged: it was cut")
    return header, start


# ---- the states of one cache ----


def model_key(model: Model, sha256: str, *, n_ctx: int, n_threads: int) -> str:
    """Return a hash of all that the bits of a model's cache depend on; "" if that is not known.

    `sha256`: of the model's file, or of each part. Beside it: the libraries, the kernels, the processor, the
    type of the cache, and the positions' scheme where it depends on the context, `n_ctx` tokens. llama.cpp's
    own kernels may divide a sum among `n_threads`.
    """
    kernels = load_kernels() if model.uses_kernels else None
    test = kernels.self_test if kernels else None
    build = (test.build if test else "") if kernels else build_hash(STOCK)
    if not build:
        return ""
    header = model.header
    trained = header.gguf.integers(f"{header.architecture}.rope.scaling.original_context_length")
    parts = (
        sha256,
        build,
        header.cache_type,
        n_ctx > max(trained, default=n_ctx),  # the library has factors for short contexts, and for long ones
        0 if kernels else n_threads,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class PromptStates:
    """The states of one cache's sequences: written when they are long, or leave memory, and read again."""

    def __init__(self, folder: StateFolder, model: str, cache: KVCache) -> None:
        """Keep the states of `cache` in `folder`; `model`: its `model_key`."""
        self._folder, self._model, self._cache = folder, model, cache
        self._n_piece = PIECE if cache.has_parts else 1 << 31
        self._written: WeakKeyDictionary[Session, int] = WeakKeyDictionary()

    def _reach(self, header: _PieceHeader, n_same: int) -> int:
        """Return how many of `n_same` tokens a session has that begins with a piece."""
        if self._cache.has_parts:
            return n_same
        return max((n for n, _ in header.sizes if n <= n_same), default=0)

    # ---- reading ----

    def extend(self, session: Session, tokens: Sequence[int], make_room: Callable[[int], bool]) -> None:
        """Let `session`, which holds the beginning of `tokens`, go on with what is on disk.

        At most with all but the last of `tokens`. `make_room` frees cells, and returns whether it could.
        """
        n_before = session.n_past
        if len(tokens) - 1 - n_before < LEAST:
            return
        started = time.perf_counter()
        found = self._folder.find(self._model, tokens[:-1], self._n_piece, self._reach)
        n = sum(piece.n for piece in found)
        if n - n_before < LEAST or not make_room(n):
            return
        self._use(piece.place for piece in found)
        needed = [piece for piece in found if piece.at + piece.n > n_before]
        with ThreadPoolExecutor(2) as pool:  # a checksum takes longer than the copy
            for piece, states in zip(needed, pool.map(self._folder.load, needed), strict=True):
                if states is None or not self._put(session, piece, states):
                    break
        self._written[session] = session.n_past
        if (n := session.n_past - n_before) > 0:
            seconds = time.perf_counter() - started
            self._folder.tell(f"restored {n:,} tokens from disk in {seconds:.2f} s")

    def _put(self, session: Session, piece: _Found, states: Sequence[State]) -> bool:
        """Put a piece into the cache, after the tokens there; return whether the library could."""
        if self._cache.has_parts:
            tokens = piece.header.tokens[: piece.n]
            return self._cache.add_part(session.sequence, states[0], piece.at, tokens)
        copies = {n: state.copy() for (n, _), state in zip(piece.header.sizes[1:], states[1:], strict=True)}
        try:
            session.restore(states[0], piece.header.tokens, copies)
            return session.rewind(piece.n) == piece.n
        except EdgespecError as error:
            self._folder.say(str(error))
            return False

    def _use(self, places: Iterable[_PiecePlace]) -> None:
        now = time.time_ns()
        for i, place in enumerate(places):
            self._folder.touch(place, now - 1000 * i)

    # ---- writing ----

    def save_long(self, sessions: Iterable[Session]) -> None:
        """Write what is new of sequences where that is much, if the weights are known to be sound."""
        if self._cache.model.condition(wait=False) != "sound":
            return
        for session in sessions:
            n, n_written = session.n_past, self._written.get(session, 0)
            # A sequence that is written as a whole: when it is twice as long.
            if n - n_written >= (LONG if self._cache.has_parts else max(LONG, n_written)):
                self.save(session, tail=not self._cache.has_parts)

    def save(self, session: Session, *, tail: bool = True, waits: bool = False) -> None:
        """Write what is new of a sequence; `tail`: with a piece that may still grow.

        What is copied waits for the thread that writes; if too much does, `waits` says whether to wait too.
        """
        if self._cache.model.condition(wait=True) != "sound":
            return
        tokens = session.tokens
        self._written[session] = len(tokens)
        places = self._folder.known(self._model)
        before, now = _START, time.time_ns()
        for i, start in enumerate(range(0, len(tokens), self._n_piece)):
            part = tokens[start : start + self._n_piece]
            is_tail = len(part) < self._n_piece
            if is_tail and (not tail or len(part) < LEAST):
                return
            place = _PiecePlace.after(self._model, before, part)
            used_ns = now - 1000 * i
            if place in places:
                self._folder.touch(place, used_ns)
            else:
                siblings = self._siblings(places, before, part)
                if any(len(header.tokens) > len(part) for _, header in siblings) and self._cache.has_parts:
                    return  # a longer piece has all of this one
                if not self._folder.takes(waits=waits):
                    self._written[session] = start
                    if tail:
                        self._folder.say_too_slow()
                    return
                shorter = [one for one, header in siblings if len(header.tokens) < len(part)]
                self._write(session, place, (start, part), (used_ns, shorter))
            before = place.own

    def _siblings(
        self, places: Iterable[_PiecePlace], before: str, tokens: Sequence[int]
    ) -> list[tuple[_PiecePlace, _PieceHeader]]:
        """Return the pieces in the place of one of `tokens` that begin it, or begin with it."""
        found = [(one, self._folder.header(one)) for one in places if one.before == before]
        return [
            (one, header)
            for one, header in found
            if header and n_common(header.tokens, tokens) == min(len(header.tokens), len(tokens))
        ]

    def _write(
        self,
        session: Session,
        place: _PiecePlace,
        part: tuple[int, Sequence[int]],
        use: tuple[int, list[_PiecePlace]],
    ) -> None:
        start, tokens = part
        copies: dict[int, State] = {}
        try:
            if self._cache.has_parts:
                state = self._cache.part(session.sequence, start, start + len(tokens))
            else:
                state, copies = session.state(), session.copies()
        except EdgespecError as error:
            self._folder.say(str(error))
            return
        states = {len(tokens): state} | {n: copy for n, copy in copies.items() if n < len(tokens)}
        header = _PieceHeader(tuple(tokens), tuple((n, one.nbytes) for n, one in states.items()))
        self._folder.put(_Piece(place, header, [*states.values()], *use))
