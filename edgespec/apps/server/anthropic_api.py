"""Anthropic's Messages API: requests become OpenAI's, and parts of answers its events."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.answer_events import AnswerEvent, EventWriter
from edgespec.apps.server.api_errors import (
    NO_THREAD,
    REQUEST_ID,
    ApiError,
    checked,
    new_request_id,
)
from edgespec.apps.server.names import ALIAS, RequestedModel
from edgespec.apps.server.request_fields import (
    ImageBase64,
    RequestPart,
    ToolName,
    check_needed,
    image_part,
    without_nulls,
)
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.streaming import Answerer
from edgespec.decoding.records import PromptProgress, Result
from edgespec.llama.weights import Model

# ---- content ----

_NEEDED = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "search_result": ("source", "title", "content"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
}
"""The fields that a block of each type must have."""


def _only(*kinds: str) -> BeforeValidator:
    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in kinds:
            return value
        why = "has no place here" if kind in _NEEDED else "is not supported"
        raise ValueError(f"content of type {kind[:40]!r} {why}")

    return BeforeValidator(check)


_SOURCES = {"document": ("text", "content"), "image": ("base64",), "search_result": ()}
"""The types of the sources that a block of each type may have."""
_READ = ("text", "image", "document", "search_result")


class DocumentSource(RequestPart):
    """The text of a document, also in blocks."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: str | list[Annotated[Block, _only("text")]] = ""


class ImageSource(RequestPart):
    """The file of an image."""

    type: Literal["base64"]
    media_type: str = ""
    data: ImageBase64


class Block(RequestPart):
    """A part of a message; which fields are read depends on the type, and others change nothing."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    type: Literal[
        "text",
        "image",
        "document",
        "search_result",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
    ]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field({})
    tool_use_id: str = ""
    is_error: bool = False
    content: str | list[Annotated[Block, _only(*_READ)]] = ""
    source: str | Annotated[DocumentSource | ImageSource, Field(discriminator="type")] = ""
    title: str = ""
    context: str = ""

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(given, dict):
            return given
        given = without_nulls(given)
        kind, source = given.get("type"), given.get("source")
        check_needed(given, _NEEDED, "content")
        if kind in _SOURCES and isinstance(source, dict) != (kind != "search_result"):
            raise ValueError("source must be an object of a document or an image, text of a search_result")
        if isinstance(source, dict) and (form := source.get("type")) not in _SOURCES.get(str(kind), (form,)):
            send = "itself, in base64; nothing is fetched here" if kind == "image" else "as text"
            raise ValueError(f"source of type {str(form)[:40]!r} is not supported: send the {kind} {send}")
        return given


def _check_content(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if not isinstance(value, str | list):
        raise ValueError("must be text, or a list of blocks")
    return value


_CONTENT = BeforeValidator(_check_content)
SystemContent = Annotated[str | list[Annotated[Block, _only("text")]], _CONTENT]


class UserTurn(RequestPart):
    """A message of the user, or results of calls."""

    role: Literal["user"]
    content: Annotated[str | list[Annotated[Block, _only(*_READ, "tool_result")]], _CONTENT]


class AssistantTurn(RequestPart):
    """An earlier answer; as the last message it is what the answer begins with."""

    role: Literal["assistant"]
    content: Annotated[
        str | list[Annotated[Block, _only("text", "thinking", "redacted_thinking", "tool_use")]], _CONTENT
    ]


class SystemTurn(RequestPart):
    """Instructions amid a conversation."""

    role: Literal["system"]
    content: SystemContent


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]

# ---- tools ----


def _of_the_client(kind: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"{kind[:40]!r} is a tool that is not here: send one with an input_schema")
    return kind


class ClientTool(RequestPart):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_of_the_client)] = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = Field(None, description="Examples within the schema.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(RequestPart):
    """Whether a tool is called: the model decides, any, the one of this name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('send the name of the tool with "type": "tool", and with no other type')
        return self


# ---- the whole ----


