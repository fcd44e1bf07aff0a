"""Calls written as objects of JSON: {"name": ..., "arguments": {...}}, and lists of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.apps.server.tool_calls.argument_values import read_json
from edgespec.apps.server.tool_calls.call_reader import CallReader
from edgespec.apps.server.tool_calls.text_source import BracketScan, Steps
from edgespec.apps.server.tool_calls.untagged_calls import ARGUMENT_KEYS, NAME_KEYS


@dataclass
class _Object:
    """The part of an object that was read."""

    name: str = ""
    arguments: str = ""
    """Arguments that came before the name."""
    emitted: bool = False
    """Whether a call was emitted."""


class JsonCallReader(CallReader):
    """Reads calls that are JSON objects."""

    def read_list(self) -> Steps[bool]:
        """Read the objects of a list, after its bracket."""
        found = False
        while (yield from self._source.skip_space()) == "{":
            if not (yield from self.read_object()):
                return found
            found = True
            yield from self._source.skip_space()
            yield from self._source.literal([","])
        yield from self._source.literal(["]"])
        return found

    def read_object(self) -> Steps[bool]:
        """Read an object that names a function and has an object of arguments."""
        source, read = self._source, _Object()
        source.take(1)
        if (yield from source.skip_space()) == "{":
            source.take(1)  # some double the braces
        while (following := (yield from source.skip_space())) in ('"', ","):
            if following == ",":
                source.take(1)
            elif not (yield from self._read_pair(read)):
                return read.emitted
        if not read.emitted and read.name and (following == "}" or read.arguments):
            self._begin(read.name)
            self._add(read.arguments or "{}")
            self._end(complete=True)
            read.emitted = True
        if following == "}":
            source.take(1)
        return read.emitted

    def _read_pair(self, read: _Object) -> Steps[bool]:
        """Read a key and its value; return whether the object may go on."""
        source = self._source
        key = yield from self._read_string()
        yield from source.skip_space()
        if key is None or not (yield from source.literal([":"])):
            return False
        value = yield from source.skip_space()
        if key == "function" and value == "{" and not read.emitted:
            read.emitted = yield from self.read_object()
            return read.emitted
        if key in (*NAME_KEYS, "function") and value == '"' and not read.emitted:
            read.name = (yield from self._read_string()) or ""
            return read.name in self._functions
        if key in ARGUMENT_KEYS and value == "{" and read.name and not read.emitted:
            yield from self.stream_object(read.name)
            read.emitted = True
            return True
        if key in self._functions and value == "{" and not (read.name or read.emitted):
            yield from self.stream_object(key)  # {NAME: {...}}
            read.emitted = True
            return True
        raw = yield from self._collect_value()
        if raw is not None and key in ARGUMENT_KEYS and not read.emitted:
            read.arguments = _object_text(raw)
            return bool(read.arguments)
        return raw is not None

    def stream_object(self, name: str) -> Steps[None]:
        """Emit a call whose arguments begin here as a JSON object."""
        self._begin(name)
        complete = yield from self._read_value(self._add)
        self._end(complete=complete)

    def _read_string(self) -> Steps[str | None]:
        raw = yield from self._collect_value()
        try:
            return None if raw is None else str(read_json(raw))
        except ValueError:
            return None

    def _collect_value(self) -> Steps[str | None]:
        """Read a JSON value and return its text; None if the text ends in the middle of it."""
        parts: list[str] = []
        complete = yield from self._read_value(parts.append)
        return "".join(parts) if complete else None

    def _read_value(self, take: Callable[[str], None]) -> Steps[bool]:
        """Read a JSON value; `take` gets its text as it comes. Return whether it is complete."""
        source, scan = self._source, _JsonScan()
        while True:
            rest = source.rest
            n = scan.advance(rest)
            if n:
                take(source.take(n))
            if scan.done or n < len(rest):
                return scan.done
            if source.ended:
                return scan.is_scalar
            yield


class _JsonScan(BracketScan):
    """Finds the end of a JSON value, a piece at a time."""

    _outside = frozenset('{}[],:+-.0123456789 \t\r\n"abcdefghijklmnopqrstuvwxyzEINT')

    def __init__(self) -> None:
        super().__init__('"')
        self.done = False
        self._begun = False

    @property
    def is_scalar(self) -> bool:
        """Whether the value, so far, is a number or a name, which only what follows ends."""
        return self._begun and not self.depth and not self.quote

    def advance(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        for i, char in enumerate(text):
            if not self.quote:
                self.done = self.is_scalar and char in ",}] \t\r\n"
                if self.done or char not in self._outside:
                    return i
            self._begun = True
            self.step(char)
            if not self.quote and self.depth <= 0 and char in '"}]':
                self.done = True
                return i + 1
        return len(text)


def _object_text(raw: str) -> str:
    """Return the text of an object that may be written as a string, or be null; "" if it is no object."""
    try:
        value = read_json(raw)
        if isinstance(value, str):
            raw = value
            value = read_json(value)
    except ValueError:
        return ""
    if value is None:
        return "{}"
    return raw if isinstance(value, dict) else ""
