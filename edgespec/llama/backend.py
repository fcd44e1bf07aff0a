"""The only module that imports `llama_cpp`, which it re-exports as `llama`.

Importing it starts the library, takes over its log (nothing is printed; the last warnings and errors are
kept for our own messages) and its abort (a failed assertion becomes one line on stderr and exit code 1).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

# Read when the library is loaded: without it an abort attaches a debugger and prints a backtrace.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from edgespec.errors import EdgespecError
from edgespec.platform.files import lines_of
from edgespec.platform.machine import is_refusal, why_refused


def bindings(name: str) -> ModuleType:
    """Import a module of the package `llama_cpp` without the package's own import of everything."""
    if "llama_cpp" in sys.modules or not (found := importlib.util.find_spec("llama_cpp")):
        return importlib.import_module(name)
    sys.modules["llama_cpp"] = importlib.util.module_from_spec(found)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["llama_cpp"]  # whoever imports the package gets all of it


try:
    if TYPE_CHECKING:
        import llama_cpp.llama_cpp

        llama = llama_cpp.llama_cpp
    else:
        llama = bindings("llama_cpp.llama_cpp")
except RuntimeError as error:
    if is_refusal(str(error)):
        raise
    raise EdgespecError(
        f"llama.cpp's library cannot be loaded: {error.__context__ or error}; "
        f"install llama-cpp-python again, built for {os.uname().machine}"
    ) from error

_T = TypeVar("_T")

_LEVEL_WARN, _LEVEL_ERROR = 3, 4

_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=64)


def foreign_function(name: str, restype: type | None, *argtypes: type) -> Callable[..., Any]:
    """Return a C function of libllama or of the ggml libraries it is linked with.

    It is looked up through libllama's own handle: opening `libggml-base.so` by name would load a second
    copy besides the `libggml-base.so.0` in use, with its own log and abort hook. Indexing
    returns a fresh function object, so `llama_cpp`'s prototypes are not changed.
    """
    function = cast("ctypes.CDLL", llama._lib)[name]
    function.restype = restype
    function.argtypes = argtypes
    return cast("Callable[..., Any]", function)


def address_of(name: str) -> int:
    """Return the address of a C function of libllama, for another library that calls it."""
    return ctypes.cast(cast("ctypes.CDLL", llama._lib)[name], ctypes.c_void_p).value or 0


def _store_log_line(level: int, text: bytes | None, _user_data: int | None) -> None:
    if _LEVEL_WARN <= level <= _LEVEL_ERROR and text:
        _log.append((level, text.decode(errors="replace").strip()))


def _stop_in_one_line(message: bytes) -> None:
    place, _, what = message.decode(errors="replace").partition(": ")
    reason = " ".join(f"{place.rpartition('/')[2]}: {what}".split())
    if place.startswith("ggml-rpc") or "/ggml-rpc" in place:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write("\n" if sys.stdout.isatty() else "")
            sys.stdout.flush()  # the text so far
        problem = f"a node of --rpc is lost ({reason}); look whether `edgespec node` still runs there"
    else:
        problem = (
            f"llama.cpp stopped: {reason} - the model file may be damaged; "
            "check it with `edgespec models verify`"
        )
    os.write(2, f"edgespec: error: {problem}\n".encode(errors="replace"))
    os._exit(EdgespecError.exit_code)


def library_folder() -> Path:
    """Return the folder of llama.cpp's libraries."""
    return Path(llama._lib._name).parent


def _load_cpu_backend() -> str:
    """Load ggml's CPU backend for this processor, if several variants lie in the library's folder.

    Returns "" or in one line why there is none. Without this call the library would look for one in the
    current folder.
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


_PAUSE_HARD = 2  # omp_pause_resource_t
_AbortCallback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
# The library keeps these addresses until the process ends, so the objects must live as long.
_log_callback = llama.llama_log_callback(_store_log_line)
_abort_callback = _AbortCallback(_stop_in_one_line)
_set_log = llama.llama_log_set
_set_log(_log_callback, ctypes.c_void_p(0))


def _leave_log(callback: Any, user_data: Any) -> None:  # noqa: ANN401 - as the library's function
    if llama.llama_log_set is _leave_log:
        llama.llama_log_set = _set_log
    else:
        _set_log(callback, user_data)


if "llama_cpp" not in sys.modules:
    llama.llama_log_set = _leave_log
foreign_function("ggml_set_abort_callback", ctypes.c_void_p, _AbortCallback)(_abort_callback)
if _problem := _load_cpu_backend():
    raise EdgespecError(_problem)
llama.llama_backend_init()


def _end_threads_before_forks() -> None:
    """Let a forked child run passes: OpenMP keeps threads between passes, and a child would wait for them.

    They end before a fork, and start again with the next pass.
    """
    for library in (llama._lib._name, "libgomp.so.1"):
        with contextlib.suppress(OSError, AttributeError):  # none of these, or an old one
            pause = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all
            os.register_at_fork(before=functools.partial(pause, _PAUSE_HARD))
            return


_end_threads_before_forks()


def take_log(set_log: Callable[[Any, Any], object]) -> None:
    """Keep what another library logs as well; `set_log`: its function that takes a callback."""
    set_log(_log_callback, ctypes.c_void_p(0))


def clear_log() -> None:
    """Forget the kept lines, so that `last_log_error` reports only later failures."""
    _log.clear()


def last_log_error() -> str | None:
    """Return why the library failed since `clear_log`, without the C function's name; None if unknown.

    That is the first error, else the newest warning: the cause is logged first, and then each caller logs
    that it failed.
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
def whole_log(on_piece: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, `on_piece` gets all that the library logs, piece by piece."""

    def keep(level: int, text: bytes | None, user_data: int | None) -> None:
        _store_log_line(level, text, user_data)
        on_piece((text or b"").decode(errors="replace"))

    callback = llama.llama_log_callback(keep)
    _set_log(callback, ctypes.c_void_p(0))
    try:
        yield
    finally:
        _set_log(_log_callback, ctypes.c_void_p(0))


def library_version() -> str:
    """Return the version of the llama.cpp build in use."""
    return cast("bytes", llama.llama_version()).decode()


def cpu_backend() -> str:
    """Return which variant of ggml's CPU backend is in use, such as "zen4"; "" if there is only one."""
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


def create(
    make: Callable[[Interruption], _T | None],
    free: Callable[[_T], object],
) -> _T | None:
    """Return the library object that `make` returns, None if it fails; on Ctrl-C free it and raise.

    Clears the log first, so that `failure_reason` is about this call.
    """
    clear_log()
    made: _T | None = None
    try:
        with interruptible() as interruption:
            made = make(interruption)
    except BaseException:
        if made is not None:
            free(made)
        raise
    return made
