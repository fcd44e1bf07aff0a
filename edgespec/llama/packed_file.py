"""Packed weights kept on disk: the next start maps them instead of packing them again (docs/kernels.md).

    PACKED_WEIGHTS.path()/                                0700
        0123456789abcdef-avx2-0123456789abcdef.weights    0600, a model file, instruction set and build
            {"tensors": [...], "size": ...}, a line          from the beginning
            the buffer of packed weights, as in memory    from 2 MiB on
        .lock                                             held by the process that writes

A file is written under another name, synced and renamed: no process maps half of one. Its time of change is
set to the year 2000, so that one to which anything was written since is known without reading it. A file that
is not in the page cache is not waited for: packing is about as fast as a good disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import msgspec

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import GGUFHeader, file_fingerprint
from edgespec.platform.files import temporary_path
from edgespec.platform.kept import PACKED_WEIGHTS
from edgespec.platform.locks import locked
from edgespec.platform.memory import available_bytes, cached_share
from edgespec.platform.messages import MessageFn
from edgespec.platform.signals import is_requested
from edgespec.platform.state_file import write_all
from edgespec.platform.turns import IdleTime

SWITCH = "EDGESPEC_PACKED_WEIGHTS"
"""Environment variable: "auto", or "off" to keep none and use none."""

LEAST_BYTES = 32 << 20
"""Smaller models are packed in a moment."""

MOST_BYTES = 16 << 30
"""Bytes of all files together; those unused for longest are deleted, and those unused for a month."""

LEAST_FREE_SHARE = 0.1
"""Share of the disk that must remain free."""

_UNUSED_S = 30 * 24 * 60 * 60.0
_SEAL_NS = 946_684_800 * 10**9  # 2000-01-01
_DATA_AT = 2 << 20  # a huge page
_ALIGNMENT = 64  # of tensors in a buffer
_PIECE = 8 << 20  # large writes make large pages of the page cache
_SYNC_EVERY = 64 << 20  # Ctrl-C waits for no more than that
_CACHED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight matrix that was rearranged for the kernels."""

    name: str
    type: str
    rows: int
    columns: int
    bytes: int
    """Packed size."""
    offset: int = 0
    """Its place in the buffer of packed weights."""
    address: int = field(default=0, compare=False)
    """Its place in memory while the model is loaded."""


