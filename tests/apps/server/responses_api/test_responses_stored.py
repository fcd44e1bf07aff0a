"""What can be asked about a response: the items that it answers, and its end before it is complete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseIncompleteEvent
from openai.types.responses.response_item_list import ResponseItemList

from responses_requests import GET_WEATHER
from scripted_texts import writing
from server_app import Served, serving

ASKED: dict[str, Any] = {"model": "edgespec", "input": "hello"}
LONG = "word " * 900
KINDS: list[dict[str, Any]] = [
    {"role": "system", "content": "rules"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"id": "msg_1", "role": "assistant", "content": "said"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "no"}],
    },
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}],
    },
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "wet"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "note", "namespace": "zoo", "input": "hm"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "noted"},
]
"""An item of each kind."""


def listed(http: httpx.Client, response: str, **query: Any) -> ResponseItemList:
    answer = http.get(f"/v1/responses/{response}/input_items", params=query)
    assert answer.status_code == 200, answer.text
    return ResponseItemList.model_validate(answer.json())


def test_items_of_the_input_are_listed_as_they_were_sent(
    client: openai.OpenAI, http: httpx.Client, served: Served
):
    with writing(served, "ok"):
        answer = client.responses.create(model="edgespec", input=KINDS, tools=[GET_WEATHER])  # type: ignore[arg-type, list-item]
    found = listed(http, answer.id, order="asc", limit=100)
    assert [item.id for item in found.data] == [*dict.fromkeys(item.id for item in found.data)]
    assert (found.first_id, found.last_id) == (found.data[0].id, found.data[-1].id)
    for sent, item in zip(KINDS, found.data, strict=True):
        told = item.model_dump(exclude_none=True)
        assert told["status"] == "completed"
        for name, value in ({"type": "message"} | sent).items():
            if name == "content" and isinstance(value, str):
                assert [part["text"] for part in told["content"]] == [value]
            elif name == "content":
                for part, kept in zip(value, told[name], strict=True):
                    assert part.items() <= kept.items()
            else:
                assert told[name] == value
    assert found == listed(http, answer.id, order="asc", limit=100)
    backwards = client.responses.input_items.list(answer.id, limit=2)
    assert [item.id for item in backwards] == [item.id for item in reversed(found.data)]
    assert backwards.has_more and len(backwards.data) == 2


def test_the_conversation_before_a_response_is_part_of_its_input(client: openai.OpenAI, served: Served):
    with writing(served, "one", "two"):
        first = client.responses.create(model="edgespec", input="a")
        second = client.responses.create(model="edgespec", input="b", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["a", "one", "b"]  # type: ignore[union-attr]
    assert items[1].id == first.output[0].id
    assert items[:1] == client.responses.input_items.list(first.id).data


def test_a_page_that_cannot_be_is_refused_by_name(client: openai.OpenAI, http: httpx.Client, served: Served):
    with writing(served, "one"):
        answer = client.responses.create(**ASKED)
    last = listed(http, answer.id, after=listed(http, answer.id).last_id)
    assert (last.data, last.has_more) == ([], False)
    for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_x"}, "after")):
        refused = http.get(f"/v1/responses/{answer.id}/input_items", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert refused.json()["error"]["message"].startswith(f"{param}: ")
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.input_items.list("resp_none")


@pytest.mark.slow
def test_a_stream_that_is_cancelled_ends_and_is_kept(client: openai.OpenAI, served: Served):
    with writing(served, LONG, "ok") as prompts:
        events = client.responses.create(**ASKED, stream=True)
        seen = [next(events) for _ in range(8)]
        identity = seen[0].response.id  # type: ignore[union-attr]
        cancelled = client.responses.cancel(identity)
        seen += events
        assert cancelled.status == "cancelled"
        assert [event.sequence_number for event in seen] == [*range(len(seen))]
        last = ResponseIncompleteEvent.model_validate(seen[-1].model_dump())
        assert last.response.model_dump() == cancelled.model_dump()
        assert client.responses.retrieve(identity) == client.responses.cancel(identity) == cancelled
        assert cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
        assert cancelled.output_text and LONG.startswith(cancelled.output_text)
        deadline = time.monotonic() + 20
        while served.worker.n_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not served.worker.n_running, "the generation ended too"
        client.responses.create(model="edgespec", input="so?", previous_response_id=identity)
    assert cancelled.output_text in prompts[1]


@pytest.mark.slow
def test_a_stream_that_waits_can_be_cancelled(target: Path):
    with (
        serving(target, engine_options={"parallel": 1}) as single,
        openai.OpenAI(base_url=f"{single.url}/v1", api_key="none", max_retries=0) as client,
        writing(single, LONG, "never"),
    ):
        running, waiting = (client.responses.create(**ASKED, stream=True) for _ in range(2))
        cancelled = client.responses.cancel(next(waiting).response.id)  # type: ignore[union-attr]
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        assert [event.type for event in waiting][-1] == "response.incomplete"
        running.close()


def test_what_has_ended_is_returned_as_it_is(client: openai.OpenAI, http: httpx.Client, served: Served):
    with writing(served, "one"):
        answer = client.responses.create(**ASKED)
    assert client.responses.cancel(answer.id) == answer
    bare = http.post(f"/v1/responses/{answer.id}/cancel")  # as curl -X POST
    assert Response.model_validate(bare.json()) == answer
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        client.responses.cancel("resp_none")


def test_compaction_is_refused_by_name(client: openai.OpenAI):
    with pytest.raises(openai.APIStatusError, match="compact is not here") as error:
        client.responses.compact(model="edgespec", input="hello")
    assert error.value.status_code == 501
