"""The only module that imports `llama_cpp`, which it re-exports as `llama`.

Importing it starts the library, takes over its log (nothing is printed; the last warnings and errors are
kept for our own messages) and its abort (a failed assertion becomes one line on stderr and exit code 1).
`quantize` runs in a child process, because the library cannot be interrupted there and may crash on a
damaged file.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

# Read when the library is loaded: without it an abort attaches a debugger and prints a backtrace.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.boards import wheel_for_another_board
from edgespec.platform.child import ReportingChild, answer, say
from edgespec.platform.files import lines_of
from edgespec.platform.limits import is_refusal, why_refused

if _problem := wheel_for_another_board():
    raise EdgespecError(_problem)  # loading the library would end in SIGILL

try:
    from llama_cpp import llama_cpp as llama
except RuntimeError as error:
    if is_refusal(str(error)):
        raise
    raise EdgespecError(
        f"llama.cpp's library cannot be loaded: {error.__context__ or error}; "
        f"install llama-cpp-python again, built for {os.uname().machine}"
    ) from error
from llama_cpp.llama_speculative import LlamaDraftModel

__all__ = [
    "QUANT_TYPES",
    "Interruption",
    "LlamaDraftModel",
    "address_of",
    "clear_log",
    "cpu_backend",
    "create",
    "failure_reason",
    "foreign_function",
    "interruptible",
    "last_log_error",
    "library_folder",
    "library_version",
    "llama",
    "quantize",
    "whole_log",
]

QUANT_TYPES: dict[str, int] = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 8,
    "q5_1": 9,
    "q8_0": 7,
    "q2_k": 10,
    "q3_k_s": 11,
    "q3_k_m": 12,
    "q3_k_l": 13,
    "q4_k_s": 14,
    "q4_k_m": 15,
    "q5_k_s": 16,
    "q5_k_m": 17,
    "q6_k": 18,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "f16": 1,
    "bf16": 32,
    "f32": 0,
}
"""Quantization types that `quantize` makes: lower-case name -> `enum llama_ftype`."""

_T = TypeVar("_T")

_LEVEL_INFO, _LEVEL_WARN, _LEVEL_ERROR = 2, 3, 4

_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=64)


def foreign_function(name: str, restype: type | None, *argtypes: type) -> Callable[..., Any]:
    """Return a C function of libllama or of the ggml libraries it is linked with.

    Looked up through libllama's own handle: opening `libggml-base.so` by name would load a second
    copy beside the `libggml-base.so.0` in use, with a log and an abort hook of its own. Indexing
    gives a fresh function object, so `llama_cpp`'s prototypes are not changed.
    """
    function = cast("ctypes.CDLL", llama._lib)[name]
    function.restype = restype
    function.argtypes = argtypes
    return cast("Callable[..., Any]", function)


def address_of(name: str) -> int:
    """Return the address of a C function of libllama, for another library that calls it."""
    return ctypes.cast(cast("ctypes.CDLL", llama._lib)[name], ctypes.c_void_p).value or 0


def _keep_log_line(level: int, text: bytes | None, _user_data: int | None) -> None:
    if _LEVEL_WARN <= level <= _LEVEL_ERROR and text:
        _log.append((level, text.decode(errors="replace").strip()))


def _stop_in_one_line(message: bytes) -> None:
    """End the process with one line where the library would dump core."""
    place, _, what = message.decode(errors="replace").partition(": ")
    reason = " ".join(f"{place.rpartition('/')[2]}: {what}".split())
    line = (
        f"edgespec: error: llama.cpp stopped: {reason} - the model file may be damaged; "
        "check it with `edgespec models verify`\n"
    )
    os.write(2, line.encode(errors="replace"))
    os._exit(EdgespecError.exit_code)


def library_folder() -> Path:
    """Return the folder of llama.cpp's libraries."""
    return Path(llama._lib._name).parent


