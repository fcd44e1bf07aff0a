"""The two consoles all commands share: results go to `out`, everything else to `err`.

Neither breaks or colours what a pipe reads; `highlight` is off so that numbers in results stay plain.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from edgespec.errors import EdgespecError
from edgespec.models.sources import format_size

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line handle a closed pipe; rich would exit without a word."""
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError


# With emoji, `ollama:llama:7b` would not stay what it is, nor would [brackets] with markup.
out = _Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
err = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)

_PIPE_WIDTH = 240  # columns: in a pipe a table is as wide as its content


def message(line: str) -> None:
    """Print a line for the user to stderr, marked as edgespec's."""
    err.print(f"edgespec: {line}")


def tell_written(path: Path) -> None:
    """Say on stderr that a file of results was written, and its size; nothing of a pipe or a device."""
    if path.is_file():
        message(f"wrote {path} ({format_size(path.stat().st_size)})")


def print_error(line: str) -> None:
    """Print why a command failed to stderr."""
    err.print(f"edgespec: error: {line}")


_OPTIONS = {
    "n_ctx": "--ctx",
    "n_threads": "--threads",
    "temperature": "--temp",
    "typical_p": "--typical",
    "penalty_last_n": "--repeat-last-n",
}


def option_of(field: str) -> str:
    """Return the option that sets `field`, an argument's name in Python; other texts stay unchanged."""
    if not field.isidentifier():
        return field
    return _OPTIONS.get(field) or f"--{field.replace('_', '-')}"


def line_of(error: EdgespecError) -> str:
    """Return an error's line, with the option's name for the field."""
    return error.spelled(option_of(error.field))


def print_table(table: Table) -> None:
    """Print a table to stdout; in a pipe, cells are neither shortened nor wrapped."""
    console = out
    if not out.is_terminal:
        console = _Console(file=out.file, highlight=False, width=_PIPE_WIDTH, emoji=False, markup=False)
    console.print(table)


def print_line(label: str, text: str) -> None:
    """Print one line of a report."""
    out.print(f"{label:8} {text}")
