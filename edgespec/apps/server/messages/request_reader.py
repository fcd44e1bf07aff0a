"""Turns requests of Anthropic's Messages API into OpenAI's, which the server's one reader prepares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from edgespec.apps.server.api_errors import NO_THREAD, ApiError, checked, renaming, respelled
from edgespec.apps.server.messages.request_schema import (
    AssistantTurn,
    BlocksDocument,
    CallResult,
    ClientTool,
    CountTokensRequest,
    GivenCall,
    GivenDocument,
    GivenSearchResult,
    GivenText,
    GivenThoughts,
    MessagesRequest,
    SealedThoughts,
    TextDocument,
    ToolChoice,
    UserTurn,
)
from edgespec.apps.server.request_reader import PreparedText, RequestReader
from edgespec.apps.server.request_schema import ChatRequest

# ---- tools that the client carries out, and whose input Anthropic describes ----


_TEXT = {"type": "string"}
_FILES = {
    "path": _TEXT,
    "file_text": {"type": "string", "description": "Of create: the text of the file."},
    "old_str": {"type": "string", "description": "Of str_replace: the text to replace, which occurs once."},
    "new_str": {"type": "string", "description": "Of str_replace: what takes its place."},
    "insert_line": {"type": "integer", "description": "Of insert: the line after which text is inserted."},
    "insert_text": {"type": "string", "description": "Of insert: the text."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Of view: the first and the last line.",
    },
}
_CHANGES = ["view", "create", "str_replace", "insert"]


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open.",
        _schema({"command": _TEXT, "restart": {"type": "boolean", "description": "Start the shell anew."}}),
    ),
    "text_editor": (
        "View, create and change text files.",
        _schema({"command": {"type": "string", "enum": _CHANGES}, **_FILES}, "command", "path"),
    ),
    "memory": (
        "View and change the files in /memories, which outlast this conversation.",
        _schema(
            {
                "command": {"type": "string", "enum": [*_CHANGES, "delete", "rename"]},
                **_FILES,
                "old_path": {"type": "string", "description": "Of rename."},
                "new_path": {"type": "string", "description": "Of rename."},
            },
            "command",
        ),
    ),
}
_KIND = re.compile(r"(\w+)_\d{8}")


def function_of(tool: ClientTool, place: str) -> dict[str, Any]:
    """Return the function that a tool is in OpenAI's API. `place`: of the tool in the request.

    Raises ApiError for a tool that only Anthropic's servers carry out.
    """
    kind = tool.type or "custom"
    description, schema = tool.description, tool.input_schema
    if kind != "custom":
        found = _KIND.fullmatch(kind)
        if not found or found[1] not in _TOOLS:
            line = f"{place}.type: {kind[:40]!r} is no tool that the client carries out: leave it out"
            raise ApiError(400, line, param="tools")
        description, schema = _TOOLS[found[1]]
    elif schema is None:
        raise ApiError(400, f"{place}.input_schema: is missing", param="tools")
    if tool.input_examples:
        schema = {**(schema or {}), "examples": tool.input_examples}
    function = {"name": tool.name, "description": description, "parameters": schema, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


# ---- request_reader ----


_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_budget": "thinking.budget_tokens",
    "reasoning_effort": "thinking",
}
"""Anthropic's names of OpenAI's fields."""

_FUNCTION = re.compile(r"\.function\b")
_NOISE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code puts in front of its system prompt: it differs with each conversation or request, so no
prompt would have the beginning of an earlier one."""

Messages = list[dict[str, Any]]


