"""Reads lines typed in `edgespec chat`: with prompt_toolkit's editing, or plainly in a dumb terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output

from edgespec.errors import describe_os_error

_PROMPT, _CONTINUED = "> ", "  "
_DUMB = ("", "dumb", "unknown")  # values of TERM


class LineEditor:
    """Reads what the user types: Enter sends it, Alt+Enter begins a new line, Tab completes /commands."""

    def __init__(self, commands: Mapping[str, str], history: Path | None) -> None:
        """Complete `commands` (name -> argument); keep lines in the file `history`, None for no file."""
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else _PersistedHistory(str(history)),
            completer=_Commands(commands),
            complete_while_typing=False,
            key_bindings=_keys(),
            multiline=True,
            enable_suspend=True,  # Ctrl-Z
            prompt_continuation=_CONTINUED,
            output=create_output(always_prefer_tty=True),  # stderr if stdout is a file
        )

    def read(self) -> str:
        """Return the next line.

        Raises EOFError for Ctrl-D on an empty line, KeyboardInterrupt for Ctrl-C.
        """
        with _signals_kept():
            return self._session.prompt(_PROMPT)


class PlainLines:
    """Reads lines in a terminal that takes no escape sequences: an editor's shell, a serial line."""

    def read(self) -> str:
        """Return the next line. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        print(_PROMPT, end="", file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode(errors="surrogateescape").rstrip("\n")


def is_dumb() -> bool:
    """Whether the terminal takes no escape sequences."""
    return os.environ.get("TERM", "").lower() in _DUMB


def open_history(file: Path) -> str | None:
    """Create the history file, for its owner only; return why that failed, None if it did not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("ab"):
            return None
    except OSError as error:
        return describe_os_error(error)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore a SignalPipe's wakeup descriptor, which asyncio (under prompt_toolkit) replaces."""
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


class _PersistedHistory(FileHistory):
    def store_string(self, string: str) -> None:
        """Append a line; a full disk is no reason to lose a conversation."""
        with suppress(OSError):
            Path(str(self.filename)).touch(mode=0o600)  # `cache clear` may have deleted it
            super().store_string(string)


class _Commands(Completer):
    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Complete the name of a command, and after one that takes a file, its path."""
        typed = document.text_before_cursor
        name, space, path = typed.partition(" ")
        if not space and typed.startswith("/"):
            for command in self._commands:
                if command.startswith(typed):
                    yield Completion(command, start_position=-len(typed))
        elif self._commands.get(name) == "FILE":
            yield from self._paths.get_completions(Document(path), complete_event)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
