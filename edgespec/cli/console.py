"""The two consoles all commands share: results go to `out`, everything else to `err`.

Neither breaks or colours what a pipe reads; `highlight` is off so that numbers in results stay plain.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from edgespec.errors import EdgespecError
from edgespec.models.sources import format_size
from edgespec.platform.files import lines_of

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line handle a closed pipe; rich would exit without a word."""
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError


# With emoji, `ollama:llama:7b` would not stay what it is, nor would [brackets] with markup.
out = _Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
err = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)

_ENDLESS = 1_000_000  # columns: a table is measured as if nothing had to be cut


class _Stream:
    """A standard stream of which `failed` is told when it cannot be written."""

    def __init__(self, stream: TextIO, failed: Callable[[TextIO, OSError], None]) -> None:
        self._stream = stream
        self._failed = failed

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(self._stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(self._stream, error)


def _lose_messages(stream: TextIO, _: OSError) -> None:
    # What is still in its buffer would fail again when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell_of_output(_: TextIO, error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    raise EdgespecError(f"standard output: {error.strerror}; what is written there is not complete") from None


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Let an error say that standard output cannot be written; on standard error messages are lost then."""
    streams = sys.stdout, sys.stderr
    if sys.stdout is not None:
        sys.stdout = cast("TextIO", _Stream(sys.stdout, _tell_of_output))
    if sys.stderr is not None:
        sys.stderr = cast("TextIO", _Stream(sys.stderr, _lose_messages))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class OpenLine:
    """Whether a terminal shows text whose last line goes on."""

    is_open = False


def message(line: str) -> None:
    """Print a line for the user to stderr, marked as edgespec's; it breaks a text that a terminal shows."""
    if OpenLine.is_open and err.is_terminal:
        err.print()
    OpenLine.is_open = False
    err.print(f"edgespec: {line}")


def tell_written(path: Path) -> None:
    """Say on stderr that a file of results was written, and its size; nothing of a pipe or a device."""
    if path.is_file():
        message(f"wrote {path} ({format_size(path.stat().st_size)})")


def print_error(line: str) -> None:
    """Print why a command failed to stderr."""
    err.print(f"edgespec: error: {line}")


_OPTIONS = {"n_ctx": "--ctx", "n_threads": "--threads", "states": "--state-dir"}


def option_of(field: str) -> str:
    """Return the option that sets `field`, an argument's name in Python; other texts stay unchanged."""
    from edgespec.decoding.sampling import TABLE

    if not field.isidentifier():
        return field
    listed = TABLE[field].command if field in TABLE else ""
    return _OPTIONS.get(field) or listed or f"--{field.replace('_', '-')}"


def line_of(error: EdgespecError) -> str:
    """Return an error's line, with the option's name for the field."""
    return error.spelled(option_of(error.field))


def print_table(table: Table) -> None:
    """Print a table to stdout whole: nothing is cut, and no name is broken.

    In a pipe a row is a line, however long. In a terminal that is too narrow, the first column has a line of
    its own, and the others the next; where these do not fit either, each column has.
    """
    width = Measurement.get(out, out.options.update(max_width=_ENDLESS), table).maximum
    if not out.is_terminal:
        _Console(file=out.file, highlight=False, width=max(1, width), emoji=False, markup=False).print(table)
    elif width <= out.width:
        out.print(table)
    else:
        _print_narrow(table)


def _print_narrow(table: Table) -> None:
    names = [_plain(column.header) for column in table.columns]
    rows = [
        [_plain(cell) for cell in row]
        for row in zip(*(column.cells for column in table.columns), strict=True)
    ]
    widths = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    if 2 * len(widths[1:]) + sum(widths[1:]) <= out.width:
        for number, row in enumerate([names, *rows]):
            style = "" if number else "bold"
            cells = [
                f"{' ' * (width - cell_len(cell))}{cell}"
                if column.justify == "right"
                else set_cell_size(cell, width)
                for cell, width, column in zip(row[1:], widths[1:], table.columns[1:], strict=True)
            ]
            out.print(row[0], style=style)
            out.print(f"  {'  '.join(cells)}".rstrip(), style=style)
        return
    label = max(map(cell_len, names[1:]), default=0)
    for row in rows:
        out.print(row[0], style="bold")
        for name, cell in zip(names[1:], row[1:], strict=True):
            line = f"  {set_cell_size(name, label)}  {cell}"
            if cell and cell_len(line) > out.width:
                line = f"  {name}\n    {cell}"
            if cell:
                out.print(line)


def _plain(cell: RenderableType) -> str:
    return " ".join(str(cell).split())


def print_line(label: str, text: str) -> None:
    """Print one line of a report."""
    out.print(f"{label:8} {text}")


# ---- text on standard input, where there is any: a pipe may be open without anybody writing to it ----


PATIENCE_S = 1.0
"""Seconds that a program which started this process with a pipe may take to begin to write."""
TOLD_AFTER_S = 3.0


def read_piped(on_message: Callable[[str], None]) -> bytes:
    """The content of a file or a pipe on standard input; nothing for a terminal, a device, or none at all.

    Programs often start others with a pipe or socket that they never write to nor close: where the pipe comes
    from such a program, and not from a shell's `|`, nothing is what it has not begun to send by PATIENCE_S.
    """
    try:
        descriptor = sys.stdin.fileno() if sys.stdin else -1
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # closed
        return b""
    if stat.S_ISREG(mode):
        return sys.stdin.buffer.read()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return b""
    if stat.S_ISSOCK(mode) or _held_by_ancestor(descriptor):
        if not _has_begun(descriptor, PATIENCE_S):
            on_message("nothing came through standard input, which is open: the prompt is used alone")
            return b""
    elif not _has_begun(descriptor, TOLD_AFTER_S):
        on_message("waiting for the text that is piped to standard input; `< /dev/null` runs without it")
    return sys.stdin.buffer.read()


def _has_begun(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(1000 * seconds))


def _held_by_ancestor(descriptor: int) -> bool:
    """Whether a process that this one descends from could write into the pipe.

    A shell closes its ends of a pipeline's pipes; who writes into them is no ancestor.
    """
    try:
        pipe = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return False
    return any(_writes(process, pipe) for process in _ancestors())


def _ancestors() -> Iterator[Path]:
    pid = os.getppid()
    while pid > 0:
        process = Path(f"/proc/{pid}")
        yield process
        parents = [line for line in lines_of(process / "status") if line.startswith("PPid:")]
        pid = int(parents[0].split()[1]) if parents else 0


def _writes(process: Path, pipe: Path) -> bool:
    try:
        held = list((process / "fd").iterdir())
    except OSError:  # of another user, or gone
        return False
    for file in held:
        try:
            if file.readlink() == pipe and _is_writable(process / "fdinfo" / file.name):
                return True
        except OSError:
            continue
    return False


def _is_writable(fdinfo: Path) -> bool:
    flags = [line.split()[1] for line in lines_of(fdinfo) if line.startswith("flags:")]
    return bool(flags) and int(flags[0], 8) & os.O_ACCMODE != os.O_RDONLY