class ThinkingConfig(RequestPart):
    """Whether and how much the model thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Most tokens of its thoughts.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are not sent. Otherwise they are sent whole."
    )

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingConfig:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError('send budget_tokens with "type": "enabled", and with no other type')
        return self


class OutputFormat(RequestPart):
    """The form of an answer that is JSON and matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestPart):
    """How the answer is written: its form, and how much a model thinks."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much a model that thinks does so."
    )
    format: OutputFormat | None = None


class RequestMetadata(RequestPart):
    """Who asks: `user_id` says whose turn it is in the queue."""

    user_id: str | None = Field(None, description="Whose turn it is in the queue.")


class CountTokensRequest(RequestPart):
    """The body of POST /v1/messages/count_tokens."""

    model: RequestedModel = Field(ALIAS, description="A name that /v1/models lists; default: the first.")
    messages: list[Turn] = Field(min_length=1)
    system: SystemContent | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=0, description="Cut to what fits in the context; 0: the prompt is read for later."
    )
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    container: None = None
    thread: Any = Field(None, description="Refused, so that the client sends whole conversations.")
    compaction: None = None


# ---- requests ----


_NOISE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code puts in front of its system prompt: it differs with each conversation or request, so no
prompt would have the beginning of an earlier one."""

Messages = list[dict[str, Any]]


def read_request(reader: RequestReader, body: MessagesRequest) -> PreparedRequest:
    """Prepare a request, on any thread. Raises ApiError."""
    if body.thread is not None:
        line = "no conversation is kept here: send all of it, without thread"
        raise ApiError(400, line, field="thread", code=NO_THREAD)
    prepared = reader.choices(_chat(reader, body))
    return replace(prepared, warnings=(*_warnings(reader, body), *prepared.warnings))


def count_tokens(reader: RequestReader, body: CountTokensRequest) -> int:
    """Return how many tokens the prompt of a request has."""
    return len(reader.prompt_tokens(_chat(reader, body)))


def _chat(reader: RequestReader, body: CountTokensRequest) -> ChatRequest:
    """Return the request in OpenAI's form."""
    messages = openai_messages(body, later_system=reader.prompts.takes_later_system)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    if body.tool_choice:
        fields |= _choice(body.tool_choice)
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            line = "the last one has a tool_use: send its tool_result after it, as the user's"
            raise ApiError(400, line, field="messages")
        fields["continue_final_message"] = True
    fields |= _thinking(reader, body)
    if wanted := _format(body):
        schema = {"name": "answer", "schema": wanted, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens or 1,  # 0: only the prompt is wanted
            "stop": body.stop_sequences,
            "user": body.metadata.user_id if body.metadata else None,
            **{name: getattr(body, name) for name in ("stream", "temperature", "top_p", "top_k")},
        }
    return checked(ChatRequest, fields)


def _thinking(reader: RequestReader, body: CountTokensRequest) -> dict[str, Any]:
    if not reader.prompts.thinks:
        return {}
    told: dict[str, Any] = {}
    effort = body.output_config.effort if body.output_config else None
    if effort:
        told["reasoning_effort"] = "xhigh" if effort == "max" else effort
    if body.thinking and body.thinking.type == "disabled":
        told["reasoning_effort"] = "none"
    elif body.thinking and body.thinking.type == "enabled":
        switches = reader.prompts.thinking_switches - {"reasoning_effort"}
        told["reasoning_budget"] = body.thinking.budget_tokens
        told["chat_template_kwargs"] = dict.fromkeys(switches, True)
    return told


def _warnings(reader: RequestReader, body: CountTokensRequest) -> Iterator[str]:
    if not reader.prompts.thinks:
        if body.thinking and body.thinking.type == "enabled":
            yield f"thinking: {body.model} does not think"
        if body.output_config and body.output_config.effort:
            yield f"output_config.effort: {body.model} does not think"
    turns = [turn for turn in body.messages if isinstance(turn, AssistantTurn)]
    if any(part.type == "redacted_thinking" for turn in turns for part in _blocks(turn.content)):
        yield "messages: redacted_thinking is not read: another server has the key"


# ---- fields ----


