"""The two consoles all commands share: results go to `out`, everything else to `err`.

In a terminal lines break between words. Neither breaks or colours what a pipe reads; `highlight` is off so
that numbers in results stay plain.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from edgespec.errors import EdgespecError, OutputUnread
from edgespec.models.hub import format_size
from edgespec.platform.files import lines_of

INTERRUPTED = 130  # exit code: 128 + SIGINT, as shells have it
UNREAD = 141  # exit code: 128 + SIGPIPE; the reader of the output went away

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_FENCES = ("```", "~~~")
_TAB = 8  # columns


class WordWrap:
    """Breaks lines between words in a text that comes in pieces; a word longer than a line stays whole.

    A wide character (Chinese, Japanese, Korean) is a word. In an answer, lines of code stay as they are.
    """

    def __init__(self, width: int, *, indent: int | None = None, is_answer: bool = False) -> None:
        """Break at `width` columns.

        `indent`: of a line after a break, in columns; None: the indent of the line broken.
        """
        self._width, self._indent, self._is_answer = width, indent, is_answer
        self._in_code = self._is_code = False  # the block, and the line
        self._column = 0
        self._start: int | None = None  # column of the line's first word
        self._gap = self._word = ""
        self._goes_on = False  # the word, which is longer than a line and was begun

    def feed(self, text: str) -> str:
        """Return the text that can be written now: all but the last word, which may still grow."""
        written = ""
        for char in text:
            is_wide = cell_len(char) == 2 or (self._word != "" and cell_len(self._word[-1]) == 2)
            if char.isspace() and char != "\N{NO-BREAK SPACE}":
                written += self._place()
                self._gap += char
                if char == "\n":
                    written += self._gap
                    self._gap, self._column, self._start, self._is_code = "", 0, None, self._in_code
            else:
                is_full = not is_wide and len(self._word) >= self._width
                written += self._place() if is_wide or is_full else ""
                self._goes_on |= is_full
                self._word += char
        return written

    def end(self) -> str:
        """Return the rest: the text ends here."""
        rest, self._gap = self._place() + self._gap, ""
        return rest

    def _place(self) -> str:
        """Return the word after the gap, or after a line break and an indent."""
        word, gap, self._word, self._gap = self._word, self._gap, "", ""
        if not word:
            self._gap = gap
            return ""
        n, column = cell_len(_ESCAPES.sub("", word)), len((" " * self._column + gap).expandtabs(_TAB))
        if self._start is None:
            self._start = column
            if is_fence := self._is_answer and word.startswith(_FENCES):
                self._in_code = not self._in_code
            self._is_code |= is_fence or (self._is_answer and column >= 4)  # as in Markdown
        elif column + n > self._width and not self._is_code and not self._goes_on:
            indent = self._start if self._indent is None else self._indent
            column = indent if 2 * indent < self._width else 0
            gap = "\n" + " " * column
        self._column, self._goes_on = column + n, False
        return gap + word


def wrapped(text: str, width: int, indent: int | None = None) -> str:
    """Return `text` in lines of at most `width` columns that break between words, as of WordWrap."""
    wrap = WordWrap(width, indent=indent)
    return wrap.feed(text) + wrap.end()


class OpenLine:
    """The unfinished line of text on stdout; messages for stderr wait for its end."""

    is_open = False
    _waiting: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def wait(cls, show: Callable[[], None]) -> None:
        """Call `show` when the line has ended."""
        cls._waiting.append(show)

    @classmethod
    def end(cls) -> None:
        """Note that the line has ended; show what waited for it."""
        cls.is_open = False
        while cls._waiting:
            cls._waiting.pop(0)()

    @classmethod
    def cut(cls) -> None:
        """End the line if it is unfinished, since nothing more comes."""
        if cls.is_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
        cls.end()


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as rich's
        """Print as rich does; in a terminal, lines of strings are broken between words."""
        if self.stderr and OpenLine.is_open:
            OpenLine.wait(partial(self.print, *objects, **options))
            return
        if self.is_terminal:
            objects = tuple(wrapped(one, self.width) if isinstance(one, str) else one for one in objects)
        super().print(*objects, **options)


# With emoji, `ollama:llama:7b` would not stay what it is, nor would [brackets] with markup.
out = _Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
err = _Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)

_ENDLESS = 1_000_000  # columns: a table is measured as if nothing had to be cut


class _Stream:
    """A standard stream that calls `failed` when it cannot be written."""

    def __init__(self, stream: Any, failed: Callable[[TextIO, OSError], None]) -> None:  # noqa: ANN401
        self._stream = stream
        self._failed = failed

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        found = getattr(self._stream, name)
        return _Stream(found, self._failed) if name == "buffer" else found

    def write(self, text: Any) -> Any:  # noqa: ANN401 - text, or bytes to its buffer
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


def _lose(stream: TextIO, _: OSError) -> None:
    # What is still in its buffer would fail again when Python exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report_output(stream: TextIO, error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        _lose(stream, error)
        raise OutputUnread
    raise EdgespecError(f"standard output: {error.strerror}; what is written there is not complete") from None


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Report an unwritable standard output as an error; messages for an unwritable stderr are lost."""
    streams = sys.stdout, sys.stderr
    if sys.stdout is not None:
        sys.stdout = cast("TextIO", _Stream(sys.stdout, _report_output))
    if sys.stderr is not None:
        sys.stderr = cast("TextIO", _Stream(sys.stderr, _lose))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def message(line: str) -> None:
    """Print a line for the user to stderr, marked as edgespec's."""
    err.print(f"edgespec: {line}")


