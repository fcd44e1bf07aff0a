"""A command whose messages go to a terminal, as people see them."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def messages_in_terminal(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
) -> tuple[int, bytes, bytes]:
    """Return the exit code, what went to the terminal on stderr, and what went to a pipe on stdout."""
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment, "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=secondary,
    ) as process:
        os.close(secondary)
        seen = b""
        try:
            while chunk := os.read(primary, 4096):
                seen += chunk
        except OSError:  # the other end is closed
            pass
        assert process.stdout
        out = process.stdout.read()
    os.close(primary)
    return process.returncode, seen, out
