"""What the tests of Anthropic's API ask, and how they look at events: with the official client's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

HELLO = [{"role": "user", "content": "hello"}]
ASKED = {"model": "edgespec", "max_tokens": 12, "messages": HELLO}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events_of(text: str) -> Iterator[Any]:
    """Yield the events of a stream, each checked; pings and comments are left out."""
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if lines:
            data = json.loads(lines["data"])
            assert data["type"] == lines["event"]
            if data["type"] == "error":
                yield ErrorResponse.model_validate(data)
            elif data["type"] != "ping":
                yield _EVENT.validate_python(data)


def message_of(text: str) -> Message:
    """Return the message of a stream, whose events come in the API's order."""
    found: Any = None
    buffers: dict[int, bytes] = {}
    kinds: list[str] = []
    index = -1
    for event in events_of(text):
        found = accumulate_event(event=event, current_snapshot=found, json_bufs=buffers)
        kinds.append(event.type)
        if event.type == "content_block_start":
            index += 1
        if event.type.startswith("content_block"):
            assert event.index == index
    blocks = kinds[1:-2]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    depth = 0
    for kind in blocks:
        depth += {"content_block_start": 1, "content_block_delta": 0, "content_block_stop": -1}[kind]
        assert depth in (0, 1) and (depth or kind == "content_block_stop")
    assert depth == 0
    return Message.model_validate(found.to_dict())


def answer(client: httpx.Client, *, stream: bool = False, status: int = 200, **fields: Any) -> Any:
    """Return the message that answers a request, or the error, if another `status` is expected."""
    response = client.post("/v1/messages", json=ASKED | {"stream": stream} | fields)
    assert response.status_code == status, response.text
    assert response.headers["request-id"].startswith("req_")
    if status != 200:
        found = ErrorResponse.model_validate(response.json())
        assert found.request_id == response.headers["request-id"]
        return found.error
    return message_of(response.text) if stream else Message.model_validate(response.json())


def called(message: Message | anthropic.types.ParsedMessage[Any]) -> Any:
    """Return the only call of a message."""
    (call,) = [block for block in message.content if block.type == "tool_use"]
    return call
