"""Responses that the server keeps: their conversations go on, streams that fail end as OpenAI's do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseFailedEvent
from starlette.types import Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.responses_store import KeepingResponses, ResponseStore
from responses_requests import stream
from scripted_texts import writing
from server_app import Served

CREATED = {"id": "resp_1", "status": "in_progress", "store": True, "output": [], "model": "m"}
SAID = {"type": "message", "role": "assistant", "content": "one"}
COMPLETED = CREATED | {"status": "completed", "output": [SAID]}


def test_a_stream_is_stored_and_goes_on(client: openai.OpenAI, http: httpx.Client, served: Served):
    with writing(served, "one", "two", "three", "four") as prompts:
        first = stream(http, input="a")[-1].response
        second = client.responses.create(input="b", previous_response_id=first.id)
        client.responses.create(input=[], previous_response_id=second.id)
        client.responses.create(input="c", previous_response_id=first.id)
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    places = [prompts[2].index(said) for said in ("a<|im_end|>", "one<", "b<", "two<")]
    assert places == sorted(places)
    assert "two" not in prompts[3] and "one" in prompts[3]
    refused = http.post("/v1/responses", json={"input": [{"role": "x"}], "previous_response_id": first.id})
    assert "input.0" in refused.json()["error"]["message"], refused.text
    for gone in ("cancel", "compact"):
        assert http.post(f"/v1/responses/{first.id}/{gone}").status_code in (404, 405)


def test_the_store_forgets_what_was_not_used_for_longest():
    store = ResponseStore(most_bytes=20)
    for name in "ab":
        store.add(name, name.encode(), bytes(9))
    store.get("a")
    store.add("c", b"c", bytes(9))
    with pytest.raises(ApiError):
        store.get("b")
    assert [store.get(name)[0] for name in "ac"] == [b"a", b"c"]
    store.add("large", b"large", bytes(20))
    with pytest.raises(ApiError):
        store.get("large")


def event(name: str, number: int, response: dict[str, Any]) -> bytes:
    told = {"type": f"response.{name}", "sequence_number": number, "response": response}
    return f"event: response.{name}\ndata: {json.dumps(told)}\n\n".encode()


def passed(store: ResponseStore, parts: list[bytes], **fields: Any) -> bytes:
    """Return what a client gets of these `parts` of an answer."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> bytes:
        transport = httpx.ASGITransport(KeepingResponses(application, store))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/v1/responses", json=fields)).content

    return asyncio.run(ask())


@pytest.mark.parametrize("step", [1, 7, 100, 10_000])
def test_a_stream_is_stored_however_its_parts_come(step: int):
    store, text = ResponseStore(), b": queue 0\n\n" + event("created", 0, CREATED)
    text += event("completed", 1, COMPLETED)
    parts = [text[i : i + step] for i in range(0, len(text), step)]
    given = [{"type": "function_call_output", "call_id": "c", "output": "\u2028", "extra": 1 << 99}]
    assert passed(store, parts, input=given) == text
    assert json.loads(store.get("resp_1")[0]) == COMPLETED
    assert json.loads(store.get("resp_1")[1]) == [*given, SAID]


@pytest.mark.parametrize("begun", [b"", b": loading m\n\n", event("created", 0, CREATED)])
@pytest.mark.parametrize("form", [b"data: %s\n\n", b"event: error\ndata: %s\n\n"])
def test_a_failure_is_the_last_event_with_its_number(begun: bytes, form: bytes):
    error = {"message": "lost", "type": "server_error", "param": None, "code": "model_lost"}
    store = ResponseStore()
    text = passed(store, [begun, form % json.dumps({"error": error}).encode()], model="m", input="a")
    name, data = text.removeprefix(begun).decode().strip().split("\n")
    told = ResponseFailedEvent.model_validate_json(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert told.sequence_number == (1 if b"created" in begun else 0)
    assert told.response.status == "failed" and told.response.model == "m"
    assert told.response.error and told.response.error.message == "lost"
    with pytest.raises(ApiError):
        store.get("resp_1")
