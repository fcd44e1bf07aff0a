"""Runs a Python program that a model wrote, in a process that can do nothing but compute.

    run_sandboxed(program)  ->  python -I -S -E sandbox_child.py  ->  locks itself in, runs the program

Linux on x86-64 and aarch64 only: the process is locked in by a seccomp filter (sandbox_child.py lists the
allowed system calls). If the filter cannot be installed, nothing is run.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.bench.sandbox_child import MACHINES, REQUEST, SECRET_SIZE
from edgespec.errors import EdgespecError

TIMEOUT_S = 10.0
"""Default time limit of a program, in seconds."""

MEMORY_BYTES = 512 << 20
"""Default limit of address space, in bytes; Python itself takes some 20 MB."""

_CHILD_FILE = Path(__file__).with_name("sandbox_child.py")
_MOST_ANSWER = 4096  # bytes


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a program."""

    passed: bool
    """Whether its last line was run."""
    reason: str
    """Why it did not pass, in one line; "" if it passed."""


def run_sandboxed(
    program: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES
) -> SandboxResult:
    """Run `program` in its own process, locked in, and return how it ended.

    It passes if its last line has been run: an exception or an earlier exit fails. It gets `timeout_s`
    seconds of wall time and of processor time, and `memory_bytes` of address space. It cannot write a
    file, open a connection, start a process or a thread, or send a signal: these calls raise
    PermissionError. Its environment and stdin are empty, its output is discarded, its directory is
    empty and temporary, and only the standard library can be imported. If the kernel has Landlock
    (Linux 5.13), no other files can be read; otherwise all files that this user may read.

    The sandbox does not stop a program that sets out to deceive its own test. Both run in one
    interpreter, so the program may replace what the test uses or find the file descriptor on which the
    answer is given: a pass does not prove that the answer is honest. Nor does it stop kernel bugs.

    Raises EdgespecError if the program cannot be run safely.
    """
    _require_known_machine()
    data = program.encode("utf-8", "replace")
    secret = secrets.token_bytes(SECRET_SIZE)
    request = REQUEST.pack(len(data), memory_bytes, math.ceil(timeout_s) + 1) + data + secret
    with tempfile.TemporaryDirectory(prefix="edgespec-sandbox-") as directory:
        process = subprocess.Popen(
            # No environment, no site-packages, no user's directories, no bytecode written.
            [sys.executable, "-I", "-S", "-E", "-B", str(_CHILD_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={},
            start_new_session=True,
        )
        with process:
            code = _wait(process, request, timeout_s)
            # Reading only now is safe: a program that filled the pipe had to wait and was timed out.
            answer = os.read(process.stdout.fileno(), _MOST_ANSWER) if process.stdout else b""
    return _outcome(answer, secret, code, timeout_s)


def _wait(process: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> int | None:
    """Return the exit code, None after a timeout; either way the process and its group have ended."""
    try:
        if process.stdin:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended already
                process.stdin.write(request)
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(answer: bytes, secret: bytes, code: int | None, timeout_s: float) -> SandboxResult:
    first, _, rest = answer.partition(b"\n")
    if first != b"started":
        ended = f"took longer than {timeout_s:g} s to start" if code is None else f"ended with code {code}"
        said = _one_line(first.removeprefix(b"refused ")) or f"Python {ended}"
        raise EdgespecError(f"programs cannot be run safely here: {said}; nothing was run")
    if code is None:
        return SandboxResult(False, f"it took longer than {timeout_s:g} s")
    if code == 0 and rest == b"ended " + secret:
        return SandboxResult(True, "")
    if rest.startswith(b"failed "):
        return SandboxResult(False, _one_line(rest.removeprefix(b"failed ")))
    if code < 0:
        return SandboxResult(False, f"signal {-code} ended it ({signal.strsignal(-code) or 'unknown'})")
    return SandboxResult(False, "it left before its end")


def _one_line(data: bytes) -> str:
    """Return text that is safe to print: a program may have written it."""
    text = " ".join(data.decode("utf-8", "replace").split())
    return "".join(character for character in text if character.isprintable())


def _require_known_machine() -> None:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in MACHINES:
        raise EdgespecError(
            f"programs cannot be run safely on {sys.platform} {machine}: "
            f"that needs Linux on {' or '.join(MACHINES)}; nothing was run"
        )
    if not sys.executable:
        raise EdgespecError("programs cannot be run safely here: Python does not know its own file")
