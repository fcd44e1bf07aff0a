"""One-line messages for the user that do not end the work: callers pass a function that takes them."""

from __future__ import annotations

from collections.abc import Callable

MessageFn = Callable[[str], None]
"""Takes one line, without its end."""


def silent(_line: str) -> None:
    """Drop the line: nobody is to see it."""


def once(on_message: MessageFn) -> MessageFn:
    """Return a function that gives `on_message` each line once, however often it comes."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            on_message(line)

    return say
