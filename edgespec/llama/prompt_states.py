"""Prompt states on disk: the states of read prompts are stored, and a later process continues from them.

    FOLDER/                                      0700
        MODEL-TOKENS.state                       0600, a sequence
            magic, where the header begins           32 bytes
            the states, as llama.cpp writes them
            the header: tokens, sizes of states      JSON

platform/kept.py deletes the oldest, and describes the folder's other files.

A sequence is written when it leaves memory, and at the end. A prompt with a common prefix loads all of it and
cuts off the rest. A recurrent state, and a sliding window, cannot be cut: copies of earlier ones follow.

MODEL is a hash of all that the bits depend on (`model_key`, and the adapters), TOKENS one of all tokens. So a
name stands for one content, whichever process writes it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgespec.decoding.session import as_ints, n_common
from edgespec.errors import EdgespecError, MessageFn, once
from edgespec.llama.choices import StateRoom
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.rollback import State
from edgespec.llama.selftest import build_hash
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.kept import STATES, BoundedFolder, DamagedFileError

LEAST = 32
"""Tokens: reading fewer again takes no longer than looking for them."""

_MAGIC = STATES.magics[0]
_HEAD = struct.Struct("<24sQ")


class _StateInfo(NamedTuple):
    n_tokens: int
    n_bytes: int
    crc: int


class _Header(msgspec.Struct, frozen=True):
    tokens: list[int]
    states: list[_StateInfo]


class _StoredSequence(NamedTuple):
    """A file's name, and what its header says."""

    name: str
    tokens: array[int]
    states: list[_StateInfo]


class StateFolder:
    """The files of all models in one folder. One line reports a file that cannot be read or written."""

    def __init__(self, room: StateRoom, on_message: MessageFn) -> None:
        """Make the folder if there is none; `on_message` takes lines that the user should know."""
        self._path, self._limit = room
        self._folder = state_files(room.path)
        self.on_message = on_message
        """Takes lines for the user."""
        self.warn_once = once(on_message)
        """Report a line, unless it was reported before."""
        self._known: dict[str, _StoredSequence] = {}
        self._is_refused = False
        try:
            self._folder.make()
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        self._is_refused = True
        self.warn_once(f"states of prompts are not kept: {self._path}: {error.strerror}")

    def sequences(self, model: str) -> list[_StoredSequence]:
        """Return the sequences of a model; a damaged file is deleted."""
        found: dict[str, _StoredSequence] = {}
        for name in self._folder.names():
            if name.startswith(model) and name.count("-") == 1:
                try:
                    found[name] = self._known.get(name) or self._read_header(name)
                except (DamagedFileError, OSError) as error:
                    self._give_up(name, error)
        self._known = {name: one for name, one in self._known.items() if not name.startswith(model)} | found
        return [*found.values()]

    def _read_header(self, name: str) -> _StoredSequence:
        with self._folder.opened(name) as file:
            try:
                magic, start = _HEAD.unpack(os.pread(file, _HEAD.size, 0))
                header = msgspec.json.decode(
                    os.pread(file, os.fstat(file).st_size - start, start), type=_Header
                )
                tokens = array("i", header.tokens)
            except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, OverflowError, ValueError):
                raise DamagedFileError("damaged: no header") from None
        if magic != _MAGIC or _name(name[:16], tokens) != name or not header.states:
            raise DamagedFileError("damaged: its header is another file's")
        if start != _HEAD.size + sum(state.n_bytes for state in header.states):
            raise DamagedFileError("damaged: not as long as its header says")
        return _StoredSequence(name, tokens, header.states)

    def states(self, stored: _StoredSequence) -> list[State]:
        """Return the states of a sequence, mapped; if one is damaged, return none and delete the file."""
        try:
            with self._folder.opened(stored.name) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
        except OSError as error:
            self._give_up(stored.name, error)
            return []
        found, start = [], _HEAD.size
        for state in stored.states:
            part = mapped[start : start + state.n_bytes]
            start += state.n_bytes
            if zlib.crc32(part) != state.crc:
                self._give_up(stored.name, DamagedFileError("damaged: its checksum is another"))
                return []
            found.append(np.frombuffer(part, np.uint8))
        return found

    def _give_up(self, name: str, error: DamagedFileError | OSError) -> None:
        """Delete a damaged file, with a message unless it is gone already."""
        path = self._path / name
        self._known.pop(name, None)
        if isinstance(error, DamagedFileError):
            if self._folder.delete(name):
                self.warn_once(f"{path}: {error}; deleted")
        elif not isinstance(error, FileNotFoundError):
            self.warn_once(f"{path}: {error.strerror or error}; not used")

    def touch(self, stored: _StoredSequence) -> None:
        """Note that a sequence was used."""
        with suppress(OSError):
            os.utime(self._path / stored.name)

    def write(
        self,
        model: str,
        tokens: array[int],
        states: Iterator[tuple[int, State]],
        n_bytes: int,
        replaced: Sequence[_StoredSequence] = (),
    ) -> None:
        """Write a sequence, which replaces those in `replaced`.

        `states`: each with its number of tokens, about `n_bytes` in all.
        """
        if self._is_refused:
            return
        try:
            with self._folder.locked():
                if not self._folder.make_room(n_bytes, self._limit, time.time_ns()):
                    limit = f"the limit, {self._limit / 1e6:,.0f} MB, is too small for one of them"
                    self.warn_once(f"{self._path}: not all states are kept: {limit}")
                    return
                with self._folder.writing(_name(model, tokens)) as file:  # not synced: checksums tell
                    file.write(_HEAD.pack(_MAGIC, 0))
                    written = []
                    for n, state in states:
                        file.write(state.data)
                        written.append(_StateInfo(n, state.nbytes, zlib.crc32(state.data)))
                    start = file.tell()
                    file.write(msgspec.json.encode(_Header(tokens.tolist(), written)))
                    file.seek(0)
                    file.write(_HEAD.pack(_MAGIC, start))
                for one in replaced:
                    self._folder.delete(one.name)
        except OSError as error:
            self._refuse(error)


