"""What the clients here are asked, and the tool that they have: the program's arguments say it."""

from __future__ import annotations

import sys
from pathlib import Path

URL, FILE, ASKED = sys.argv[1:]
"""The server's address, the file that the answer stands in, and the question."""


def read_file(path: str) -> str:
    """Return the text of a file.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()


def check(name: str, answer: str) -> None:
    """Print what was answered through the API `name`; end with 1 if the file was not read for it."""
    print(f"{name}: {answer}", flush=True)
    if Path(FILE).read_text().split()[-1] not in answer:
        raise SystemExit(f"{name}: this is not what the file says")
