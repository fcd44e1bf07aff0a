"""Turns requests for responses into those for chat completions, which the server's one reader prepares."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from edgespec.apps.server.api_errors import ApiError, checked, renaming, with_names
from edgespec.apps.server.request_reader import PreparedText, RequestReader, Service
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.responses.request_schema import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    SchemaAnswer,
    TextOptions,
    text_of,
)
from edgespec.apps.server.responses.response_schema import new_id
from edgespec.apps.server.responses.store import NamedItem, ResponseStore
from edgespec.apps.server.responses.thoughts import opened
from edgespec.apps.server.responses.tools import INPUT, ResponseTool, function_name, read_tools
from edgespec.decoding.sampling import SAMPLING

_LEAST_ROOM = 256  # tokens for the answer to a conversation that is cut
_SYSTEM = ("system", "developer")
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

_ID_KINDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
"""How the ids of items begin."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PreparedResponse:
    """A request as the worker writes it."""

    text: PreparedText
    tools: Mapping[str, ResponseTool]
    """The tools, by the names of their functions."""
    items: Sequence[NamedItem]
    """The whole input, with that of the stored responses before it, by the items' ids."""


class ResponsesReader:
    """Reads requests to one model. Its methods are for any thread, and raise ApiError."""

    def __init__(self, reader: RequestReader, service: Service, store: ResponseStore) -> None:
        """Let `reader` prepare requests; those that go on with a response find it in `store`."""
        self._reader = reader
        self._service = service
        self._store = store

    def read(self, body: ResponsesRequest) -> PreparedResponse:
        """Return the prompt's tokens, the options and the tools of a request. Raises ApiError."""
        named = self._items(body)
        items = [item for _, item in named]
        tools = read_tools(body)
        fields = body.model_dump(include=_SAME_FIELDS, exclude_none=True) | tools.fields
        if body.wants_logprobs:
            fields["logprobs"] = True
        if body.max_output_tokens is not None:
            fields["max_completion_tokens"] = body.max_output_tokens
        if body.reasoning and body.reasoning.effort is not None:
            fields["reasoning_effort"] = body.reasoning.effort
        if form := _response_format(body.text):
            fields["response_format"] = form
        with renaming(partial(with_names, names=_NAMES)):
            text = self._fitted(body, fields, _Conversation(body.instructions, items))
        warnings = (*tools.warnings, *_unread(body, items), *map(_renamed, text.warnings))
        return PreparedResponse(replace(text, warnings=warnings), tools.offered, named)

    def _items(self, body: ResponsesRequest) -> list[NamedItem]:
        items: list[NamedItem] = []
        if body.previous_response_id is not None:
            items += self._store.get(body.previous_response_id, "previous_response_id").items
        if isinstance(body.input, str):
            items.append((new_id("msg"), MessageItem(type="message", role="user", content=body.input)))
        else:
            items += map(self._named, body.input)
        if not items:
            raise ApiError(400, "input: must not be empty", param="input")
        return items

    def _named(self, item: Item) -> NamedItem:
        if isinstance(item, ItemReference):
            return item.id, self._store.item(item.id)
        return item.id or new_id(_ID_KINDS[item.type]), item

    def _fitted(self, body: ResponsesRequest, fields: dict[str, Any], said: _Conversation) -> PreparedText:
        """Prepare what was `said`; its oldest turns are left out if they may be and there is no room."""
        room = min(body.max_output_tokens or _LEAST_ROOM, self._service.n_ctx // 2)

        @cache  # what fits was prepared to know it
        def prepared(first: int) -> PreparedText:
            return self._reader.chat(checked(ChatRequest, {**fields, "messages": said.messages(first)}))

        def fits(first: int) -> bool:
            try:
                return len(prepared(first).tokens) + room <= self._service.n_ctx
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
                return False

        last = said.n_turns - 1
        if body.truncation != "auto" or last < 1 or fits(0):
            return prepared(0)
        first = bisect_left(range(last), True, lo=1, key=fits)
        text = prepared(first)
        line = f"input: the first {first} of {said.n_turns} turns were left out: the context is too small"
        return replace(text, warnings=(*text.warnings, line))


# ---- messages ----


class _Conversation:
    """The messages of items: first the system's, then turns that each begin with one of the user's."""

    def __init__(self, instructions: str | None, items: Sequence[Item]) -> None:
        self._names: dict[str, str] = {}  # of the called functions, by the calls' ids
        messages: Messages = []
        for item in items:
            self._add(item, messages)
        n_system = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), 0)
        first = [instructions] if instructions else []
        first += [message["content"] for message in messages[:n_system]]
        # Many templates take one message of the system's, at the beginning.
        self._system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
        self._turns: list[Messages] = []
        for message in messages[n_system:]:
            if message["role"] == "user" or not self._turns:
                self._turns.append([])
            self._turns[-1].append(message)

    @property
    def n_turns(self) -> int:
        return len(self._turns)

    def messages(self, first: int) -> Messages:
        """Return the messages from turn number `first` on."""
        return [*self._system, *(message for turn in self._turns[first:] for message in turn)]

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
        name = self._names[item.call_id] = function_name(item.name, item.namespace)
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