def _function(tool: ClientTool) -> dict[str, Any]:
    schema = {**tool.input_schema, **({"examples": tool.input_examples} if tool.input_examples else {})}
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return function | {"parameters": schema}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    return {
        "tool_choice": chosen or {"type": "function", "function": {"name": choice.name}},
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _format(body: CountTokensRequest) -> dict[str, Any] | None:
    newer = body.output_config.format if body.output_config else None
    if newer and body.output_format:
        line = "is the older name of output_config.format: leave one out"
        raise ApiError(400, line, field="output_format")
    found = newer or body.output_format
    return found.schema_ if found else None


# ---- messages ----


def openai_messages(body: CountTokensRequest, *, later_system: bool) -> Messages:
    """Return system prompt and messages in the form of OpenAI's API, neighbours of one role joined.

    `later_system`: whether the model's template has a place for instructions amid a conversation; without
    one they are the user's.
    """
    made: Messages = []
    texts = (block.text for block in _blocks(body.system or []))
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
            begins = not made or made[-1]["role"] == "system"
            role = "system" if begins or later_system else "user"
            found = [{"role": role, "content": _joined(turn.content)}]
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
        if said := [one[name] for one in (last, message) if one.get(name)]:
            last[name] = _all_of(said)
    if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
        last["tool_calls"] = calls


def _all_of(contents: list[Any]) -> Any:  # noqa: ANN401 - text, or parts where there are images
    if all(isinstance(content, str) for content in contents):
        return "\n".join(contents)
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block.model_validate({"type": "text", "text": content})] if isinstance(content, str) else content


