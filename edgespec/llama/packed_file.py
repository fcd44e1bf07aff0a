"""Packed weights kept on disk: the next start maps them instead of packing them again (docs/kernels.md).

    PACKED_WEIGHTS.path()/                                a `BoundedFolder`
        0123456789abcdef-avx2-0123456789abcdef.weights    a model file, instruction set and build
            magic, {"tensors": [...], "size": ...}, a line    from the beginning
            the buffer of packed weights, as in memory        from 2 MiB on

A file is synced before it gets its name: no process maps half of one. Its modification time is set to the
year 2000, so that later writes are noticed without reading it. Corruption on the disk is noticed by the
checksum, which is compared while the first text is written (`WeightCheck`). A file that is not in the page
cache is not waited for: packing is about as fast as a good disk.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.platform.kept import PACKED_WEIGHTS, BoundedFolder, identity_of, write_all
from edgespec.platform.machine import available_bytes, cached_share
from edgespec.platform.processes import is_requested
from edgespec.platform.turns import IdleTime

if TYPE_CHECKING:
    from edgespec.llama.gguf_header import GGUFHeader

SWITCH = "EDGESPEC_PACKED_WEIGHTS"
"""Environment variable: "auto", or "off" to keep none and use none."""

LEAST_BYTES = 32 << 20
"""Smaller models are packed in a moment."""

MOST_BYTES = 16 << 30
"""Bytes of all files together; the least recently used are deleted, and those unused for a month."""

LEAST_FREE_SHARE = 0.1
"""Share of the disk that must remain free."""

_UNUSED_NS = 30 * 24 * 60 * 60 * 10**9
_SEAL_NS = 946_684_800 * 10**9  # 2000-01-01
_MAGIC, _FIRST_MAGIC = PACKED_WEIGHTS.magics
_DATA_AT = 2 << 20  # a huge page
_ALIGNMENT = 64  # of tensors in a buffer
_PIECE = 8 << 20  # large writes make large pages of the page cache
_SYNC_EVERY = 64 << 20  # Ctrl-C waits for no more than that
_CACHED_SHARE = 0.9
_NICE = 19


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
    checksum: int


class MappableWeights(NamedTuple):
    """An open file of packed weights, from which they can be mapped."""

    file: int
    offset: int
    size: int
    tensors: tuple[PackedTensor, ...]
    checksum: int


def _folder(magic: bytes = _MAGIC) -> BoundedFolder:
    return BoundedFolder(PACKED_WEIGHTS.path(), PACKED_WEIGHTS.names, magic, lambda found: found.st_atime_ns)


class PackedFile(msgspec.Struct, frozen=True):
    """The file that holds a model's packed weights, or would hold them."""

    folder: BoundedFolder
    name: str

    @contextmanager
    def opened(self) -> Iterator[MappableWeights | None]:
        """Yield the weights; None if there are no usable ones. Mappings remain after the block."""
        found = None
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context(self.folder.opened(self.name))
                contents = _read(file)
                if contents and cached_share(file, _DATA_AT, contents.size) >= _CACHED_SHARE:
                    os.utime(file, ns=(time.time_ns(), _SEAL_NS))
                    tensors = tuple(PackedTensor(*one) for one in contents.tensors)
                    found = MappableWeights(file, _DATA_AT, contents.size, tensors, contents.checksum)
            yield found

    def _is_whole(self) -> bool:
        with suppress(OSError), self.folder.opened(self.name) as file:
            return _read(file) is not None
        return False

    def discard(self) -> None:
        """Delete the unusable file."""
        self.folder.delete(self.name)

    def start_writing(
        self,
        tensors: Sequence[PackedTensor],
        owner: object,
        interrupt: Interrupt | None,
        on_message: MessageFn,
        idle: IdleTime,
    ) -> Thread | None:
        """Begin to write `tensors`; the thread keeps `owner`, and so their memory, until it ends.

        None if nothing is to be written. `on_message` takes a line that says what is kept, or why not.
        It is written in `idle` time; once all time is idle, `interrupt` ends it. An existing file that is
        not in the page cache is read into it.
        """
        size = _span(tensors)
        if size < LEAST_BYTES:
            return None
        if self._is_whole():
            Thread(target=self._read_ahead, args=(size,), name="packed-weights-read", daemon=True).start()
            return None
        path = self.folder.path
        try:
            self.folder.make()
            now = time.time_ns()
            _folder(_FIRST_MAGIC).make_room(0, 0, now)
            self.folder.make_room(0, 0, now - _UNUSED_NS)
            self.folder.make_room(size, MOST_BYTES, now)
            usage = shutil.disk_usage(path)
        except OSError as error:
            on_message(f"packed weights are not kept: {path}: {error.strerror}")
            return None
        if usage.free - size < LEAST_FREE_SHARE * usage.total:
            on_message(
                f"packed weights, {size / 1e9:.2f} GB, are not kept for quicker starts: "
                f"{usage.free / 1e9:.2f} GB of the disk are free ({SWITCH}=off says nothing)"
            )
            return None
        on_message(
            f"packed weights are kept for quicker starts, once, when no text is under way: "
            f"{size / 1e9:.2f} GB in {path} ({SWITCH}=off: not)"
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
        if not may_go_on() or self._is_whole():
            return
        try:
            with self.folder.locked(_give_way), self.folder.writing(self.name) as stream:
                _write(stream.fileno(), tensors, size, may_go_on)
        except (_BusyError, _StopError):
            pass
        except OSError as error:
            on_message(f"packed weights are not kept: {self.folder.path}: {error.strerror}")

    def _read_ahead(self, size: int) -> None:
        available = available_bytes()
        if available is None or available < 2 * size:
            return
        with suppress(OSError), self.folder.opened(self.name) as file:
            while os.read(file, _PIECE):  # what a short run leaves, the next one reads
                pass


Condition = Literal["unknown", "sound", "damaged"]
"""Of mapped weights."""


class WeightCheck:
    """The comparison of mapped weights with their checksum, in a thread.

    A damaged file is deleted, and the weights in memory are packed again. Earlier results are wrong.
    """

    def __init__(self, file: PackedFile, weights: MappableWeights, repair: Callable[[], None]) -> None:
        """Begin; `repair` packs the weights again, or raises EdgespecError."""
        self._file, self._weights, self._repair = file, weights, repair
        self._mapped = mmap.mmap(weights.file, weights.offset + weights.size, access=mmap.ACCESS_READ)
        self._is_stopped = False
        self._condition: Condition = "unknown"
        self._failure: EdgespecError | None = None
        self._thread = Thread(target=self._run, name="packed-weights-check", daemon=True)
        self._thread.start()

    def condition(self, *, wait: bool) -> Condition:
        """Return the known condition of the weights; for damaged ones, once they are packed again."""
        if wait or self._condition == "damaged":
            self._thread.join()
        return self._condition

    def accept(self) -> str:
        """Treat the weights as intact: nothing computed before they were packed again is left.

        Returns a line for the user. Raises EdgespecError if they could not be packed.
        """
        if self._failure:
            raise self._failure
        self._condition = "sound"
        path = self._file.folder.path / self._file.name
        return f"{path}: damaged (its checksum is another); deleted, and the weights are packed anew"

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # a pass does not wait for it
        repair = self._repair
        del self._repair  # which refers to the model
        checksum, start = 0, self._weights.offset
        with self._mapped, memoryview(self._mapped) as whole:
            for at in range(start, start + self._weights.size, _PIECE):
                if self._is_stopped:
                    return
                checksum = zlib.crc32(whole[at : at + _PIECE], checksum)
        if checksum == self._weights.checksum:
            self._condition = "sound"
            return
        self._condition = "damaged"
        self._file.discard()
        try:
            repair()
        except EdgespecError as error:
            self._failure = error


class _BusyError(Exception):
    """Another process writes."""


class _StopError(Exception):
    """The writing has to stop."""


def _give_way() -> None:
    raise _BusyError


def is_wanted() -> bool:
    """Whether packed weights are kept and used. Raises UsageError for a bad value of the variable."""
    word = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if word not in ("auto", "off"):
        raise UsageError(f"{SWITCH}={word}: must be auto or off")
    return word == "auto"


def packed_file(header: GGUFHeader, isa: str, build: str, part: str) -> PackedFile | None:
    """Return the file for a model's packed weights; None if unwanted, or if the model's file cannot be read.

    `build`: a hash of the packing code, "" if unknown. `part`: which of the file's weights are loaded.
    """
    if not build or header.file_bytes < LEAST_BYTES or not is_wanted():
        return None
    try:
        model = header.fingerprint()
        files = identity_of(header.path, *header.other_parts)
        digest = hashlib.sha256(f"{model} {files} {isa} {build} {part}".encode()).hexdigest()
        return PackedFile(_folder(), f"{model[:16]}-{isa}-{digest[:16]}.weights")
    except (OSError, EdgespecError):  # UsageError: no home directory
        return None


def _read(file: int) -> _Contents | None:
    """Return the header of the file; None if it is damaged."""
    found = os.fstat(file)
    os.posix_fadvise(file, 0, _DATA_AT, os.POSIX_FADV_RANDOM)  # reads no more than is asked for
    start = os.pread(file, _DATA_AT, 0)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_NORMAL)
    try:
        contents = msgspec.json.decode(start.removeprefix(_MAGIC).partition(b"\n")[0], type=_Contents)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    fits = (
        start.startswith(_MAGIC)
        and found.st_mtime_ns == _SEAL_NS
        and found.st_size == _DATA_AT + contents.size
    )
    return contents if fits else None