def report_written(path: Path) -> None:
    """Report on stderr a written file of results and its size; nothing for a pipe or a device."""
    if path.is_file():
        message(f"wrote {path} ({format_size(path.stat().st_size)})")


def print_error(line: str) -> None:
    """Print why a command failed to stderr."""
    err.print(f"edgespec: error: {line}")


_OPTIONS = {
    "images": "--image",
    "n_ctx": "--ctx",
    "n_threads": "--threads",
    "states": "--state-dir",
    "temperatures": "--temp",
}


def option_of(field: str) -> str:
    """Return the option that sets `field`, an argument's name in Python; any other text as it is."""
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

    In a pipe a row is a line, however long. In a terminal that is too narrow, each cell has a line.
    """
    width = Measurement.get(out, out.options.update(max_width=_ENDLESS), table).maximum
    if not out.is_terminal:
        _Console(file=out.file, highlight=False, width=max(1, width), emoji=False, markup=False).print(table)
        return
    if width <= out.width:
        out.print(table)
        return
    names = [_plain(column.header) for column in table.columns]
    label = max(map(cell_len, names[1:]), default=0)
    for first, *cells in zip(*(map(_plain, column.cells) for column in table.columns), strict=True):
        out.print(first, style="bold")
        for name, cell in zip(names[1:], cells, strict=True):
            if cell:
                fits = 4 + label + cell_len(cell) <= out.width
                out.print(f"  {set_cell_size(name, label)}  {cell}" if fits else f"  {name}\n    {cell}")


def _plain(cell: RenderableType) -> str:
    return " ".join(str(cell).split())


def print_line(label: str, text: str, *, width: int = 8, to: Console | None = None) -> None:
    """Print one line of a report to `to`, or stdout; lines that a terminal breaks are indented like `text`.

    `width`: columns of the label.
    """
    to = to or out
    line = f"{label:{width}} {text}"
    if to.is_terminal:
        line = wrapped(line, to.width, width + 1)
    to.print(Text.assemble((line[:width], "dim"), line[width:]) if to is err else Text(line))


# ---- text on standard input, where there is any: a pipe may be open without anybody writing to it ----


PATIENCE_S = 1.0
"""Seconds that a program which started this process with a pipe may take to begin to write."""
TOLD_AFTER_S = 3.0


def read_piped(on_message: Callable[[str], None]) -> bytes:
    """The content of a file or a pipe on standard input; nothing for a terminal, a device, or none at all.

    Programs often start others with a pipe or socket that they neither write to nor close. A pipe from such a
    program, and not from a shell's `|`, counts as empty if nothing was sent within PATIENCE_S seconds.
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
    """Whether an ancestor of this process could write into the pipe.

    A shell closes its ends of a pipeline's pipes; their writer is no ancestor.
    """
    pid, pipe = os.getppid(), _link(Path(f"/proc/self/fd/{descriptor}"))
    while pid and pipe:
        process = Path(f"/proc/{pid}")
        for file in process.glob("fd/*"):  # none of another user's process
            flags = _field(process / "fdinfo" / file.name, "flags:")
            if _link(file) == pipe and flags and int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
        pid = int(_field(process / "status", "PPid:") or 0)
    return False


def _link(file: Path) -> Path | None:
    with suppress(OSError):
        return file.readlink()
    return None


def _field(file: Path, name: str) -> str:
    return next((line.split()[1] for line in lines_of(file) if line.startswith(name)), "")
