"""Lines worth telling the user although the work goes on: who has some takes a function to call with each."""

from __future__ import annotations

from collections.abc import Callable

MessageFn = Callable[[str], None]
"""Takes one line, without its end."""


def silent(_line: str) -> None:
    """Take a line and tell nobody."""