def _span(tensors: Sequence[PackedTensor]) -> int:
    """Return the size of the buffer that holds exactly `tensors`; 0 if they lie in several."""
    padded = [-(-one.bytes // _ALIGNMENT) * _ALIGNMENT for one in tensors]
    places = sorted((one.address, one.offset, n) for one, n in zip(tensors, padded, strict=True))
    at = 0
    for address, offset, n in places:
        if offset != at or address - places[0][0] != at:
            return 0
        at += n
    return at


def _write(file: int, tensors: Sequence[PackedTensor], size: int, may_go_on: Callable[[], bool]) -> None:
    """Write the file. Raises OSError, and _StopError if it has to stop."""
    write_all(file, _MAGIC, 0)
    memory = memoryview((ctypes.c_char * size).from_address(min(one.address for one in tensors))).cast("B")
    checksum = 0
    for start in range(0, size, _PIECE):
        if not may_go_on():
            raise _StopError
        piece = memory[start : start + _PIECE]
        checksum = zlib.crc32(piece, checksum)
        write_all(file, piece, _DATA_AT + start)
        if start % _SYNC_EVERY == 0:
            os.fdatasync(file)
    facts = tuple((one.name, one.type, one.rows, one.columns, one.bytes, one.offset) for one in tensors)
    head = _MAGIC + msgspec.json.encode(_Contents(facts, size, checksum)) + b"\n"
    if len(head) > _DATA_AT:
        raise _StopError
    write_all(file, head, 0)
    os.utime(file, ns=(time.time_ns(), _SEAL_NS))
    os.fsync(file)


def _started(work: Callable[[], None], owner: object) -> Thread:
    """Start a thread, for which the program waits at its end; it keeps `owner` alive."""
    thread = Thread(target=lambda _owner: work(), args=(owner,), name="packed-weights")
    thread.start()
    return thread
