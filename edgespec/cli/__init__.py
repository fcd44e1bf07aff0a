"""The command line: parse, call, render. All rich output lives here."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.cli.console import print_error
from edgespec.errors import EdgespecError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: see `edgespec.cli.app.main`."""
    try:
        from edgespec.cli import app  # loads llama.cpp, which can be the wheel of another board
    except EdgespecError as error:
        print_error(str(error))
        return error.exit_code
    return app.main(arguments)
