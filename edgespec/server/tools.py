"""Function calls: passes those of a conversation to the chat template, and finds those in an answer.

Models write a call as Qwen's and Hermes' templates ask for it: <tool_call>{"name": ..., "arguments": {...}}
</tool_call>. Small ones often leave out the tags, put a code fence around the object or double its outer
braces; an answer that consists of such an object alone counts as a call too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from edgespec.server.schema import AssistantMessage, Content, Message, Tool

_COMPACT = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}
OPEN, CLOSE = "<tool_call>", "</tool_call>"

_BARE = (
    "{",
    "```json",
    "```\n{",
    "<tools>",
)  # beginnings of answers that may be calls without tags
_WRAPPING = re.compile(r"^(?:```(?:json)?|<tools>)|(?:```|</tools>)$")
_NEXT = re.compile(r"[^\s},]|$")  # where the next value begins


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return `messages` as chat templates take them: plain text, "system", and arguments as objects."""
    return [_for_template(message) for message in messages]


def _for_template(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.name is not None:
        made["name"] = message.name
    if message.role == "developer":
        made["role"] = "system"  # templates do not know OpenAI's newer name
    if isinstance(message, AssistantMessage) and message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _arguments(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return the object that templates write as JSON; text that is not JSON is returned as it is."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# ---- the grammar of a forced call ----


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of `tools`."""
    definitions = {}
    kinds = []
    for i, tool in enumerate(tools):
        place = f"#/$defs/tool{i}"
        definitions[f"tool{i}"] = _moved(tool.function.parameters or {"type": "object"}, place)
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
            }
        )
    return {"$defs": definitions, "anyOf": kinds}


def _moved(schema: Any, place: str) -> Any:  # noqa: ANN401 - JSON
    """Return `schema` with the references to itself changed to where it is inserted, `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def in_tags(schema: Mapping[str, Any], *, many: bool) -> str:
    """Return the Lark grammar of a call in its tags, from the schema of a bare call; `many`: one or more."""
    call = f'call: "{OPEN}\\n" %json {json.dumps({**schema, **_COMPACT})} "\\n{CLOSE}"\n'
    return call + "start: call" + (r' ("\n" call)*' if many else "") + "\n"


# ---- calls in a text ----


@dataclass(frozen=True)
class Said:
    """Text outside calls: the characters from `start` to `end` of all that was fed."""

    start: int
    end: int


@dataclass(frozen=True)
class Called:
    """A call; `arguments` is JSON text of an object."""

    name: str
    arguments: str


class CallReader:
    """Splits a text that comes in pieces into plain text and calls.

    Only an object that names a known function and has an object of arguments counts as a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Look for calls of the functions of these `names`."""
        self._names = names
        self._held = ""  # what is not decided yet
        self._at = 0  # where it stands in the whole text
        self._bare = True  # so far the whole answer may be a call without tags
        self._called = False

    def feed(self, text: str) -> Iterator[Said | Called]:
        """Add `text`, and yield what is certain now."""
        self._held += text
        yield from self._read(at_end=False)

    def finish(self) -> Iterator[Said | Called]:
        """Yield what was held back: the text ends here."""
        if self._bare and (calls := self._calls(self._held)):
            self._held = ""
            yield from calls
            return
        self._bare = False
        yield from self._read(at_end=True)
        if not self._called or self._held.strip():
            yield from self._say(len(self._held))

    def _read(self, *, at_end: bool) -> Iterator[Said | Called]:
        while not self._may_be_bare():
            start = self._held.find(OPEN)
            if start < 0:
                yield from self._say(self._n_certain())
                return
            yield from self._say(len(self._held[:start].rstrip()))
            start = self._held.find(OPEN)
            end, length = self._end_of_call(start, at_end=at_end)
            if end is None:
                return
            calls = self._calls(self._held[start + len(OPEN) : end])
            if calls:
                self._called = True
                self._skip(end + length)
                yield from calls
            else:
                yield from self._say(end + length)

    def _may_be_bare(self) -> bool:
        text = self._held.lstrip()
        self._bare = self._bare and any(text.startswith(o) or o.startswith(text) for o in _BARE)
        return self._bare

    def _n_certain(self) -> int:
        """Return how many characters cannot belong to a later call or to the white space before it."""
        n = max(n for n in range(len(OPEN)) if self._held.endswith(OPEN[:n]))
        return len(self._held[: len(self._held) - n].rstrip())

    def _end_of_call(self, start: int, *, at_end: bool) -> tuple[int | None, int]:
        """Return where the call with its tag at `start` ends, and the length of its closing tag."""
        end = self._held.find(CLOSE, start)
        while end >= 0 and _in_string(self._held[start + len(OPEN) : end]):
            end = self._held.find(CLOSE, end + 1)
        if end >= 0:
            return end, len(CLOSE)
        return (len(self._held) if at_end else None), 0

    def _say(self, n: int) -> Iterator[Said]:
        if n:
            yield Said(self._at, self._at + n)
        self._skip(n)

    def _skip(self, n: int) -> None:
        self._held = self._held[n:]
        self._at += n

    def _calls(self, text: str) -> list[Called]:
        """Return the calls that `text` consists of; [] if it contains anything else."""
        try:
            found = [_call(value) for value in _values(text)]
        except (ValueError, RecursionError):
            return []
        calls = [call for call in found if call and call.name in self._names]
        return calls if len(calls) == len(found) else []


def _in_string(text: str) -> bool:
    """Return whether JSON text is inside a string at its end."""
    return len(re.findall(r'"', re.sub(r"\\.", "", text, flags=re.DOTALL))) % 2 == 1


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of `text` one after another. Raises ValueError for anything between them."""
    text = _WRAPPING.sub("", text.strip()).strip()
    if text.startswith("{{"):
        text = text[1:]  # the closing bracket is skipped like a comma
    decoder = json.JSONDecoder(parse_constant=_refuse)
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield from value if isinstance(value, list) else [value]
        found = _NEXT.search(text, position)
        position = found.start() if found else len(text)


def _call(value: Any) -> Called | None:  # noqa: ANN401 - JSON
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    if not isinstance(arguments, dict):
        return None
    return Called(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
