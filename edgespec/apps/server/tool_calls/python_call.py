"""Calls as Python writes them: f(a="b", n=1)."""

from __future__ import annotations

import re

from edgespec.apps.server.tool_calls.argument_values import literal_json, write_json
from edgespec.apps.server.tool_calls.call_reader import CallReader
from edgespec.apps.server.tool_calls.text_source import BracketScan, Steps

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\s*([A-Za-z_$@][\w$@.\-]*)\s*=(?!=)")  # also names that Python does not have


class PythonCallReader(CallReader):
    """Reads calls as Python writes them."""

    def read(self, name: str = "") -> Steps[bool]:
        """Read calls as Python writes them, separated by commas: of `name`, at its bracket, or any."""
        source, found = self._source, False
        while True:
            start = source.position
            yield from source.skip_space()
            name = name or (yield from source.word(_NAME))
            if name not in self._functions or not (yield from source.literal(["("])):
                source.back(start)
                return found
            found = True
            self._begin(name)
            yield from self._read_arguments(name)
            yield from source.skip_space()
            name = ""
            if not (yield from source.literal([","])):
                yield from source.literal(["]"])
                return True

    def _read_arguments(self, name: str) -> Steps[None]:
        source, n = self._source, 0
        places = [*self._functions[name].get("properties", {})]
        while True:
            text, end = yield from self._argument()
            if text.strip() and end:
                key = _KEY.match(text)
                place = places[n] if n < len(places) else f"argument_{n + 1}"
                named = key[1] if key else place
                value = literal_json(text[key.end() :] if key else text)
                self._add(f"{', ' if n else '{'}{write_json(named)}: {value}")
                n += 1
            if end != ",":
                if end:
                    self._add("}" if n else "{}")
                self._end(complete=bool(end))
                return
            source.forget()

    def _argument(self) -> Steps[tuple[str, str]]:
        """Return the text of an argument and the sign that ends it, "," or ")"; "" where the text ends."""
        source, scan = self._source, _PythonScan("\"'")
        parts: list[str] = []
        while True:
            rest = source.rest
            n = scan.advance(rest)
            parts.append(source.take(n))
            if n < len(rest):
                return "".join(parts), source.take(1)
            if source.ended:
                return "".join(parts), ""
            yield


class _PythonScan(BracketScan):
    """Finds the comma or the bracket that ends an argument, a piece at a time."""

    def advance(self, text: str) -> int:
        """Return how many characters of `text` belong to the argument."""
        for i, char in enumerate(text):
            if not self.quote and not self.depth and char in ",)":
                return i
            self.step(char)
        return len(text)
