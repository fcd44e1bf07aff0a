"""The base of the readers of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgespec.apps.server.tool_calls.text_source import CallArguments, CallEnd, CallStart, Event, TextSource

Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of the functions that may be called, by name."""


class CallReader:
    """Reads calls of known functions from a source.

    A reader begins where a call may begin, and returns whether there is one. Nothing is emitted before the
    name of a known function and the beginning of its arguments: a text that fails there is no call. All that
    follows is the call's.
    """

    def __init__(self, source: TextSource, emit: Callable[[Event], None], functions: Functions) -> None:
        """Read calls of `functions` from `source`; `emit` gets the events."""
        self._source = source
        self._emit = emit
        self._functions = functions

    def _begin(self, name: str) -> None:
        """Emit the start of a call, from where the cursor cannot go back."""
        self._emit(CallStart(name))
        self._source.forget()

    def _add(self, text: str) -> None:
        self._emit(CallArguments(text))

    def _end(self, *, complete: bool) -> None:
        self._emit(CallEnd(complete))
