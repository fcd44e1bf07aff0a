"""What the tests of the Responses API ask, and how they look at answers: with the types of `openai`."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, get_args

import httpx
from openai.types.responses import Response, ResponseStreamEvent

_UNION = get_args(ResponseStreamEvent)[0]
EVENTS: dict[str, Any] = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(_UNION)}
"""The types of events, by their names."""
DELTAS = {
    "output_text": "text",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}
"""Names of the events of parts, and the field that has all of it at the end."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET_WEATHER = {"type": "function", "name": "get_weather", "description": "of a city", "parameters": CITY}


def ask(client: httpx.Client, **fields: Any) -> Response:
    """Return an answer, which has the form of OpenAI's."""
    answer = client.post("/v1/responses", json={"model": "edgespec", "input": "hello"} | fields)
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    """Return the events of an answer, each of which has the form of OpenAI's and its place."""
    body = {"model": "edgespec", "input": "hello", "stream": True} | fields
    with client.stream("POST", "/v1/responses", json=body) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
    events = []
    for block in text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(EVENTS[event["type"]].model_validate(event))
    check(events)
    return events


def check(events: list[Any]) -> None:
    """Check the order of the events of an answer that came to its end, and that they tell what it has."""
    assert [event.sequence_number for event in events] == [*range(len(events))]
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] in ("completed", "incomplete") and events[-1].response.status == names[-1]
    of_item: dict[int, list[Any]] = defaultdict(list)
    for event in events[2:-1]:
        of_item[event.output_index].append(event)
    assert [event.output_index for event in events[2:-1]] == sorted(e.output_index for e in events[2:-1])
    for index, item in enumerate(events[-1].response.output):
        _check_item(of_item[index], item)
    assert len(of_item) == len(events[-1].response.output)


def _check_item(events: list[Any], item: Any) -> None:
    names = [event.type.removeprefix("response.") for event in events]
    assert (names[0], names[-1]) == ("output_item.added", "output_item.done")
    assert events[0].item.status == "in_progress" and events[-1].item == item
    assert {event.item_id for event in events[1:-1]} == {item.id}
    inner = names[1:-1]
    if item.type in ("message", "reasoning"):
        assert (inner[0], inner[-1]) == ("content_part.added", "content_part.done")
        assert events[-2].part.model_dump() == item.content[0].model_dump()
        inner = inner[1:-1]
    (kind,) = {name.rpartition(".")[0] for name in inner}
    assert inner == [f"{kind}.delta"] * (len(inner) - 1) + [f"{kind}.done"]
    done = next(event for event in events if event.type == f"response.{kind}.done")
    said = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
    assert said == getattr(done, DELTAS[kind])
