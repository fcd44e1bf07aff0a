"""POST /v1/messages and /v1/messages/count_tokens, asked by the official client and without it."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from anthropic_events import ASKED, HELLO, WEATHER, answer, called, events_of
from edgespec.apps.server.anthropic_api import MessagesRequest
from scripted_texts import writing
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.proof

GREEDY: dict[str, Any] = {"temperature": 0}
RED = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
FORMAT = {"type": "json_schema", "schema": RED | {"additionalProperties": False}}


def chat_text(served: Served, **fields: Any) -> str:
    """What /v1/chat/completions answers to hello."""
    body = {"model": "edgespec", "messages": HELLO, "max_tokens": 12, **GREEDY, **fields}
    with served.client() as client:
        return str(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


def test_the_official_client(client: anthropic.Anthropic, served: Served):
    expected = chat_text(served)
    message = client.messages.create(**ASKED, extra_body=GREEDY)
    assert message.content[0].text == expected and message._request_id.startswith("req_")
    with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == 12
    beta = client.beta.messages.create(**ASKED, extra_body=GREEDY, betas=["context-management-2025-06-27"])
    assert beta.content[0].text == expected
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_official_client_without_waiting(served: Served):
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=served.url, auth_token="none", max_retries=0) as client:
            whole = await client.messages.create(**ASKED, extra_body=GREEDY)
            async with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
                streamed = await stream.get_final_message()
            return [message.content[0].text for message in (whole, streamed)]

    assert asyncio.run(ask()) == [chat_text(served)] * 2


def test_usage_tells_what_was_read_from_the_cache(served: Served):
    messages = [{"role": "user", "content": "a question that no other test asks " * 3}]
    with served.client() as client:
        first, again = (answer(client, messages=messages, **GREEDY).usage for _ in range(2))
        count = client.post("/v1/messages/count_tokens", json={"model": "edgespec", "messages": messages})
    assert count.json() == {"input_tokens": first.input_tokens + first.cache_read_input_tokens}
    assert again.cache_read_input_tokens > 30
    assert again.input_tokens + again.cache_read_input_tokens == count.json()["input_tokens"]
    assert again.edgespec["cached_tokens"] == again.cache_read_input_tokens


def test_a_prompt_may_be_read_before_its_answer_is_asked_for(client: anthropic.Anthropic):
    asked = ASKED | {"messages": [{"role": "user", "content": "to be read before " * 4}]}
    read = client.messages.create(**asked | {"max_tokens": 0})
    assert (read.content, read.stop_reason, read.usage.output_tokens) == ([], "max_tokens", 0)
    assert client.messages.create(**asked).usage.cache_read_input_tokens > 30


def test_tokens_are_counted_without_a_limit(client: anthropic.Anthropic):
    """So a client learns by how much a prompt is too long."""
    long = [{"role": "user", "content": "word " * 5000}]
    assert client.messages.count_tokens(model="edgespec", messages=long).input_tokens > 4096
    short = client.messages.count_tokens(model="edgespec", messages=HELLO).input_tokens
    tools = client.beta.messages.count_tokens(
        model="edgespec", messages=HELLO, tools=[WEATHER], system="Be kind."
    )
    assert tools.input_tokens > short + 20


def test_the_answer_goes_on_with_what_it_begins_with(served: Served):
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    expected = chat_text(served, messages=begun, continue_final_message=True)
    assert expected != chat_text(served)
    with served.client() as client:
        assert answer(client, messages=begun, **GREEDY).content[0].text == expected


def test_a_stop_sequence_is_told(served: Served):
    text = chat_text(served)
    stop = text[3:5]
    with served.client() as client:
        for stream in (False, True):
            found = answer(client, stream=stream, stop_sequences=["never said", stop], **GREEDY)
            assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
            assert found.content[0].text == text.partition(stop)[0]


# ---- tools ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_is_forced_and_its_result_comes_back(served: Served, stream: bool, choice: dict[str, Any]):
    asked = {
        "tools": [WEATHER],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
        "max_tokens": 200,
    }
    with served.client() as client:
        found = answer(client, stream=stream, **asked)
        call = called(found)
        assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
        assert found.stop_reason == "tool_use"
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "rain"}],
        }
        messages = [
            *HELLO,
            {"role": "assistant", "content": [block.to_dict() for block in found.content]},
            {"role": "user", "content": [result]},
        ]
        assert answer(client, messages=messages, tools=[WEATHER]).content


def test_a_call_comes_piece_by_piece(served: Served):
    asked = ASKED | {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200, "stream": True}
    with served.client() as client:
        events = [*events_of(client.post("/v1/messages", json=asked).text)]
    first = events.index(next(event for event in events if event.type == "content_block_delta"))
    assert events[first - 1].content_block.input == {}
    deltas = itertools.takewhile(lambda event: event.type == "content_block_delta", events[first:])
    pieces = [event.delta.partial_json for event in deltas]
    assert len(pieces) > 1 and json.loads("".join(pieces))["city"] in ("Rome", "Oslo")


def test_tools_that_are_not_offered_are_not_in_the_prompt(client: anthropic.Anthropic):
    def count(**fields: Any) -> int:
        return client.messages.count_tokens(model="edgespec", messages=HELLO, **fields).input_tokens

    assert count(tools=[WEATHER], tool_choice={"type": "none"}) == count()
    assert count(tools=[WEATHER], tool_choice={"type": "auto"}) == count(tools=[WEATHER]) > count()


def test_the_official_runner_of_tools(client: anthropic.Anthropic, served: Served):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with writing(served, f"I look.\n{call}", "Take a coat.") as prompts:
        asked: Any = ASKED | {"max_tokens": 400, "tools": [weather]}
        first, last = client.beta.messages.tool_runner(**asked)
    assert (first.stop_reason, last.stop_reason) == ("tool_use", "end_turn")
    assert called(first).input == {"city": "Oslo"} and last.content[0].text == "Take a coat."
    assert "rain in Oslo" in prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_have_a_budget(thinking: Served, stream: bool):
    def kinds(**fields: Any) -> list[str]:
        with thinking.client() as client:
            found = answer(client, stream=stream, max_tokens=200, **GREEDY, **fields)
        return [block.type for block in found.content]

    assert kinds() == ["thinking"], "the thoughts of this model do not end"
    assert kinds(thinking={"type": "enabled", "budget_tokens": 5}) == ["thinking", "text"]
    assert kinds(thinking={"type": "disabled"}, output_config={"effort": "low"}) == ["text"]


class Mood(BaseModel):
    mood: Literal["good", "bad"]


def test_structured_output(client: anthropic.Anthropic):
    for fields in (
        {"output_config": {"format": FORMAT, "effort": "low"}},
        {"extra_body": {"output_format": FORMAT}},
    ):
        found = client.messages.create(**ASKED | {"max_tokens": 64}, **fields)
        assert set(json.loads(found.content[0].text)) == {"red"}
    parsed = client.messages.parse(**ASKED | {"max_tokens": 64}, output_format=Mood)
    assert parsed.parsed_output.mood in ("good", "bad")


# ---- what agents send besides ----


def test_what_changes_nothing(served: Served):
    cached = {"cache_control": {"type": "ephemeral", "scope": "global"}}
    fields = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **cached}]}],
        "metadata": {"user_id": '{"session_id": "1"}'},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"},
        "mcp_servers": [],
        **cached,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24,claude-code-20250219"}
    with served.client(headers=headers) as client:
        response = client.post("/v1/messages?beta=true", json=ASKED | GREEDY | fields)
    assert response.json()["content"] == [{"type": "text", "text": chat_text(served)}]
    told = response.headers["x-edgespec-warning"]
    assert told == "no effect: service_tier, context_management, cache_control"


def test_what_is_not_done_is_named(served: Served):
    said = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "a"}],
    }
    fields = {
        "messages": [*HELLO, said, *HELLO],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "max"},
    }
    with served.client() as client:
        response = client.post("/v1/messages", json=ASKED | fields)
    warnings = response.headers.get_list("x-edgespec-warning")
    assert [line.partition(":")[0] for line in warnings] == ["thinking", "output_config.effort", "messages"]
    assert response.json()["usage"]["edgespec"]["warnings"] == warnings


def test_instructions_amid_a_conversation_reach_the_model(served: Served, tmp_path: Path):
    """As Claude Code sends them; where the template refuses them, they are the user's."""
    strict = (
        "{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    later = [*HELLO, {"role": "system", "content": "Say ho."}]
    users = [{"role": "user", "content": "hello\nSay ho."}]
    path = write_tiny_gguf(tmp_path / "strict.gguf", seed=1, chat_template=strict)
    with serving(path) as other:
        for running, same in ((served, False), (other, True)):
            with running.client() as client:
                found, as_users = (
                    client.post("/v1/messages/count_tokens", json={"model": "edgespec", "messages": messages})
                    for messages in (later, users)
                )
            assert (found.json() == as_users.json()) is same


def test_the_documentation_names_every_field():
    page = (Path(__file__).parents[4] / "docs" / "server.md").read_text()
    page = page.partition("### Anthropic's Messages")[2].partition("\n### ")[0]
    assert sorted(name for name in MessagesRequest.model_fields if f"`{name}`" not in page) == []
