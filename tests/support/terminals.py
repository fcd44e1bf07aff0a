"""A command whose messages go to a terminal, as people see them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
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


class Terminal:
    """A program in a terminal of its own, at which a test types. A context manager."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeout_s: float = 120,
        cwd: Path | None = None,
        term: str = "xterm",
        columns: int = 200,
    ) -> None:
        self._timeout_s = timeout_s
        self._primary, secondary = pty.openpty()
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            # No terminal answers the question for the cursor's position.
            env={**environment, "TERM": term, "COLUMNS": str(columns), "PROMPT_TOOLKIT_NO_CPR": "1"},
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - so that Ctrl-C is a signal
        )
        os.close(secondary)
        self._seen = ""
        self.shown = ""
        """All that was shown, with its control sequences."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._primary)

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._primary, keys.encode())

    def expect(self, pattern: str) -> str:
        """Wait until `pattern` is shown after what was expected before; return all up to its end."""
        deadline = time.monotonic() + self._timeout_s
        while not (found := re.search(pattern, plain(self._seen))):
            assert self._read(deadline), f"no {pattern!r} in {plain(self._seen)!r}"
        shown = plain(self._seen)
        self._seen = shown[found.end() :]
        return shown[: found.end()]

    def rest(self) -> str:
        """Return what was shown and not expected yet."""
        return plain(self._seen)

    def wait(self) -> int:
        """Return the exit code, when the program has ended."""
        deadline = time.monotonic() + self._timeout_s
        while self._read(deadline):
            pass
        return self._process.wait(timeout=self._timeout_s)

    def _read(self, deadline: float) -> bool:
        """Take what is shown, all that is there; return whether anything came before `deadline`."""
        data = b""
        wait_s = max(0.0, deadline - time.monotonic())
        while select.select([self._primary], [], [], wait_s)[0]:
            try:
                data += os.read(self._primary, 65536)
            except OSError:  # the other end is closed
                break
            wait_s = 0.0
        text = data.decode(errors="replace")
        self._seen += text
        self.shown += text
        return bool(data)


def plain(shown: str) -> str:
    """Return a terminal's text without its control sequences."""
    return re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\][^\x07]*\x07)", "", shown)
