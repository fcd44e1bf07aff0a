"""A text that comes in pieces, read by generators that pause at its end; the events that they find in it."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader that pauses by `yield` when it needs more text."""


@dataclass(frozen=True)
class PlainText:
    """Text outside calls and thoughts: the characters from `start` to `end` of all visible ones."""

    start: int
    end: int


@dataclass(frozen=True)
class ThoughtText(PlainText):
    """Text of the model's thoughts."""


@dataclass(frozen=True)
class CallStart:
    """A call of the function `name` begins."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next part of the last begun call's arguments, which together are JSON text of an object."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The last begun call ended; not `complete`: in the middle of its arguments."""

    complete: bool


Event = PlainText | CallStart | CallArguments | CallEnd


class TextSource:
    """The text that is not decided yet, with a cursor.

    Some of it may be hidden: markers that are control tokens, which the visible text lacks. Positions count
    all characters, `visible` those of the visible text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._base = 0  # the position of the text's first character
        self._at = 0
        self._hidden: list[tuple[int, int]] = []
        self._n_hidden = 0  # characters hidden before the text
        self.ended = False
        """Whether no more text comes."""

    def feed(self, text: str, *, hidden: bool = False) -> None:
        """Append `text` of the answer, of which `hidden` is not shown."""
        if hidden:
            end = self._base + len(self._text)
            self._hidden.append((end, end + len(text)))
        self._text += text

    @property
    def position(self) -> int:
        """How many characters of the text precede the cursor."""
        return self._base + self._at

    @property
    def rest(self) -> str:
        """The text after the cursor, as far as it has come."""
        return self._text[self._at :]

    @property
    def n_left(self) -> int:
        """How many characters of it there are."""
        return len(self._text) - self._at

    def take(self, n: int) -> str:
        """Move the cursor over `n` characters that have come, and return them."""
        taken = self._text[self._at : self._at + n]
        self._at += len(taken)
        return taken

    def take_beginning(self, literals: Sequence[str]) -> bool:
        """Move over the rest if the text ends in the middle of one of `literals`; return whether it does."""
        rest = self.rest
        cut = self.ended and bool(rest) and any(one.startswith(rest) for one in literals)
        if cut:
            self.take(len(rest))
        return cut

    def back(self, position: int) -> None:
        """Move the cursor to a position that was not forgotten."""
        self._at = position - self._base

    def forget(self) -> None:
        """Drop the text before the cursor, which is read."""
        position = self.position
        self._text = self._text[self._at :]
        self._base, self._at = position, 0
        while self._hidden and self._hidden[0][1] <= position:
            start, end = self._hidden.pop(0)
            self._n_hidden += end - start

    def visible(self, position: int) -> int:
        """Return the place of `position`, which was not forgotten, in the visible text."""
        hidden = sum(min(end, position) - start for start, end in self._hidden if start < position)
        return position - self._n_hidden - hidden

    # ---- steps ----

    def peek(self, n: int = 1) -> Steps[str]:
        """Wait for `n` characters and return them; fewer where the text ends."""
        while len(self._text) - self._at < n and not self.ended:
            yield
        return self._text[self._at : self._at + n]

    def skip_space(self) -> Steps[str]:
        """Move over white space, and return the next character; "" at the end."""
        while True:
            rest = self.rest
            self._at += len(rest) - len(rest.lstrip())
            if self._at < len(self._text) or self.ended:
                return self._text[self._at : self._at + 1]
            yield

    def literal(self, literals: Sequence[str]) -> Steps[str]:
        """Move over the longest of `literals` that comes next, and return it; "" if none does."""
        while True:
            rest = self.rest
            may_come = [one for one in literals if len(one) > len(rest) and one.startswith(rest)]
            if not may_come or self.ended:
                found = max((one for one in literals if rest.startswith(one)), key=len, default="")
                return self.take(len(found))
            yield

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Move over what `pattern` matches here, which ends before some other character; "" for none."""
        while True:
            found = pattern.match(self._text, self._at)
            end = found.end() if found else self._at
            if end < len(self._text) or self.ended:
                return self.take(end - self._at)
            yield


class BracketScan:
    """Follows the strings and brackets of a value, character by character."""

    def __init__(self, quotes: str) -> None:
        """Begin outside of strings, which stand between equal ones of `quotes`."""
        self.quote = ""
        """The quote of the string that is open; "" outside of strings."""
        self.depth = 0
        """Brackets that are open."""
        self._quotes = quotes
        self._escaped = False

    def step(self, char: str) -> None:
        """Take the next character into account."""
        if self._escaped:
            self._escaped = False
        elif self.quote:
            self._escaped = char == "\\"
            self.quote = "" if char == self.quote else self.quote
        elif char in self._quotes:
            self.quote = char
        elif char in "([{":
            self.depth += 1
        elif char in ")]}":
            self.depth -= 1


def n_open(text: str, literals: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin one of `literals`."""
    longest = max((len(one) for one in literals), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        end = text[-n:]
        if any(len(one) > n and one.startswith(end) for one in literals):
            return n
    return 0
