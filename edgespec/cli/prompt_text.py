"""The prompt of a command: its argument or a file, and what comes through a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.standard_input import read_piped


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file`, or `prompt`, and after it what is piped to stdin; alone what stdin has.

    Raises UsageError and EdgespecError.
    """
    if file is None and (prompt is None or prompt == "-"):
        return _all_of_stdin(is_named=prompt == "-")
    if file is not None:
        try:
            text = _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"--file {file}: {error.strerror}") from None
    else:
        text = prompt or ""
    if not text.strip():
        raise UsageError(f"{file}: the prompt is empty" if file else "the prompt is empty")
    piped = _decode(read_piped(message), "stdin")
    return f"{text}\n\n{piped}" if piped.strip() else text


def _all_of_stdin(*, is_named: bool) -> str:
    if sys.stdin is None or (not is_named and sys.stdin.isatty()):
        raise UsageError(
            'no prompt: give one, as in `edgespec run "Write a quicksort"`, or -f FILE, or a pipe'
        )
    text = _decode(sys.stdin.buffer.read(), "stdin")
    if not text.strip():
        raise UsageError("stdin: the prompt is empty")
    return text


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EdgespecError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}; "
            "convert it first"
        ) from None
