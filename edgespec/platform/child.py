"""Work in a process of its own: there a crash, a hang or a stopped library is not the user's."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import msgspec

from edgespec.errors import EdgespecError

REFUSED = 3
"""Exit code of a child whose work an EdgespecError ended."""

_T = TypeVar("_T")

_PR_SET_PDEATHSIG = 1
# -P: nothing is imported from the directory the user happens to be in.
_PROGRAM = """import sys
from edgespec.platform import child
child._die_with_parent()
from {module} import {function}
sys.exit({function}(*sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    code: int | None
    """Its exit code, -N when signal N ended it; None: it took too long and was killed."""
    complaint: str
    """The last line it wrote to stderr, or ""."""
    said: str = ""
    """The last line it wrote to stdout, or ""; nothing where stdout was a Conversation's."""


def run_in_child(module: str, function: str, *arguments: str, timeout_s: float | None = None) -> Ended:
    """Run `module.function(*arguments)` in a new Python; what it returns is the exit code.

    The child ends with this process, and when an exception, as of Ctrl-C, ends the waiting.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaints:
        child = _start(
            module,
            function,
            *arguments,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complaints,
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Ended(None, "")
        finally:
            child.kill()
            child.wait()
        return Ended(child.returncode, _last_line(complaints), _last_line(said))


class Conversation:
    """Work in a process of its own that tells what it finds as it finds it. Iterate over it, once.

    `module.function()` runs in a new Python with `request` on its stdin (see `answer`), and each pair that it
    says (see `say`) is yielded. The child ends with this process, and when the iteration is given up.
    """

    def __init__(self, module: str, function: str, request: object) -> None:
        self._what = module, function
        self._request = msgspec.json.encode(request)
        self.ended = Ended(None, "")
        """How the child ended, after the last pair."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        # A file for the request: a child that ends early breaks no pipe, and none can be full.
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as complaints:
            request.write(self._request)
            request.seek(0)
            child = _start(*self._what, stdin=request, stdout=subprocess.PIPE, stderr=complaints)
            try:
                assert child.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
                for line in child.stdout:
                    if line.endswith(b"\n"):  # else it ended in the middle of it
                        yield msgspec.json.decode(line, type=tuple[str, Any])
                child.wait()
            finally:
                child.kill()
                with child:  # closes the pipe and waits
                    pass
            self.ended = Ended(child.returncode, _last_line(complaints))


def answer(kind: type[_T], work: Callable[[_T], None]) -> int:
    """Do `work` on the request that a Conversation sent, in its child; return the exit code.

    An EdgespecError is told in one line on stderr, with REFUSED as the code.
    """
    # What a library prints goes to stderr: only `say` speaks to the parent.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        work(msgspec.json.decode(sys.stdin.buffer.read(), type=kind))
    except EdgespecError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


def say(kind: str, value: object) -> None:
    """Tell the Conversation that this process is the child of."""
    sys.stdout.buffer.write(msgspec.json.encode((kind, value)) + b"\n")
    sys.stdout.buffer.flush()


def _start(
    module: str,
    function: str,
    *arguments: str,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: IO[bytes],
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(module=module, function=function), *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        # Ctrl-C reaches a terminal's whole process group: the child would print a traceback of it.
        start_new_session=True,
    )


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
