"""Answers of the Responses API: text, thoughts, structure, figures, and what is stored of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from edgespec import Engine, SamplingParams
from responses_requests import GET_WEATHER, ask, stream
from scripted_texts import writing
from server_app import Served

pytestmark = pytest.mark.proof

ASKED: dict[str, Any] = {"model": "edgespec", "input": "hello"}


class Mood(BaseModel):
    """The mood of a text. All of its values are short, so that a random model says them whole."""

    mood: Literal["good", "bad"]
    sure: bool


@pytest.fixture(scope="module")
def expected(target: Path) -> str:
    """What the engine says to "hello"."""
    with Engine(target, drafter="none", profile=False) as engine:
        return engine.generate("hello", params=SamplingParams(temperature=0), n_predict=24).text


def test_the_clients_answers_are_the_engines(client: openai.OpenAI, served: Served, expected: str):
    answer = client.responses.create(**ASKED, max_output_tokens=24, temperature=0)
    assert (answer.output_text, answer.status) == (expected, "incomplete")
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage and answer.usage.output_tokens == 24
    with writing(served, *["some text"] * 4), client.responses.stream(**ASKED) as events:
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "some text"
        assert events.get_final_response().output_text == "some text"
        parts = [
            event.delta for event in client.responses.create(**ASKED, stream=True) if hasattr(event, "delta")
        ]
        assert len(parts) > 1 and "".join(parts) == "some text"

        async def both() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as other:
                whole = await other.responses.create(**ASKED)
                async with other.responses.stream(**ASKED) as events:
                    return [whole.output_text, (await events.get_final_response()).output_text]

        assert asyncio.run(both()) == ["some text"] * 2


def test_every_event_has_openais_form_and_place(http: httpx.Client, served: Served, expected: str):
    fields = {"max_output_tokens": 24, "temperature": 0, "include": ["message.output_text.logprobs"]}
    events = stream(http, **fields, top_logprobs=2)
    (message,) = events[-1].response.output
    assert message.content[0].text == expected and message.status == "incomplete"
    logprobs = message.content[0].logprobs
    assert len(logprobs) == 24 and all(len(one.top_logprobs) == 2 for one in logprobs)
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in told] == [one.token for one in logprobs]
    whole = ask(http, **fields, top_logprobs=2)
    assert whole.output_text == expected and len(whole.output[0].content[0].logprobs) == 24  # type: ignore[union-attr,index,arg-type]

    with writing(served, "done"):
        events = stream(http, instructions="be brief", metadata={"a": "b"}, user="me")
    answer = events[-1].response
    assert (answer.status, answer.output_text, answer.incomplete_details) == ("completed", "done", None)
    assert (answer.instructions, answer.metadata, answer.user) == ("be brief", {"a": "b"}, "me")


def test_thoughts_are_an_item_and_go_back_as_thoughts(http: httpx.Client, served: Served):
    with writing(served, "<think>hm hm</think>yes") as prompts:
        events = stream(http, include=["reasoning.encrypted_content"], store=False)
        answer = events[-1].response
        thought, message = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "hm hm")
        n_thought = len(served.engine.target.tokenize("hm hm", add_special=False, parse_special=False))
        assert message.content[0].text == "yes"
        assert answer.usage.output_tokens_details.reasoning_tokens == n_thought
    items = [item.model_dump() for item in answer.output]
    sealed = items[0] | {"content": None}
    for first in (items[0], sealed):
        said = [{"role": "user", "content": "hello"}, first, items[1], {"role": "user", "content": "so"}]
        with writing(served, "ok") as prompts:
            ask(http, input=said)
        assert "assistant\n<think>hm hm</think>yes<|im_end|>" in prompts[0]
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    body = {"model": "edgespec", "input": [foreign, {"role": "user", "content": "x"}], "max_output_tokens": 1}
    assert "not read" in http.post("/v1/responses", json=body).headers["X-Edgespec-Warning"]


def test_parsed_answers_hold_to_the_schema(client: openai.OpenAI, http: httpx.Client):
    for seed in range(2):
        parsed = client.responses.parse(
            model="edgespec", input="hello", text_format=Mood, extra_body={"seed": seed}
        )
        assert isinstance(parsed.output_parsed, Mood)
    answer = ask(http, text={"format": {"type": "json_object"}}, max_output_tokens=9)
    assert answer.output_text.startswith("{")


def test_a_response_goes_on_as_the_whole_conversation_would(client: openai.OpenAI, served: Served):
    with writing(served, "one", "two", "three") as prompts:
        first = client.responses.create(model="edgespec", input="a", instructions="gone")
        second = client.responses.create(model="edgespec", input="b", previous_response_id=first.id)
        again = [
            {"role": "user", "content": "a"},
            first.output[0].to_dict(),
            {"role": "user", "content": "b"},
        ]
        client.responses.create(model="edgespec", input=again)
    assert "gone" in prompts[0] and "gone" not in prompts[1]
    assert prompts[1] == prompts[2] and "one" in prompts[1]
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(model="edgespec", input="c", previous_response_id="resp_none")
    assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
    with writing(served, "x"):
        unstored = client.responses.create(model="edgespec", input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


@pytest.mark.parametrize("given", [{}, {"input": []}, {"input": None}])
def test_a_response_goes_on_without_input(http: httpx.Client, served: Served, given: dict[str, Any]):
    with writing(served, "so far", "and on") as prompts:
        first = ask(http)
        more = http.post(
            "/v1/responses", json={"previous_response_id": first.id, "model": "edgespec"} | given
        )
    assert more.json()["output"][0]["content"][0]["text"] == "and on"
    assert "hello" in prompts[1] and "so far<|im_end|>\n<|im_start|>assistant\n" in prompts[1]
    refused = http.post("/v1/responses", json={"model": "edgespec"} | given)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("items", [1, 2, 3])
def test_items_of_the_system_and_instructions_are_one_message(http: httpx.Client, served: Served, items: int):
    said = [{"role": role, "content": role} for role in ("system", "developer", "user")][:items]
    with writing(served, "ok") as prompts:
        ask(http, instructions="rules", input=said)
    assert prompts[0].count("<|im_start|>system") == 1
    assert prompts[0].startswith("<|im_start|>system\nrules\n\nsystem" + "\n\ndeveloper" * (items > 1))


def test_the_tokens_of_an_input_are_counted(http: httpx.Client):
    body: dict[str, Any] = {"input": "hello", "instructions": "rules", "tools": [GET_WEATHER]}
    counted = http.post("/v1/responses/input_tokens", json=body)
    assert counted.json()["object"] == "response.input_tokens"
    assert counted.json()["input_tokens"] == ask(http, **body).usage.input_tokens  # type: ignore[union-attr]