class _Contents(msgspec.Struct):
    tensors: tuple[tuple[str, str, int, int, int, int], ...]
    size: int


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The place where a model's packed weights are kept, or would be."""

    path: Path

    @contextmanager
    def opened(self) -> Iterator[tuple[int, int, int, tuple[PackedTensor, ...]] | None]:
        """Yield (descriptor, offset, bytes, tensors) of the weights; None if there are none to be used.

        A damaged file is deleted. What was mapped stays mapped after the block.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            contents = _read(file)
            if contents is None:
                self.discard()
                yield None
            elif cached_share(file, _DATA_AT, contents.size) < _CACHED_SHARE:
                yield None
            else:
                os.utime(file, ns=(time.time_ns(), _SEAL_NS))
                tensors = tuple(PackedTensor(*one) for one in contents.tensors)
                yield file, _DATA_AT, contents.size, tensors
        finally:
            os.close(file)

    def discard(self) -> None:
        """Delete the file, which cannot be used."""
        with suppress(OSError):
            self.path.unlink()

    def keep(
        self,
        tensors: Sequence[PackedTensor],
        owner: object,
        interrupt: Interrupt | None,
        on_message: MessageFn,
        idle: IdleTime,
    ) -> Thread | None:
        """Begin to write `tensors`, which must stay in memory until the thread has ended, as `owner` does.

        None if nothing is to be written. `on_message` takes a line that says what is kept, or why not.
        It is written in `idle` time; once that is all, `interrupt` ends it. A file that is there, but not in
        the page cache, is read into it.
        """
        size = _span(tensors)
        if size < LEAST_BYTES:
            return None
        if self.path.exists():
            Thread(target=self._read_ahead, args=(size,), name="packed-weights-read", daemon=True).start()
            return None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_surplus(self.path.parent, size)
            usage = shutil.disk_usage(self.path.parent)
        except OSError as error:
            on_message(f"packed weights are not kept: {self.path.parent}: {error.strerror}")
            return None
        if usage.free - size < LEAST_FREE_SHARE * usage.total:
            on_message(
                f"packed weights, {size / 1e9:.2f} GB, are not kept for quicker starts: "
                f"{usage.free / 1e9:.2f} GB of the disk are free ({SWITCH}=off says nothing)"
            )
            return None
        on_message(
            f"packed weights are kept for quicker starts, once, when no text is under way: "
            f"{size / 1e9:.2f} GB in {self.path.parent} ({SWITCH}=off: not)"
        )

        def may_go_on() -> bool:
            idle.wait()
            return not (idle.is_over and is_requested(interrupt))

        def write() -> None:
            with idle.turn:
                self._write(tensors, size, may_go_on, on_message)

        return _started(write, owner)

    def _write(
        self,
        tensors: Sequence[PackedTensor],
        size: int,
        may_go_on: Callable[[], bool],
        on_message: MessageFn,
    ) -> None:
        if not may_go_on() or self.path.exists():
            return
        try:
            with locked(self.path.with_name(".lock"), _give_way, mode=0o600):
                for left in self.path.parent.glob(".edgespec-*.tmp"):  # of a process that was killed
                    left.unlink(missing_ok=True)
                _write(self.path, tensors, size, may_go_on)
        except _BusyError:
            pass
        except OSError as error:
            on_message(f"packed weights are not kept: {self.path.parent}: {error.strerror}")

    def _read_ahead(self, size: int) -> None:
        available = available_bytes()
        if available is None or available < 2 * size:
            return
        with suppress(OSError), self.path.open("rb", buffering=0) as file:
            buffer = bytearray(_PIECE)
            while file.readinto(buffer):  # what a short run leaves, the next one reads
                pass


class _BusyError(Exception):
    """Another process writes."""


def _give_way() -> None:
    raise _BusyError


def is_wanted() -> bool:
    """Whether packed weights are kept and used. Raises UsageError for a bad value of the variable."""
    word = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if word not in ("auto", "off"):
        raise UsageError(f"{SWITCH}={word}: must be auto or off")
    return word == "auto"


def packed_file(header: GGUFHeader, isa: str, build: str, part: str) -> PackedFile | None:
    """Return the place of a model's packed weights; None if none are wanted, or its file cannot be read.

    `build`: a hash of all that packs, "" if it is not known. `part`: which of the file's weights are loaded.
    """
    if not build or header.file_bytes < LEAST_BYTES or not is_wanted():
        return None
    try:
        model = file_fingerprint(header)
        times = [path.stat().st_mtime_ns for path in (header.path, *header.other_parts)]
        digest = hashlib.sha256(f"{model} {times} {isa} {build} {part}".encode()).hexdigest()
        return PackedFile(PACKED_WEIGHTS.path() / f"{model[:16]}-{isa}-{digest[:16]}.weights")
    except (OSError, EdgespecError):  # UsageError: no home directory
        return None


def _read(file: int) -> _Contents | None:
    """The file's description of itself; None if it is damaged, or not only this user's."""
    found = os.fstat(file)
    if found.st_mtime_ns != _SEAL_NS or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return None
    try:
        os.posix_fadvise(file, 0, _DATA_AT, os.POSIX_FADV_RANDOM)  # reads no more than is asked for
        contents = msgspec.json.decode(os.pread(file, _DATA_AT, 0).partition(b"\n")[0], type=_Contents)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_NORMAL)
    fits = stat.S_ISREG(found.st_mode) and found.st_size == _DATA_AT + contents.size
    return contents if fits else None


def _span(tensors: Sequence[PackedTensor]) -> int:
    """Return the bytes of the buffer that holds exactly `tensors`; 0 if they lie in several."""
    padded = [-(-one.bytes // _ALIGNMENT) * _ALIGNMENT for one in tensors]
    places = sorted((one.address, one.offset, n) for one, n in zip(tensors, padded, strict=True))
    at = 0
    for address, offset, n in places:
        if offset != at or address - places[0][0] != at:
            return 0
        at += n
    return at


def _delete_surplus(folder: Path, size: int) -> None:
    """Delete the files unused for longest that leave no room for `size` bytes, and those unused for long."""
    others = []
    for other in folder.glob("*.weights"):
        with suppress(OSError):
            others.append((other.stat().st_atime, other.stat().st_size, other))
    total = size
    for used, n, other in sorted(others, reverse=True):
        total += n
        if total > MOST_BYTES or time.time() - used > _UNUSED_S:
            other.unlink(missing_ok=True)


def _write(path: Path, tensors: Sequence[PackedTensor], size: int, may_go_on: Callable[[], bool]) -> None:
    """Write the file, or none if it may not go on. Raises OSError."""
    facts = tuple((one.name, one.type, one.rows, one.columns, one.bytes, one.offset) for one in tensors)
    head = msgspec.json.encode(_Contents(facts, size)) + b"\n"
    if len(head) > _DATA_AT:
        return
    memory = memoryview((ctypes.c_char * size).from_address(min(one.address for one in tensors))).cast("B")
    new = temporary_path(path)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(file, head, 0)
            for start in range(0, size, _PIECE):
                if not may_go_on():
                    return
                write_all(file, memory[start : start + _PIECE], _DATA_AT + start)
                if start % _SYNC_EVERY == 0:
                    os.fdatasync(file)
            os.utime(file, ns=(time.time_ns(), _SEAL_NS))
            os.fsync(file)
        finally:
            os.close(file)
        new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _started(work: Callable[[], None], owner: object) -> Thread:
    """Start a thread, which the program's end waits for; `owner` lives as long."""
    thread = Thread(target=lambda _owner: work(), args=(owner,), name="packed-weights")
    thread.start()
    return thread
