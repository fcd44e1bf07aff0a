"""Reads lines typed in a terminal that cannot be steered (TERM=dumb): an editor's shell, a serial line."""

from __future__ import annotations

import os
import sys

_DUMB = ("", "dumb", "unknown")


def is_dumb() -> bool:
    """Say whether the terminal is one that takes no escape sequences."""
    return os.environ.get("TERM", "").lower() in _DUMB


class PlainLines:
    """Reads what the user types, which the terminal itself lets be edited."""

    def read(self, _default: str = "") -> str:
        """Return the next line. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        print("> ", end="", file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode(errors="surrogateescape").rstrip("\n")