def _load_cpu_backend() -> str:
    """Load ggml's CPU backend for this processor, where it lies beside the library in several variants.

    Returns "" or why there is none, in one line. Without this call the library would look for one in the
    folder that it is called in.
    """
    count = foreign_function("ggml_backend_reg_count", ctypes.c_size_t)
    if count():  # linked with the library
        return ""
    load_best = foreign_function("ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    folder = library_folder()
    load_best(os.fsencode(folder))
    if count():
        return ""
    return (
        f"{folder}: none of llama.cpp's CPU backends there (libggml-cpu-*.so) runs on this processor, an "
        f"{os.uname().machine}; install llama-cpp-python again, built for it"
    )


_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
# The library keeps these addresses until the process ends, so the objects must live as long.
_log_callback = llama.llama_log_callback(_keep_log_line)
_abort_callback = _AbortCallback(_stop_in_one_line)
llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
foreign_function("ggml_set_abort_callback", ctypes.c_void_p, _AbortCallback)(_abort_callback)
if _problem := _load_cpu_backend():
    raise EdgespecError(_problem)
llama.llama_backend_init()


def clear_log() -> None:
    """Forget the kept lines, so that `last_log_error` tells of later failures only."""
    _log.clear()


def last_log_error() -> str | None:
    """Return why the library failed since `clear_log`, without the C function's name; None if unknown.

    That is the first error, else the newest warning: the cause is logged first, then a line from each caller
    that only repeats that it failed.
    """
    errors = [text for level, text in _log if level == _LEVEL_ERROR]
    warnings = [text for level, text in _log if level == _LEVEL_WARN]
    cause = errors[:1] or warnings[-1:]
    return " ".join(cause[0].split(": ", 1)[-1].split()) if cause else None


def failure_reason() -> str:
    """Return why the library failed, for a message."""
    reason = last_log_error() or "the library gives no reason"
    limits = why_refused() if is_refusal(reason) else ""
    return f"{reason}; {limits}" if limits else reason


@contextlib.contextmanager
def whole_log() -> Iterator[list[str]]:
    """Inside the block the list gets all that the library logs, in the pieces in which it does."""
    pieces: list[str] = []

    def keep(_level: int, text: bytes | None, _user_data: int | None) -> None:
        pieces.append((text or b"").decode(errors="replace"))

    callback = llama.llama_log_callback(keep)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield pieces
    finally:
        llama.llama_log_set(_log_callback, ctypes.c_void_p(0))


def library_version() -> str:
    """Return the version of the llama.cpp build in use."""
    return cast("bytes", llama.llama_version()).decode()


def cpu_backend() -> str:
    """Return which variant of ggml's CPU backend is in use, such as "zen4"; "" if there is one for all."""
    maps = lines_of(Path("/proc/self/maps"))
    found = (re.search(r"/libggml-cpu-([^/]+)\.so$", line) for line in maps)
    return next((name[1] for name in found if name), "")


class Interruption:
    """Whether Ctrl-C arrived while the library was running our callbacks."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """At the end of the block, raise a KeyboardInterrupt that arrived inside a ctypes callback.

    ctypes cannot pass exceptions through C: a Ctrl-C while the library logs or reports progress would be
    printed and lost. This block notes it; a callback that can stop the library checks
    `Interruption.requested`. Outside the main thread, where Python delivers no signals, nothing changes.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = sys.unraisablehook

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            interruption.requested = True
        else:
            previous(unraisable)

    sys.unraisablehook = note
    try:
        yield interruption
    finally:
        sys.unraisablehook = previous
    if interruption.requested:
        raise KeyboardInterrupt


class NodeWatcher(Protocol):
    """A watcher of the nodes that the library uses (placement.py)."""

    def call(self, n_tokens: int = 0, interrupt: Interrupt | None = None) -> AbstractContextManager[None]:
        """Let the library use them inside the block; raise at its end if one was lost."""


def create(
    make: Callable[[Interruption], _T | None],
    free: Callable[[_T], object],
    remote: NodeWatcher | None = None,
    interrupt: Interrupt | None = None,
) -> _T | None:
    """Return the library's object that `make` makes, None if it fails; on Ctrl-C free it and raise.

    Clears the log first, so that `failure_reason` is about this call. `remote`: the nodes that it uses; where
    one is lost the object is freed too. `interrupt` ends the wait for them.
    """
    clear_log()
    on_nodes = remote.call(interrupt=interrupt) if remote else contextlib.nullcontext()
    made: _T | None = None
    try:
        with interruptible() as interruption, on_nodes:
            made = make(interruption)
    except BaseException:
        if made is not None:
            free(made)
        raise
    return made


def quantize(
    src: Path,
    dst: Path,
    type_name: str,
    *,
    pure: bool = False,
    n_threads: int = 0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write `src` converted to `type_name` as `dst`; already quantized tensors are requantized.

    `pure` gives every tensor the same type instead of llama.cpp's mixture. `n_threads` 0 means all
    processors. `on_progress` takes the number of the next tensor and their total; an exception from it ends
    the work. `dst` appears complete or not at all, also on Ctrl-C; an older file is replaced.
    Raises UsageError for an unknown type or `src == dst`, EdgespecError when the library fails.
    """
    if type_name not in QUANT_TYPES:
        raise UsageError(f"unknown quantization type {type_name!r}; known: {', '.join(QUANT_TYPES)}")
    if dst.exists() and src.samefile(dst):
        raise UsageError(f"{src}: the quantized file needs another name than its source")
    try:
        handle, name = tempfile.mkstemp(dir=dst.parent, prefix=f"{dst.name}.part.")
    except OSError as error:
        raise EdgespecError(f"cannot write to {dst.parent}: {error.strerror}") from error
    os.close(handle)
    part = Path(name)
    try:
        conversion = _Conversion(
            os.fsencode(src.absolute()), os.fsencode(part.absolute()), QUANT_TYPES[type_name], pure, n_threads
        )
        failure = _quantize_in_child(conversion, part, on_progress)
        if failure is not None:
            raise EdgespecError(f"cannot quantize {src} to {type_name}: {failure}")
        part.chmod(0o644)  # mkstemp's 0600 is for secrets; a model is shared like its source
        part.replace(dst)
    finally:
        part.unlink(missing_ok=True)


class _Conversion(msgspec.Struct, frozen=True):
    """The request to the child process of `quantize`."""

    src: bytes
    part: bytes
    ftype: int
    pure: bool
    n_threads: int


def _quantize_in_child(
    conversion: _Conversion, part: Path, on_progress: Callable[[int, int], None]
) -> str | None:
    """Run the conversion; None on success, else the reason in one line."""
    child = ReportingChild("edgespec.llama.backend", "_quantize_here", conversion)
    for _, (done, total) in child:
        on_progress(done, total)
    if child.ended.code == 0:
        return None
    if shutil.disk_usage(part.parent).free < 1 << 20:
        return f"no space left on the disk of {part.parent}"
    return child.ended.complaint or f"the converter ended with code {child.ended.code}"


def _quantize_here() -> int:
    """In the child: convert and return the exit code; the reason of a failure goes to stderr."""
    return answer(_Conversion, _convert)


def _convert(conversion: _Conversion) -> None:
    def tell(level: int, text: bytes | None, user_data: int | None) -> None:
        if level == _LEVEL_INFO and (tensor := re.match(rb"\[ *(\d+)/ *(\d+)\]", text or b"")):
            say("tensor", (int(tensor[1]), int(tensor[2])))
        _keep_log_line(level, text, user_data)

    log_callback = llama.llama_log_callback(tell)
    llama.llama_log_set(log_callback, ctypes.c_void_p(0))
    params = llama.llama_model_quantize_default_params()
    params.ftype = conversion.ftype
    params.pure = conversion.pure
    params.nthread = conversion.n_threads
    params.allow_requantize = True
    code = llama.llama_model_quantize(conversion.src, conversion.part, ctypes.byref(params))
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    if code:
        raise EdgespecError(last_log_error() or "llama.cpp gives no reason")
