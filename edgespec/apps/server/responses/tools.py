"""The tools of a request as functions, which are what models' templates know, and their calls as they come.

A custom tool takes text: it becomes a function of one string. The tools of a namespace carry its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.responses.request_schema import (
    AllowedChoice,
    ChosenTool,
    CustomDefinition,
    FunctionDefinition,
    GrammarInput,
    NamespaceDefinition,
    ResponsesRequest,
    SearchDefinition,
    ToolChoice,
)
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.errors import UsageError

INPUT = "input"
"""The argument of a custom tool's function."""

_LONGEST_NAME = 64
_KEPT = 64
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+"
)
"""The characters of a JSON string that are there as a whole."""


@dataclass(frozen=True)
class ResponseTool:
    """A tool, by the names that its calls have."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass
class ReadTools:
    """The tools of a request, as a chat completion names them."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Those of a request for a chat completion."""
    offered: dict[str, ResponseTool] = field(default_factory=dict)
    """Which tool each function is."""
    warnings: list[str] = field(default_factory=list)
    """Lines on what is done only in part."""


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that a tool becomes."""
    return f"{namespace}__{name}" if namespace else name


def read_tools(body: ResponsesRequest) -> ReadTools:
    """Return the tools of `body`. Raises ApiError."""
    read = ReadTools()
    functions = []
    choice = body.tool_choice
    is_forced = (choice.mode if isinstance(choice, AllowedChoice) else choice) not in (None, "none", "auto")
    for place, tool, namespace in _tools(body, read.warnings):
        name = function_name(tool.name, namespace)
        if name in read.offered:
            raise ApiError(400, f"{place}: there are two tools called {name[:80]!r}", param="tools")
        if len(name) > _LONGEST_NAME:
            line = f"{place}: {name[:80]!r} is longer than {_LONGEST_NAME} characters: shorten it"
            raise ApiError(400, line, param="tools")
        read.offered[name] = ResponseTool(tool.type, tool.name, namespace)
        if isinstance(tool, CustomDefinition):
            functions.append(_of_text(name, tool, place))
            if isinstance(tool.format, GrammarInput) and not (is_forced and tool.format.syntax == "regex"):
                read.warnings.append(f"{place}.format: not enforced: the model is shown the grammar")
        else:
            functions.append(
                {"name": name, **tool.model_dump(include={"description", "parameters", "strict"})}
            )
    if functions:
        read.fields["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        read.fields["tool_choice"] = _choice(choice, read.offered)
    return read


def _tools(
    body: ResponsesRequest, warnings: list[str]
) -> Iterator[tuple[str, FunctionDefinition | CustomDefinition, str | None]]:
    """Yield each tool with its place in the request and its namespace."""
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, SearchDefinition):
            warnings.append(f"tools.{i}: {tool.type} is left out: this server searches nothing")
        elif isinstance(tool, NamespaceDefinition):
            for j, inner in enumerate(tool.tools):
                yield f"tools.{i}.tools.{j}", inner, tool.name
        else:
            yield f"tools.{i}", tool, None


def _of_text(name: str, tool: CustomDefinition, place: str) -> dict[str, Any]:
    """Return the function of a custom tool."""
    text: dict[str, Any] = {"type": "string"}
    described = tool.description
    if isinstance(tool.format, GrammarInput):
        syntax, definition = tool.format.syntax, tool.format.definition
        if mistake := _mistake(syntax, definition):
            raise ApiError(400, f"{place}.format.definition: {mistake}", param="tools")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            text["description"] = f"Text that matches this Lark grammar:\n{definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"name": name, "description": described, "parameters": parameters}


@lru_cache(maxsize=_KEPT)
def _mistake(syntax: Literal["lark", "regex"], definition: str) -> str:
    """Return what is wrong with a grammar, if anything is."""
    read = GrammarSource.lark if syntax == "lark" else GrammarSource.regex
    try:
        read(definition, syntax)
    except UsageError as error:
        return " ".join(str(error).split())
    return ""


def _choice(choice: ToolChoice, offered: dict[str, ResponseTool]) -> Any:  # noqa: ANN401 - JSON
    def named(chosen: ChosenTool) -> dict[str, Any]:
        name = function_name(chosen.name, chosen.namespace)
        if offered.get(name) != ResponseTool(chosen.type, chosen.name, chosen.namespace):
            line = f"tool_choice: no {chosen.type} tool {chosen.name[:80]!r} in tools"
            raise ApiError(400, line, param="tool_choice")
        return {"type": "function", "function": {"name": name}}

    if isinstance(choice, ChosenTool):
        return named(choice)
    if isinstance(choice, AllowedChoice):
        tools = [named(chosen) for chosen in choice.tools]
        return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}
    return choice


# ---- the text of a custom tool's call ----


class CustomInput:
    """The input of a custom tool, read from the arguments of its function as they come."""

    def __init__(self) -> None:
        """Begin with no arguments."""
        self._arguments = ""
        self._at = 0  # up to which they are read
        self._read = ""

    def feed(self, arguments: str) -> str:
        """Add `arguments`, and return the text that they complete."""
        self._arguments += arguments
        if not self._at:
            begin = _BEGIN.match(self._arguments)
            self._at = begin.end() if begin else 0
        if not self._at:
            return ""
        whole = _WHOLE.match(self._arguments, self._at)
        assert whole  # it matches nothing, too  # noqa: S101
        self._at = whole.end()
        added = _text(f'"{whole[0]}"') or ""
        self._read += added
        return added

    def finish(self) -> str:
        """Return the whole input; arguments of another kind are its text."""
        arguments = _text(self._arguments)
        if isinstance(arguments, dict) and isinstance(found := arguments.get(INPUT), str):
            return found
        return self._read or self._arguments


def _text(text: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
