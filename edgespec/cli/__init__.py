"""The command line: parse, call, render. All rich output lives here."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: see `edgespec.cli.app.main`."""
    if os.environ.get("_EDGESPEC_COMPLETE"):  # a shell asks while someone types: print no errors
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.set_threshold(100_000)  # most of what a start makes stays: looking for garbage took a tenth of it
    try:
        from edgespec.cli import app
    except KeyboardInterrupt:  # before there is anything to print it with
        sys.stderr.write("edgespec: error: interrupted\n")
        return 130
    return app.main(arguments)
