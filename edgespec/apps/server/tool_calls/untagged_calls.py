"""Answers that consist of calls alone, as small models write them: without tags, fenced, with doubled braces.

They are read as a whole: an object that is followed by anything else is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import read_json, refuse_constant, write_json
from edgespec.apps.server.tool_calls.text_source import CallArguments, CallEnd, CallStart, Event

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")

_BEGINNINGS = ("{", "```json", "```\n{", "<tools>")
_WRAPPING = re.compile(r"^(?:```(?:json)?|<tools>)|(?:```|</tools>)$")
_NEXT = re.compile(r"[^\s},;]|$")  # where the next value begins
_FIRST_KEY = re.compile(r'(?:```(?:json)?|<tools>)?[\s{]*"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?')
_KEYS = frozenset([*NAME_KEYS, *ARGUMENT_KEYS, "type", "function", "id"])


def may_be_calls(text: str, names: Collection[str]) -> bool:
    """Whether a text that begins with `text` may consist of calls of these functions."""
    text = text.lstrip()
    if not any(text.startswith(start) or start.startswith(text) for start in _BEGINNINGS):
        return False
    if not (first := _FIRST_KEY.match(text)):
        return True
    return first[1] in _KEYS and (first[1] not in NAME_KEYS or first[2] is None or first[2] in names)


def calls_of(text: str, names: Collection[str]) -> list[tuple[Event, ...]]:
    """Return the calls that `text` consists of; [] if it contains anything else."""
    try:
        found = [call_of(value) for value in _values(text)]
    except (ValueError, RecursionError):
        return []
    calls = [call for call in found if call and call[0] in names]
    if len(calls) != len(found):
        return []
    return [(CallStart(name), CallArguments(arguments), CallEnd(complete=True)) for name, arguments in calls]


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of `text` one after another. Raises ValueError for anything between them."""
    text = _WRAPPING.sub("", text.strip()).strip()
    if text.startswith("{{"):
        text = text[1:]  # the closing bracket is skipped like a comma
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield from value if isinstance(value, list) else [value]
        found = _NEXT.search(text, position)
        position = found.start() if found else len(text)


def call_of(value: Any) -> tuple[str, str] | None:  # noqa: ANN401 - JSON
    """Return the name and the arguments of the call that a JSON value is; None if it is none."""
    if not isinstance(value, dict):
        return None
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = next((value[key] for key in (*NAME_KEYS, "function") if key in value), None)
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments := arguments or {}, dict):
        return None
    json.dumps(arguments, allow_nan=False)  # an infinity is no JSON: ValueError
    return name, write_json(arguments)
