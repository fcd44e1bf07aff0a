"""The prompt of a command: its argument, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file`, else `prompt`, else what stdin has. Raises UsageError and EdgespecError."""
    if file is not None:
        try:
            return _decode(file.read_bytes(), str(file))
        except OSError as error:
            raise UsageError(f"--file {file}: {error.strerror}") from None
    if prompt is not None and prompt != "-":
        if not prompt:
            raise UsageError("the prompt is empty")
        return prompt
    if sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise UsageError(
            'no prompt: give one, as in `edgespec run "Write a quicksort"`, or -f FILE, or a pipe'
        )
    return _decode(sys.stdin.buffer.read(), "stdin")


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise EdgespecError(
            f"{name} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}; "
            "convert it first"
        ) from None
    if not text.strip():
        raise UsageError(f"{name}: the prompt is empty")
    return text