def _user(turn: UserTurn, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    for block in _blocks(turn.content):
        if block.type == "tool_result":
            name = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            told = _content(block.content)
            if block.is_error:
                told = f"Error: {told}" if isinstance(told, str) else _all_of(["Error:", told])
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": told, **name}
        else:
            yield {"role": "user", "content": _content([block])}


def _answer(turn: AssistantTurn) -> dict[str, Any]:
    blocks = _blocks(turn.content)
    made: dict[str, Any] = {"role": "assistant"}
    made["content"] = "\n".join(block.text for block in blocks if block.type == "text")
    if thought := [block.thinking for block in blocks if block.thinking]:
        made["reasoning_content"] = "\n".join(thought)
    if calls := [_call(block) for block in blocks if block.type == "tool_use"]:
        made["tool_calls"] = calls
    return made


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _joined(content: str | list[Block]) -> str:
    return "\n".join(block.text for block in _blocks(content))


def _content(content: str | list[Block]) -> Any:  # noqa: ANN401 - text, or parts where there are images
    return _all_of([*map(_said, _blocks(content))])


def _said(block: Block) -> Any:  # noqa: ANN401 - as of `_content`
    if block.type == "text":
        return block.text
    if isinstance(block.source, str):
        return _all_of([block.title, block.source, _content(block.content)])
    if isinstance(block.source, ImageSource):
        return [image_part(block.source.data)]
    text = block.source.data or _joined(block.source.content)
    return "\n".join(filter(None, [block.title, block.context, text]))


# ---- answers ----

_SIGNATURE = ALIAS

Fields = dict[str, Any]
"""An event, or a part of one."""


def _input(text: str) -> dict[str, Any]:
    """Return a call's input, or as much of it as was written if the call was cut off."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessagesWriter(EventWriter):
    """Writes an answer in Anthropic's form, whole or as events."""

    def __init__(self, body: MessagesRequest, request: PreparedRequest, model: Model, name: str) -> None:
        """Begin the answer to `body` of the `model` that is served as `name`."""
        super().__init__(request, model)
        self.headers = {REQUEST_ID: new_request_id()}
        self._max_tokens = body.max_tokens
        self._shows_thoughts = not (body.thinking and body.thinking.display == "omitted")
        self._blocks: list[Fields] = []
        self._pieces: list[str] = []  # of the last block's text, or its call's arguments
        self._open = False
        self._answer: Fields = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": name,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(request.texts[0].tokens)),
        }

    def begin(self) -> str:
        """Return the events before any text: message_start, and a ping."""
        return self.encode({"type": "message_start", "message": self._answer}) + _PING

    def write(self, event: AnswerEvent) -> Iterator[Fields]:
        """Yield the events of a part of the answer, or of its end: why it ended, tokens used."""
        if event.kind == "end":
            yield from self._end()
            yield from self._last(self.results[0], event.reason)
        elif self._max_tokens:  # else only the prompt is wanted
            yield from self._add(event)

    def encode(self, part: Fields) -> str:
        """Return a server-sent event."""
        return f"event: {part['type']}\ndata: {json.dumps(part, ensure_ascii=False)}\n\n"

    def answer(self) -> Fields:
        """Return the whole message."""
        return self._answer

    def idle(self, *, is_waiting: bool) -> str:
        """Return a ping, which shows clients on a silent connection that the server is alive."""
        return _PING

    def queued(self, place: int) -> str:
        """Return the comment with the place in the queue, and a ping, which clients count."""
        return super().queued(place) + _PING

    def reading(self, progress: PromptProgress) -> str:
        """Return the comment with how many tokens of the prompt are read, and a ping."""
        return super().reading(progress) + _PING

    def failed(self, error: ApiError) -> str:
        """Return the event "error" that ends a stream."""
        return self.encode(self.errors.body(error) | {"request_id": self.headers[REQUEST_ID]})

    # ---- blocks ----

    def _add(self, event: AnswerEvent) -> Iterator[Fields]:
        if event.kind == "thought":
            yield from self._block("thinking", thinking="", signature="")
            if self._shows_thoughts:
                yield self._piece("thinking_delta", thinking=event.text)
        elif event.kind == "text":
            yield from self._block("text", text="")
            yield self._piece("text_delta", text=event.text)
        elif event.call:
            yield from self._end()
            yield from self._block("tool_use", id=event.call.id, name=event.call.name, input={})
            for text in ("", event.call.arguments):
                yield self._piece("input_json_delta", partial_json=text)

    def _block(self, kind: str, **fields: Any) -> Iterator[Fields]:  # noqa: ANN401 - JSON
        """Begin a block of this kind, unless the open one is of that kind."""
        if self._open and self._blocks[-1]["type"] == kind:
            return
        yield from self._end()
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._open, self._pieces = True, []
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _piece(self, kind: str, **piece: str) -> Fields:
        self._pieces += piece.values()
        return self._delta({"type": kind, **piece})

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self) -> Iterator[Fields]:
        """End the last block, if there is any; yield the events that say so."""
        if not self._open:
            return
        self._open = False
        block, text = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block |= {"thinking": text, "signature": _SIGNATURE}
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        else:
            block["input"] = _input(text)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    # ---- why it ended ----

    def _last(self, result: Result, reason: str | None) -> Iterator[Fields]:
        sequence = self._stop_sequence(result)
        end: Fields = {"stop_reason": self._stop_reason(result, reason, sequence), "stop_sequence": sequence}
        n_written = min(len(result.token_ids), self._max_tokens)
        usage = _usage(result.prompt_tokens - result.n_cached, result.n_cached, n_written)
        usage["edgespec"] = self.usage()["edgespec"]
        self._answer |= {**end, "usage": usage}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}

    def _stop_reason(self, result: Result, reason: str | None, sequence: str | None) -> str:
        if reason == "length":
            is_full = len(result.token_ids) < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason == "tool_calls" else "end_turn"

    def _stop_sequence(self, result: Result) -> str | None:
        """Return the stop sequence that ended the text, which follows the part that is sent."""
        if result.stop_reason != "stop":
            return None
        pieces = b"".join(self.model.piece(token) for token in result.token_ids).decode(errors="replace")
        rest = pieces[len(result.text) :]
        return min(
            (stop for stop in self.request.texts[0].options.stop if rest.startswith(stop)), default=None
        )


def _usage(n_read: int, n_cached: int = 0, n_written: int = 0) -> Fields:
    return {
        "input_tokens": n_read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_written,
    }


_PING = 'event: ping\ndata: {"type": "ping"}\n\n'


def add_messages(app: FastAPI, reader: RequestReader, answerer: Answerer) -> None:
    """Add the routes to `app`."""
    answerer.serve(
        app,
        "/v1/messages",
        MessagesRequest,
        partial(read_request, reader),
        lambda body, request: MessagesWriter(body, request, reader.model, reader.service.name),
    )

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountTokensRequest, response: Response) -> dict[str, int]:
        """Count the tokens of a conversation's prompt; nothing is answered."""
        response.headers[REQUEST_ID] = new_request_id()
        return {"input_tokens": await run_in_threadpool(count_tokens, reader, body)}
