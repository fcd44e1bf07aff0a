"""Run work in a child process, so that a crash or a hang there does not reach the user's process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from edgespec.errors import EdgespecError

REFUSED = 3
"""Exit code of a child whose work an EdgespecError ended."""

_T = TypeVar("_T")

_PR_SET_PDEATHSIG = 1
# -P: nothing is imported from the directory the user happens to be in.
_PROGRAM = """import sys
from edgespec.platform import child
child._die_with_parent({parent})
from {module} import {function}
sys.exit({function}(*sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class ChildExit:
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
    except subprocess.TimeoutExpired:
        return ChildExit(None, "")
    return ChildExit(ended.returncode, _last_line(ended.stderr), _last_line(ended.stdout))


class ReportingChild:
    """Work in a child process that reports results as it finds them. Iterate over it, once.

    `module.function()` runs in a new Python with `request` on its stdin (see `answer`); each pair it sends
    with `say` is yielded. The child is killed when this process or the iteration ends.
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
            self.ended = ChildExit(child.returncode, _last_line(complaints.read()))


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


def say(kind: str, value: object) -> None:
    """In the child: send a pair to the ReportingChild."""
    sys.stdout.buffer.write(msgspec.json.encode((kind, value)) + b"\n")
    sys.stdout.buffer.flush()


def child_command(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command of a Python that runs `module.function(*arguments)` and dies with this process."""
    program = _PROGRAM.format(module=module, function=function, parent=os.getpid())
    return [sys.executable, "-P", "-c", program, *arguments]


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this process could ask for that
        os.kill(os.getpid(), signal.SIGKILL)
