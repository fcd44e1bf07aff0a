"""One-line messages for the user that do not end the work: callers pass a function that takes them."""

from __future__ import annotations

from collections.abc import Callable

MessageFn = Callable[[str], None]
"""Takes one line, without its end."""


def silent(_line: str) -> None:
    """Drop the line: nobody is to see it."""
