"""Turns requests for responses into those for chat completions, which the server's one reader prepares."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from edgespec.apps.server.api_errors import ApiError, checked
from edgespec.apps.server.request_fields import ignore
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    AllowedChoice,
    ChosenTool,
    CustomDefinition,
    FunctionDefinition,
    GrammarInput,
    Item,
    NamespaceDefinition,
    ResponsesRequest,
    SearchDefinition,
    ToolChoice,
    text_of,
)
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.decoding.sampling import SAMPLING
from edgespec.errors import UsageError

# ---- tools as functions, which are what models' templates know ----
# A custom tool takes text: it becomes a function of one string. The tools of a namespace carry its name.

INPUT = "input"
"""The argument of a custom tool's function."""

ToolKey = tuple[str | None, str]
"""The namespace and the name of a tool."""


class ResponseTool(NamedTuple):
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

    @property
    def names(self) -> dict[ToolKey, str]:
        """Which function each tool is."""
        return {(tool.namespace, tool.name): name for name, tool in self.offered.items()}


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
            raise ApiError(400, f"there are two tools called {name[:80]!r}", field=place)
        while name in read.offered:  # a__b in c, and b__c in a
            name += "_"
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
    if isinstance(tool.format, GrammarInput):
        syntax, definition = tool.format.syntax, tool.format.definition
        if mistake := _mistake(syntax, definition):
            raise ApiError(400, mistake, field=f"{place}.format.definition")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            text["description"] = f"Text that matches this Lark grammar:\n{definition}"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    parameters = {**schema, "additionalProperties": False}
    return {"name": name, "description": tool.description, "parameters": parameters}


@lru_cache(maxsize=64)
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
            line = f"no {chosen.type} tool {chosen.name[:80]!r} in tools"
            raise ApiError(400, line, field="tool_choice")
        return {"type": "function", "function": {"name": name}}

    if isinstance(choice, ChosenTool):
        return named(choice)
    if isinstance(choice, AllowedChoice):
        tools = [named(chosen) for chosen in choice.tools]
        return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}
    return choice


def custom_input(arguments: str) -> str:
    """Return the text that a custom tool is called with, of the arguments of its function.

    They may be cut off; those of another kind are the text.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


# ---- thoughts that a client keeps without reading them, and sends back ----

_MARK = "edgespec:"


def sealed(thought: str) -> str:
    """Return the `encrypted_content` of a thought: its text in base64, which hides nothing from anybody.

    Clients that store nothing here send this back, and leave the text out.
    """
    return _MARK + base64.b64encode(thought.encode()).decode()


def _thought(item: Item) -> str:
    """Return the text of thoughts, "" if another server has encrypted them."""
    if text := text_of(item.content):
        return text
    if (content := item.encrypted_content) and content.startswith(_MARK):
        try:
            return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
        except ValueError:
            pass
    return text_of(item.summary)


# ---- requests ----

_SAME_FIELDS = {
    *(option.request_name(name) for name, option in SAMPLING.items() if name != "logit_bias"),
    *("model", "parallel_tool_calls", "top_logprobs", "seed", "speculative", "stream", "user"),
}


def read_response(reader: RequestReader, body: ResponsesRequest) -> PreparedRequest:
    """Prepare a request. For any thread. Raises ApiError."""
    items, tools = _items(body), read_tools(body)
    ignore(f"include {name}" for name in body.include or () if name not in (LOGPROBS, ENCRYPTED))
    prepared = reader.choices(_chat(body, items, tools))
    return replace(prepared, warnings=(*tools.warnings, *_unread(body, items), *prepared.warnings))


def count_tokens(reader: RequestReader, body: ResponsesRequest) -> int:
    """Return how many tokens the prompt of a request has. For any thread. Raises ApiError."""
    return len(reader.prompt_tokens(_chat(body, _items(body), read_tools(body))))


def _chat(body: ResponsesRequest, items: Sequence[Item], tools: ReadTools) -> ChatRequest:
    """Return the request for a chat completion."""
    form = body.text.format if body.text else None
    given = {
        "logprobs": True if body.wants_logprobs else None,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": form.model_dump(by_alias=True, exclude_none=True) if form else None,
    }
    fields = body.model_dump(include=_SAME_FIELDS, exclude_none=True) | tools.fields
    fields |= {name: value for name, value in given.items() if value is not None}
    return checked(ChatRequest, fields | {"messages": _messages(body.instructions, items, tools.names)})


def _items(body: ResponsesRequest) -> list[Item]:
    """Return the whole input, with the stored conversation before it."""
    given = body.input
    if isinstance(given, str):
        given = [Item.model_validate({"role": "user", "content": given})]
    if items := [*body.edgespec_conversation, *(given or ())]:
        return items
    line = "send text or items, or the previous_response_id of a response to go on with"
    raise ApiError(400, line, field="input")


def _messages(
    instructions: str | None, items: Sequence[Item], functions: Mapping[ToolKey, str]
) -> list[dict[str, Any]]:
    """Return the messages of items: thoughts, text and calls of one answer are one message.

    `functions`: those that tools are, by the namespace and the name of each.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the called functions, by the calls' ids

    def assistant(*without: str) -> dict[str, Any]:
        """Return the last message if it is the assistant's and lacks the fields `without`, else a new one."""
        if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & {*without}:
            messages.append({"role": "assistant"})
        return messages[-1]

    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.type == "reasoning":
            if thought := _thought(item):
                assistant("content", "tool_calls")["reasoning_content"] = thought
        elif item.type == "message":
            if item.role == "assistant":
                assistant("content", "tool_calls")["content"] = text_of(item.content)
            else:
                messages.append({"role": item.role, "content": text_of(item.content)})
        elif item.type in ("function_call", "custom_tool_call"):
            key, text = (item.namespace, item.name), item.arguments
            name = names[item.call_id] = functions.get(key) or _joined(*key)
            if item.type == "custom_tool_call":
                text = json.dumps({INPUT: item.input}, ensure_ascii=False)
            call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": text}}
            assistant().setdefault("tool_calls", []).append(call)
        else:
            named = {"name": names[item.call_id]} if item.call_id in names else {}
            output = text_of(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output, **named})
    return messages


def _unread(body: ResponsesRequest, items: Sequence[Item]) -> Iterator[str]:
    if body.text and body.text.verbosity not in (None, "medium"):
        yield "text.verbosity: not honoured: say in the instructions how long the answer should be"
    if any(item.type == "reasoning" and item.encrypted_content and not _thought(item) for item in items):
        yield "input: thoughts that another server has encrypted are not read"