class MessagesReader:
    """Reads requests to one model. Its methods are for any thread, and raise ApiError."""

    def __init__(self, reader: RequestReader) -> None:
        """Let `reader` prepare requests."""
        self._reader = reader

    def read(self, body: MessagesRequest) -> PreparedText:
        """Return the prompt's tokens and the options of a request. Raises ApiError."""
        if body.thread is not None:
            line = "thread: no conversation is kept here: send all of it, without thread"
            raise ApiError(400, line, param="thread", code=NO_THREAD)
        with renaming(with_anthropic_names):
            prepared = self._reader.chat(self._chat(body))
        return replace(prepared, warnings=(*self._warnings(body), *prepared.warnings))

    def count(self, body: CountTokensRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        with renaming(with_anthropic_names):
            return len(self._reader.prompt_tokens(self._chat(body)))

    def _chat(self, body: CountTokensRequest) -> ChatRequest:
        """Return the request in OpenAI's form."""
        messages = openai_messages(body, later_system=self._reader.takes_later_system)
        fields: dict[str, Any] = {"model": body.model, "messages": messages}
        if body.tools:
            functions = [function_of(tool, f"tools.{i}") for i, tool in enumerate(body.tools)]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        if body.tool_choice:
            fields |= _choice(body.tool_choice)
        if messages[-1]["role"] == "assistant":
            if "tool_calls" in messages[-1]:
                line = "messages: the last one has a tool_use: send its tool_result after it, as the user's"
                raise ApiError(400, line, param="messages")
            fields["continue_final_message"] = True
        fields |= self._thinking(body)
        if wanted := _format(body):
            schema = {"name": "answer", "schema": wanted, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if isinstance(body, MessagesRequest):
            fields |= {
                "max_tokens": body.max_tokens or 1,  # 0: the prompt alone is wanted
                "stop": body.stop_sequences,
                **{name: getattr(body, name) for name in ("temperature", "top_p", "top_k")},
            }
        return checked(ChatRequest, fields)

    def _thinking(self, body: CountTokensRequest) -> dict[str, Any]:
        if not self._reader.thinks:
            return {}
        told: dict[str, Any] = {}
        effort = body.output_config.effort if body.output_config else None
        if effort:
            told["reasoning_effort"] = "xhigh" if effort == "max" else effort
        if body.thinking and body.thinking.type == "disabled":
            told["reasoning_effort"] = "none"
        elif body.thinking and body.thinking.type == "enabled":
            switches = self._reader.thinking_switches - {"reasoning_effort"}
            told["reasoning_budget"] = body.thinking.budget_tokens
            told["chat_template_kwargs"] = dict.fromkeys(switches, True)
        return told

    def _warnings(self, body: CountTokensRequest) -> Iterator[str]:
        if not self._reader.thinks:
            if body.thinking and body.thinking.type == "enabled":
                yield f"thinking: {body.model} does not think"
            if body.output_config and body.output_config.effort:
                yield f"output_config.effort: {body.model} does not think"
        turns = [turn for turn in body.messages if isinstance(turn, AssistantTurn)]
        if any(isinstance(block, SealedThoughts) for turn in turns for block in turn.content):
            yield "messages: redacted_thinking is not read: another server has the key"


# ---- names in errors ----


def with_anthropic_names(error: ApiError) -> ApiError:
    """Return `error` with the field at fault called as in Anthropic's API.

    Of a prompt that is too long it says the line by which agents know that they must shorten it.
    """
    old, line = error.param or "", str(error)
    new = _NAMES.get(old, old)
    if error.code == "context_length_exceeded":
        limit, n_prompt = re.findall(r"(\d+) tokens", line)
        line = f"prompt is too long: {n_prompt} tokens > {limit} maximum"
    elif old == "tools":
        line = _FUNCTION.sub("", line).replace(".parameters", ".input_schema")
    elif old:
        line = respelled(line, old, new)
    return ApiError(error.status, line, param=new, code=error.code, headers=error.headers)


# ---- fields ----


def _choice(choice: ToolChoice) -> dict[str, Any]:
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    return {
        "tool_choice": chosen or {"type": "function", "function": {"name": choice.name}},
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _format(body: CountTokensRequest) -> dict[str, Any] | None:
    newer = body.output_config.format if body.output_config else None
    if newer and body.output_format:
        line = "output_format is the older name of output_config.format: leave one out"
        raise ApiError(400, line, param="output_format")
    found = newer or body.output_format
    return found.schema_ if found else None


# ---- messages ----


def openai_messages(body: CountTokensRequest, *, later_system: bool) -> Messages:
    """Return system prompt and messages as OpenAI's API has them; those of one role in a row are one.

    `later_system`: whether the model's template has a place for instructions amid a conversation; without
    one they are the user's.
    """
    made: Messages = []
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    if told := [*filter(None, (_NOISE.sub("", text) for text in texts))]:
        made.append({"role": "system", "content": "\n".join(told)})
    names: dict[str, str] = {}
    for turn in body.messages:
        if isinstance(turn, AssistantTurn):
            found = [_answer(turn)]
            names |= {call["id"]: call["function"]["name"] for call in found[0].get("tool_calls", ())}
        elif isinstance(turn, UserTurn):
            found = [*_user(turn, names)] or [{"role": "user", "content": ""}]
        else:
            text = turn.content if isinstance(turn.content, str) else _joined(turn.content)
            begins = not made or made[-1]["role"] == "system"
            found = [{"role": "system" if begins or later_system else "user", "content": text}]
        for message in found:
            _append(made, message)
    return made


def _append(made: Messages, message: dict[str, Any]) -> None:
    """Add a message to those `made`, or to the last of them, if that is of its role."""
    last = made[-1] if made else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        made.append(message)
        return
    for name in ("content", "reasoning_content"):
        if texts := [text for one in (last, message) if (text := one.get(name))]:
            last[name] = "\n".join(texts)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


def _user(turn: UserTurn, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    for block in [turn.content] if isinstance(turn.content, str) else turn.content:
        if isinstance(block, str):
            yield {"role": "user", "content": block}
        elif isinstance(block, CallResult):
            name = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block), **name}
        else:
            yield {"role": "user", "content": _text(block)}


def _answer(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    said = [block.text for block in turn.content if isinstance(block, GivenText)]
    thought = [block.thinking for block in turn.content if isinstance(block, GivenThoughts)]
    calls = [_call(block) for block in turn.content if isinstance(block, GivenCall)]
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(said)}
    if any(thought):
        made["reasoning_content"] = "\n".join(filter(None, thought))
    return made | ({"tool_calls": calls} if calls else {})


def _call(block: GivenCall) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _result(block: CallResult) -> str:
    text = block.content if isinstance(block.content, str) else _joined(block.content or ())
    return f"Error: {text}" if block.is_error else text


def _joined(blocks: Sequence[GivenText | GivenDocument | GivenSearchResult]) -> str:
    return "\n".join(map(_text, blocks))


def _text(block: GivenText | GivenDocument | GivenSearchResult) -> str:
    if isinstance(block, GivenText):
        return block.text
    if isinstance(block, GivenSearchResult):
        return "\n".join([block.title, block.source, _joined(block.content)])
    return "\n".join(filter(None, [block.title, block.context, _source(block.source)]))


def _source(source: TextDocument | BlocksDocument) -> str:
    if isinstance(source, TextDocument):
        return source.data
    return source.content if isinstance(source.content, str) else _joined(source.content)
