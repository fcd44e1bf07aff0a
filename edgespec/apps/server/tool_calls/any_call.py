"""Reads a call in any form: an object of JSON, a name with an object or with tagged values, Python's call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from edgespec.apps.server.tool_calls.call_forms import CallForm
from edgespec.apps.server.tool_calls.call_reader import Functions
from edgespec.apps.server.tool_calls.json_call import JsonCallReader
from edgespec.apps.server.tool_calls.python_call import PythonCallReader
from edgespec.apps.server.tool_calls.tagged_call import TaggedCallReader
from edgespec.apps.server.tool_calls.text_source import Event, Steps, TextSource

_NAME = re.compile(r"[\w.\-]+")
_MARK = re.compile(r"[<\[][^<>\[\]]*[>\]]?")
_MOST_GLUE = 100  # characters between a name and its arguments
_MOST_WORDS = 4  # before a name: its type, an id


class AnyCallReader:
    """Reads calls of known functions from a source, in whichever form they are written."""

    def __init__(
        self,
        source: TextSource,
        emit: Callable[[Event], None],
        functions: Functions,
        forms: Sequence[CallForm],
    ) -> None:
        """Read calls of `functions` from `source`, in `forms` among others; `emit` gets the events."""
        self._source = source
        self._functions = functions
        self._json = JsonCallReader(source, emit, functions)
        self._keyed = TaggedCallReader(source, emit, functions)
        self._python = PythonCallReader(source, emit, functions)
        self._keyed_forms = [form.keyed for form in forms if form.keyed and not form.keyed.quoted]
        self._edges = {mark for form in forms for mark in (*form.openers[:1], *form.closers)}
        self._reads_python = any(form.keyed and form.keyed.quoted for form in forms)

    def read(self) -> Steps[bool]:
        """Read one call, or a list of them."""
        source = self._source
        start = source.position
        following = yield from source.skip_space()
        if following == "`":
            yield from source.literal(["```json", "```"])
            following = yield from source.skip_space()
        if following == "[":
            source.take(1)
            if (yield from source.skip_space()) == "{":
                return (yield from self._json.read_list())
            if self._reads_python:
                return (yield from self._python.read())
        elif following == "{":
            return (yield from self._json.read_object())
        elif following and (yield from self._read_named()):
            return True
        source.back(start)
        return False

    # ---- a name, and what follows ----

    def _read_named(self) -> Steps[bool]:
        """Read a call that begins with its function's name, perhaps after other words and markers."""
        source = self._source
        for _ in range(_MOST_WORDS):
            if (yield from source.skip_space()) == "{":
                return (yield from self._json.read_object())
            word = yield from source.word(_NAME)
            name = word.removeprefix("functions.").removeprefix("to=functions.")
            if name in self._functions:
                return (yield from self._read_after_name(name))
            following = yield from source.peek()
            if following not in ("<", "[", "=", " ", ":") or not (word or following == "<"):
                return False
            if following in ("=", " ", ":"):
                source.take(1)
            elif (yield from source.word(_MARK)) in self._edges:
                return False
        return False

    def _read_after_name(self, name: str) -> Steps[bool]:
        """Read the arguments of `name`: an object, tagged values, or none."""
        source = self._source
        for keyed in self._keyed_forms:
            if keyed.quote:
                if (yield from source.peek()) == keyed.none:
                    yield from self._keyed.read_marked(name, keyed.quote)
                    return True
                continue
            start = source.position
            if (yield from self._keyed.read_arguments(name, keyed)):
                return True
            source.back(start)
        if self._reads_python and (yield from source.peek()) == "(":
            return (yield from self._python.read(name))
        glue = 0
        while glue < _MOST_GLUE and (following := (yield from source.peek())):
            if following == "{":
                yield from self._json.stream_object(name)
                return True
            source.take(1)
            glue += 1
        return False
