"""Calls whose arguments stand in tags of their own, after the function's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import is_text, literal_json, typed_json, write_json
from edgespec.apps.server.tool_calls.call_forms import ArgumentForm
from edgespec.apps.server.tool_calls.call_reader import CallReader
from edgespec.apps.server.tool_calls.text_source import Steps, n_open

_BARE = re.compile(r"[^\s,:{}\[\]<]+")


class TaggedCallReader(CallReader):
    """Reads tagged arguments, and emits them as one object of JSON."""

    def read_arguments(self, name: str, keyed: ArgumentForm) -> Steps[bool]:
        """Read the arguments of `name`, which are written as `keyed` says."""
        source = self._source
        edge = keyed.none.strip() or keyed.first.strip()[: -len(keyed.opener)].strip()
        yield from source.skip_space()
        if edge and not (yield from source.literal([edge, *([edge[1:]] if edge[:1] == '"' else [])])):
            return False
        following = yield from source.skip_space()
        opened = yield from source.literal([keyed.opener])
        if not opened and following not in ("<", ""):
            return False
        self._begin(name)
        written = "{"
        while opened:
            self._add(written)
            if not (yield from self._read_pair(name, keyed)):
                self._end(complete=False)
                return True
            written = ", "
            yield from source.skip_space()
            opened = yield from source.literal([keyed.opener])
        if source.take_beginning([keyed.opener]):
            self._end(complete=False)
            return True
        self._add("{}" if written == "{" else "}")
        self._end(complete=bool((yield from source.skip_space())))
        return True

    def _read_pair(self, name: str, keyed: ArgumentForm) -> Steps[bool]:
        """Read a key and its value after the key's opener; return whether they are complete."""
        source, whole = self._source, self._functions[name]
        equals, closing = keyed.equals.strip(), keyed.closing.strip()
        key = yield from self._text_until(equals.split()[0] if equals else ">")
        if key is None:
            return False
        for part in equals.split()[1:]:
            yield from source.skip_space()
            yield from source.literal([part])
        if keyed.equals.endswith("\n"):
            yield from source.literal(["\n"])
        schema = _property(whole, key.strip())
        self._add(f"{write_json(key.strip())}: ")
        own_line = keyed.closing.startswith("\n")
        if is_text(schema, whole):
            self._add('"')
            complete = yield from self._stream_text(closing, own_line=own_line)
            self._add('"' if complete else "")
            return complete
        value = yield from self._text_until(closing)
        if value is None:
            return False
        self._add(typed_json(value.removesuffix("\n") if own_line else value, schema, whole))
        return True

    def read_marked(self, name: str, quote: str) -> Steps[None]:
        """Read an object that begins here, in which keys are bare and `quote` stands around texts."""
        source, depth = self._source, 0
        self._begin(name)
        while following := (yield from source.skip_space()):
            if (yield from source.literal([quote])):
                self._add('"')
                if not (yield from self._stream_text(quote, own_line=False)):
                    break
                self._add('"')
            elif source.take_beginning([quote]):
                break
            elif following == '"':  # a text of JSON
                self._add(source.take(1))
                if not (yield from self._copy_string()):
                    break
            elif following in "{[}],:":
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(following, 0)
                self._add(source.take(1) + (" " if following in ",:" else ""))
            else:
                word = (yield from source.word(_BARE)) or source.take(1)
                is_key = (yield from source.skip_space()) == ":"
                self._add(write_json(word) if is_key else literal_json(word))
            if depth == 0:
                self._end(complete=True)
                return
        self._end(complete=False)

    def _copy_string(self) -> Steps[bool]:
        """Emit the rest of a JSON string; return whether it ends."""
        while (char := (yield from self._source.peek())) and char != '"':
            self._add(self._source.take(1 + (char == "\\" and len((yield from self._source.peek(2))) > 1)))
        self._add(self._source.take(1))
        return bool(char)

    def _stream_text(self, closing: str, *, own_line: bool) -> Steps[bool]:
        """Emit text up to `closing` as the inside of a JSON string; return whether that came.

        `own_line`: a line end before it does not count.
        """
        source = self._source
        ends = [f"\n{closing}", closing] if own_line else [closing]
        while True:
            rest = source.rest
            at = rest.find(closing)
            n = at if at >= 0 else len(rest) - n_open(rest, ends)
            if at >= 0 and own_line:
                n -= rest[:at].endswith("\n")
            if n > 0:
                self._add(write_json(source.take(n))[1:-1])
                source.forget()
            if at >= 0:
                source.take(at - n + len(closing))
                return True
            if source.ended:
                source.take(len(rest))  # the beginning of what ends it
                return False
            yield

    def _text_until(self, end: str) -> Steps[str | None]:
        """Return the text before `end` and move behind it; None if it does not come."""
        source = self._source
        while (at := source.rest.find(end)) < 0:
            if source.ended:
                source.take(len(source.rest))
                return None
            yield
        text = source.take(at)
        source.take(len(end))
        return text


def _property(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = whole.get("properties", {}).get(key)
    return found if isinstance(found, Mapping) else {}
