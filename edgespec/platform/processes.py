"""Processes: work in a child, objects that a forked one must not use, and interrupting a pass.

A crash or a hang in a child does not reach the user's process. A fork copies the memory and one thread: a
pass over a model would wait forever for the other threads, or for a lock that one of them held. A pass
is interrupted by Ctrl-C or from another thread (csrc/interrupt.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator
from threading import RLock
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from edgespec import _core
from edgespec.errors import EdgespecError, UsageError

REFUSED = 3
"""Exit code of a child whose work an EdgespecError ended."""

_T = TypeVar("_T")

_PR_SET_PDEATHSIG = 1
# -P: nothing is imported from the directory the user happens to be in.
_PROGRAM = """import sys
from edgespec.platform.processes import _die_with_parent
_die_with_parent({parent})
from {module} import {function}
sys.exit({function}(*sys.argv[1:]))
"""


class ChildExit(msgspec.Struct, frozen=True):
    """How a child process ended: its code, and the last lines it wrote."""

    code: int | None
    """Its exit code, -N if signal N ended it; None if it took too long and was killed."""
    complaint: str
    """The last line it wrote to stderr, or ""."""
    said: str = ""
    """The last line it wrote to stdout, or ""; always "" from a ReportingChild."""


def run_in_child(module: str, function: str, *arguments: str, timeout_s: float | None = None) -> ChildExit:
    """Run `module.function(*arguments)` in a new Python; its return value is the exit code.

    The child is killed when this process ends, or when an exception such as Ctrl-C ends the wait.
    """
    command = child_command(module, function, *arguments)
    try:
        # Ctrl-C goes to the terminal's whole process group: the child would print a traceback.
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return ChildExit(None, "", last_line(late.stdout or b""))
    return ChildExit(ended.returncode, last_line(ended.stderr), last_line(ended.stdout))


class ReportingChild:
    """Work in a child process that reports results as it finds them. Iterate over it, once.

    `module.function()` runs in a new Python with `request` on its stdin (see `answer`); each pair it sends
    with `send` is yielded. The child is killed when this process or the iteration ends.
    """

    def __init__(self, module: str, function: str, request: object) -> None:
        self._what = module, function
        self._request = msgspec.json.encode(request)
        self.ended = ChildExit(None, "")
        """Exit of the child, after the last pair."""

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        # The request is a file, not a pipe: a child that ends early would break a pipe, or leave it full.
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as complaints:
            request.write(self._request)
            request.seek(0)
            child = subprocess.Popen(
                child_command(*self._what),
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,  # as above
            )
            try:
                assert child.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
                for line in child.stdout:
                    if line.endswith(b"\n"):  # else the child died in the middle of the line
                        yield msgspec.json.decode(line, type=tuple[str, Any])
                child.wait()
            finally:
                child.kill()
                with child:  # closes the pipe and waits
                    pass
            complaints.seek(0)
            self.ended = ChildExit(child.returncode, last_line(complaints.read()))


def answer(kind: type[_T], work: Callable[[_T], None]) -> int:
    """In the child: do `work` on the ReportingChild's request and return the exit code.

    An EdgespecError is printed as one line to stderr; the exit code is then REFUSED.
    """
    # Libraries that print to stdout would garble the pairs: send their output to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        work(msgspec.json.decode(sys.stdin.buffer.read(), type=kind))
    except EdgespecError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


def send(kind: str, value: object) -> None:
    """In the child: send a pair to the ReportingChild."""
    sys.stdout.buffer.write(msgspec.json.encode((kind, value)) + b"\n")
    sys.stdout.buffer.flush()


def child_command(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command of a Python that runs `module.function(*arguments)` and dies with this process."""
    program = _PROGRAM.format(module=module, function=function, parent=os.getpid())
    return [sys.executable, "-P", "-c", program, *arguments]


def last_line(said: bytes) -> str:
    """Return the last line that is not blank, such as a process's complaint; "" if there is none."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this process could ask for that
        os.kill(os.getpid(), signal.SIGKILL)


class HomeProcess:
    """The process that loaded something, which a process forked from it must not use."""

    def __init__(self, name: str) -> None:
        """Remember this process; `name`: of the object, for errors."""
        self._name = name
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process is that one, not a child forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise UsageError in a forked child."""
        if not self.is_here:
            raise UsageError(
                f"{self._name} was loaded before this process was forked, and its threads stayed in the "
                'parent: load one here, or start processes with multiprocessing.get_context("spawn")'
            )


class HomeLock(HomeProcess):
    """A reentrant lock that raises UsageError in a forked child, where its holder may not exist."""

    def __init__(self, name: str) -> None:
        """Make a lock; `name`: of the locked object, for errors."""
        super().__init__(name)
        self._lock = RLock()

    def __enter__(self) -> None:
        self.require()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def finalize(owner: object, free: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:  # noqa: ANN401 - any arguments
    """Return a `weakref.finalize` that does nothing in a forked child, whose end frees its copy."""
    return weakref.finalize(owner, _free_at_home, os.getpid(), free, args)


def _free_at_home(pid: int, free: Callable[..., object], args: tuple[Any, ...]) -> None:
    if os.getpid() == pid:
        free(*args)


def is_requested(interrupt: _core.Interrupt | None) -> bool:
    """Whether an interruption was requested and not cleared by `drain`."""
    if interrupt is None:
        return False
    waiting = select.poll()
    waiting.register(interrupt.fd, select.POLLIN)
    return bool(waiting.poll(0))


class Cancellation:
    """While entered, `cancel` makes the library's current pass end and raise KeyboardInterrupt.

    A context manager; `cancel` may be called from any thread.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self.interrupt = _core.Interrupt(self._read_end)
        return self

    def cancel(self) -> None:
        """End the pass under way, or the next one before a `drain`."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls
            os.write(self._write_end, b"\0")

    def drain(self) -> None:
        """Forget earlier calls of `cancel`, so that they do not end the next pass."""
        try:
            while os.read(self._read_end, 512):
                pass
        except BlockingIOError:
            pass

    def __exit__(self, *_: object) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


class SignalPipe(Cancellation):
    """While entered, signals end the current pass too.

    A context manager for the main thread, the only one that Python delivers signals to.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            super().__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous)
        super().__exit__()