def state_files(folder: Path) -> BoundedFolder:
    """Return a folder's files of states; those of earlier formats are only deleted."""
    return BoundedFolder(folder, STATES.names, _MAGIC.partition(b" state ")[0])


def _name(model: str, tokens: array[int]) -> str:
    return f"{model}-{hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()}.state"


# ---- the states of one cache ----


def model_key(model: Model, sha256: str, *, n_ctx: int, n_threads: int) -> str:
    """Return a hash of all that the bits of a model's cache depend on; "" if that is unknown.

    `sha256`: of the model's file, or of each part. Also hashed: the libraries, the kernels, the processor,
    the type of the cache, and the position scheme if it depends on the context, `n_ctx` tokens. llama.cpp's
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
        _MAGIC,
        sha256,
        build,
        header.cache_type,
        n_ctx > max(trained, default=n_ctx),  # the library has factors for short contexts, and for long ones
        0 if kernels else n_threads,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class PromptStates:
    """The states of one cache's sequences: written when they leave memory, and read again."""

    def __init__(self, folder: StateFolder, model: str, cache: KVCache) -> None:
        """Keep the states of `cache` in `folder`; `model`: its `model_key`."""
        self._folder, self._model, self._cache = folder, model, cache

    def _key(self, session: Session) -> str:
        """Return what names files of the model as `session` runs it, with its adapters."""
        adapters = self._cache.model.adapters.key(session.adapters)
        both = hashlib.blake2b(f"{self._model} {adapters}".encode(), digest_size=8)
        return both.hexdigest() if adapters else self._model

    def _reach(self, stored: _StoredSequence, tokens: array[int]) -> int:
        """Return how many of `tokens` a session has that begins with a stored sequence."""
        n_same = n_common(stored.tokens, tokens)
        if self._cache.cuts_anywhere:
            return n_same
        return max((one.n_tokens for one in stored.states if one.n_tokens <= n_same), default=0)

    def extend(self, session: Session, tokens: Sequence[int], make_room: Callable[[int], bool]) -> None:
        """Extend `session`, which holds the beginning of `tokens`, by what is on disk.

        At most to all but the last of `tokens`. `make_room` frees cells, and returns whether it could.
        """
        n_before, wanted = session.n_past, as_ints(tokens)[:-1]
        if len(wanted) - n_before < LEAST:
            return
        started = time.perf_counter()
        known = self._folder.sequences(self._key(session))
        reaches = [(self._reach(one, wanted), one) for one in known if len(one.tokens) <= self._cache.n_ctx]
        n, stored = max(reaches, key=lambda one: one[0], default=(0, None))
        if stored is None or n - n_before < LEAST or not make_room(len(stored.tokens)):
            return
        self._folder.touch(stored)
        if not (states := self._folder.states(stored)):
            return
        later = zip(stored.states[1:], states[1:], strict=True)
        try:
            session.restore(states[0], stored.tokens, {one.n_tokens: copy.copy() for one, copy in later})
            session.rewind(n)
        except EdgespecError as error:
            self._folder.warn_once(str(error))
        if (n := session.n_past - n_before) > 0:
            seconds = time.perf_counter() - started
            self._folder.on_message(f"restored {n:,} tokens from disk in {seconds:.2f} s")

    def save(self, session: Session) -> None:
        """Write a sequence, which replaces those that are its prefixes.

        It is not written if it is itself a prefix of one on disk, or the weights may be damaged.
        """
        tokens = session.written[:]
        if len(tokens) < LEAST or self._cache.model.condition(wait=True) != "sound":
            return
        others = self._folder.sequences(key := self._key(session))
        for stored in others:
            known = stored.tokens[: len(tokens)] if self._cache.cuts_anywhere else stored.tokens
            if known == tokens:
                self._folder.touch(stored)
                return
        n_bytes = session.state_bytes + 16 * len(tokens)
        shorter = [one for one in others if tokens[: len(one.tokens)] == one.tokens]
        try:
            self._folder.write(key, tokens, self._states(session), n_bytes, shorter)
        except (EdgespecError, MemoryError) as error:
            self._folder.warn_once(str(error) or "a prompt's states are not kept: out of memory")

    def _states(self, session: Session) -> Iterator[tuple[int, State]]:
        yield session.n_past, session.state()
        yield from ((n, copy) for n, copy in session.copies().items() if n < session.n_past)
