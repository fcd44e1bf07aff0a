"""Work in a process of its own: there a crash, a hang or a stopped library is not the user's."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
# -P: nothing is imported from the directory the user happens to be in.
_PROGRAM = """import sys
from edgespec import child
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


def run_in_child(module: str, function: str, *arguments: str, timeout_s: float | None = None) -> Ended:
    """Run `module.function(*arguments)` in a new Python; what it returns is the exit code.

    The child ends with this process, and when an exception, as of Ctrl-C, ends the waiting.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(module=module, function=function), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C reaches a terminal's whole process group: the child would print a traceback of it.
        start_new_session=True,
    )
    try:
        lines = child.communicate(timeout=timeout_s)[1].strip().splitlines()
    except subprocess.TimeoutExpired:
        return Ended(None, "")
    finally:
        child.kill()
        child.wait()
    return Ended(child.returncode, lines[-1] if lines else "")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
