"""Turns requests for responses into those for chat completions, which the server's one reader prepares."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

from edgespec.apps.server.api_errors import ApiError, checked, renaming, with_names
from edgespec.apps.server.request_reader import PreparedText, RequestReader
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.responses.schema import (
    AllowedChoice,
    CallItem,
    CallOutputItem,
    ChosenTool,
    CustomCallItem,
    CustomDefinition,
    FunctionDefinition,
    GrammarInput,
    Item,
    MessageItem,
    NamespaceDefinition,
    ReasoningItem,
    ResponsesRequest,
    SchemaAnswer,
    SearchDefinition,
    TextOptions,
    ToolChoice,
    text_of,
)
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.decoding.sampling import SAMPLING
from edgespec.errors import UsageError

# ---- tools as functions, which are what models' templates know, and their calls as they come ----
# A custom tool takes text: it becomes a function of one string. The tools of a namespace carry its name.

INPUT = "input"
"""The argument of a custom tool's function."""

_KEPT = 64
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+"
)
"""The characters of a JSON string that are there as a whole."""


ToolKey = tuple[str | None, str]
"""The namespace and the name of a tool."""


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
    names: dict[ToolKey, str] = field(default_factory=dict)
    """Which function each tool is."""
    warnings: list[str] = field(default_factory=list)
    """Lines on what is done only in part."""


def _joined(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def read_tools(body: ResponsesRequest) -> ReadTools:
    """Return the tools of `body`. Raises ApiError."""
    read = ReadTools()
    functions = []
    choice = body.tool_choice
    is_forced = (choice.mode if isinstance(choice, AllowedChoice) else choice) not in (None, "none", "auto")
    for place, tool, namespace in _tools(body, read.warnings):
        key, name = (namespace, tool.name), _joined(namespace, tool.name)
        if key in read.names:
            raise ApiError(400, f"{place}: there are two tools called {name[:80]!r}", param="tools")
        while name in read.offered:  # a__b in c, and b__c in a
            name += "_"
        read.names[key] = name
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
        read.fields["tool_choice"] = _choice(choice, read)
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


def _choice(choice: ToolChoice, read: ReadTools) -> Any:  # noqa: ANN401 - JSON
    def named(chosen: ChosenTool) -> dict[str, Any]:
        name = read.names.get((chosen.namespace, chosen.name), chosen.name)  # or joined by the client
        if name not in read.offered or read.offered[name].type != chosen.type:
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


# ---- thoughts that a client keeps without reading them, and sends back ----

_MARK = "edgespec:"


def sealed(thought: str) -> str:
    """Return the `encrypted_content` of a thought: its text in base64, which hides nothing from anybody.

    Clients that store nothing here send this back, and leave the text out.
    """
    return _MARK + base64.b64encode(thought.encode()).decode()


def opened(content: str | None) -> str:
    """Return the thought that `sealed` made `content` of; "" for another server's."""
    if content is None or not content.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""


# ---- requests ----

_SAME_FIELDS = {
    *(option.request_name(name) for name, option in SAMPLING.items() if name != "logit_bias"),
    *("model", "parallel_tool_calls", "top_logprobs", "seed", "speculative"),
}
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""This API's names of the fields of chat completions."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PreparedResponse:
    """A request as the worker writes it."""

    text: PreparedText
    tools: Mapping[str, ResponseTool]
    """The tools, by the names of their functions."""


class ResponsesReader:
    """Reads requests to one model. Its methods are for any thread, and raise ApiError."""

    def __init__(self, reader: RequestReader) -> None:
        """Let `reader` prepare requests."""
        self._reader = reader

    def read(self, body: ResponsesRequest) -> PreparedResponse:
        """Return the prompt's tokens, the options and the tools of a request. Raises ApiError."""
        items = _items(body)
        tools = read_tools(body)
        with renaming(partial(with_names, names=_NAMES)):
            text = self._reader.chat(self._chat(body, items, tools))
        warnings = (*tools.warnings, *_unread(body, items), *map(_renamed, text.warnings))
        return PreparedResponse(replace(text, warnings=warnings), tools.offered)

    def count(self, body: ResponsesRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        with renaming(partial(with_names, names=_NAMES)):
            return len(self._reader.prompt_tokens(self._chat(body, _items(body), read_tools(body))))

    def _chat(self, body: ResponsesRequest, items: Sequence[Item], tools: ReadTools) -> ChatRequest:
        """Return the request for a chat completion."""
        fields = body.model_dump(include=_SAME_FIELDS, exclude_none=True) | tools.fields
        if body.wants_logprobs:
            fields["logprobs"] = True
        if body.max_output_tokens is not None:
            fields["max_completion_tokens"] = body.max_output_tokens
        if body.reasoning and body.reasoning.effort is not None:
            fields["reasoning_effort"] = body.reasoning.effort
        if form := _response_format(body.text):
            fields["response_format"] = form
        fields["messages"] = _Conversation(body.instructions, items, tools.names).messages
        return checked(ChatRequest, fields)


def _items(body: ResponsesRequest) -> list[Item]:
    """Return the whole input, with the stored conversation before it."""
    given = body.input
    if isinstance(given, str):
        given = [MessageItem(type="message", role="user", content=given)]
    if items := [*body.edgespec_conversation, *(given or ())]:
        return items
    line = "input: send text or items, or the previous_response_id of a response to go on with"
    raise ApiError(400, line, param="input")


# ---- messages ----


class _Conversation:
    """The messages of items. `names`: the functions that tools are, by the namespace and the name of each."""

    def __init__(self, instructions: str | None, items: Sequence[Item], names: Mapping[ToolKey, str]) -> None:
        self._functions = names
        self._names: dict[str, str] = {}  # of the called functions, by the calls' ids
        self.messages: Messages = []
        if instructions:
            self.messages.append({"role": "system", "content": instructions})
        for item in items:
            self._add(item, self.messages)

    def _add(self, item: Item, messages: Messages) -> None:
        """Add `item`: thoughts, text and calls of one answer are one message."""
        if isinstance(item, ReasoningItem):
            if thought := _thought(item):
                self._assistant(messages, "content", "tool_calls")["reasoning_content"] = thought
        elif isinstance(item, MessageItem) and item.role == "assistant":
            self._assistant(messages, "content", "tool_calls")["content"] = text_of(item.content)
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, CallItem):
            calls = self._assistant(messages).setdefault("tool_calls", [])
            calls.append(self._call(item))
        elif isinstance(item, CallOutputItem):
            message = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
            if item.call_id in self._names:
                message["name"] = self._names[item.call_id]
            messages.append(message)

    @staticmethod
    def _assistant(messages: Messages, *without: str) -> dict[str, Any]:
        """Return the last message if it is the assistant's and lacks the fields `without`, else a new one."""
        if messages and messages[-1]["role"] == "assistant" and not messages[-1].keys() & {*without}:
            return messages[-1]
        messages.append({"role": "assistant"})
        return messages[-1]

    def _call(self, item: CallItem) -> dict[str, Any]:
        key = (item.namespace, item.name)
        name = self._names[item.call_id] = self._functions.get(key) or _joined(*key)
        if isinstance(item, CustomCallItem):
            arguments = json.dumps({INPUT: item.input}, ensure_ascii=False)
        else:
            arguments = getattr(item, "arguments", "")
        return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(item: ReasoningItem) -> str:
    return text_of(item.content or []) or opened(item.encrypted_content) or text_of(item.summary or [])


# ---- fields ----


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text else None
    if isinstance(form, SchemaAnswer):
        schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": form.type, "json_schema": schema}
    return {"type": form.type} if form else None


def _unread(body: ResponsesRequest, items: Sequence[Item]) -> Iterator[str]:
    if body.text and body.text.verbosity not in (None, "medium"):
        yield "text.verbosity: not honoured: say in the instructions how long the answer should be"
    thoughts = [item for item in items if isinstance(item, ReasoningItem)]
    if any(item.encrypted_content and not _thought(item) for item in thoughts):
        yield "input: thoughts that another server has encrypted are not read"


def _renamed(warning: str) -> str:
    name, colon, rest = warning.partition(":")
    return _NAMES.get(name, name) + colon + rest
