"""The official `openai` client against the server: sync, async, streams, structured output, tools, errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from edgespec import Engine, SamplingParams
from server_app import Served, serving
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf

pytestmark = pytest.mark.proof

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Unit(Enum):
    C = "c"
    F = "f"


class Weather(BaseModel):
    """What get_weather takes."""

    unit: Unit
    days: list[bool]


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather, name="get_weather"),
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def deep(n: int) -> dict[str, Any]:
    """Return a function whose arguments are nested `n` deep: Python reads it, but cannot walk through it."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.gguf"
    return write_tiny_gguf(path, seed=1, n_ctx=4096, chat_template=TOOLS_TEMPLATE)


@pytest.fixture(scope="module")
def served(target: Path, tiny_draft_path: Path) -> Iterator[Served]:
    with serving(target, tiny_draft_path) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert served.log == []


def ask(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    made = {"model": "edgespec", "messages": HELLO, "max_tokens": 24} | fields
    answer = client.chat.completions.create(**made)
    assert isinstance(answer, ChatCompletion)
    return answer


def test_sync_async_and_streamed_answers_are_the_engines(client: openai.OpenAI, served: Served, target: Path):
    with Engine(target, drafter="none", profile=False) as engine:
        expected = engine.generate("hello", params=SamplingParams(temperature=0), n_predict=24)
    answer = ask(client, temperature=0)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 24
    assert answer.usage.model_extra and answer.usage.model_extra["edgespec"]["seconds"] > 0

    stream = client.chat.completions.create(
        model="edgespec", messages=HELLO, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 24

    async def several() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            asked = [
                client.chat.completions.create(
                    model="edgespec", messages=HELLO, max_tokens=24, temperature=0, user=str(i)
                )
                for i in range(5)
            ]
            streamed = await client.chat.completions.create(
                model="edgespec", messages=HELLO, max_tokens=24, temperature=0, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in streamed])
            return [*[a.choices[0].message.content for a in await asyncio.gather(*asked)], text]

    assert asyncio.run(several()) == [expected.text] * 6


def test_completions_and_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tools"]
    assert client.models.retrieve("edgespec").owned_by == "edgespec"
    whole = client.completions.create(model="edgespec", prompt="hello", seed=5, logprobs=1, max_tokens=9)
    assert whole.choices[0].logprobs and len(whole.choices[0].logprobs.tokens or []) == 9
    stream = client.completions.create(model="edgespec", prompt="hello", seed=5, stream=True, max_tokens=9)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_our_own_fields_pass_through_the_client(client: openai.OpenAI):
    texts = {
        drafter: ask(client, seed=9, extra_body={"speculative": {"drafter": drafter}, "top_k": 5})
        for drafter in ("none", "model", "auto")
    }
    assert len({answer.choices[0].message.content for answer in texts.values()}) == 1
    assert texts["none"].usage.model_extra["edgespec"]["drafted"] == 0  # type: ignore[union-attr,index]


def test_parsed_answers_hold_to_the_schema(client: openai.OpenAI):
    for seed in range(3):
        parsed = client.chat.completions.parse(
            model="edgespec",
            messages=HELLO,
            seed=seed,
            max_tokens=300,
            logit_bias={str(ord("]") - 33): 5},  # a tiny model's list ends where it is told to
            response_format=Weather,
        )
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        assert parsed.choices[0].finish_reason == "stop"


def test_any_json(client: openai.OpenAI):
    for seed in range(3):
        answer = ask(client, seed=seed, max_tokens=400, response_format={"type": "json_object"})
        text = answer.choices[0].message.content or ""
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
        assert text.startswith("{")


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_forced_calls_are_valid(client: openai.OpenAI, choice: Any):
    names = set()
    for seed in range(2):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 600}
        fields |= {"parallel_tool_calls": False, "logit_bias": {str(ord("]") - 33): 5}}
        choices = ask(client, **fields).choices
        assert (choices[0].finish_reason, choices[0].message.content) == ("tool_calls", None)
        (call,) = choices[0].message.tool_calls or []
        assert call.type == "function" and call.id.startswith("call_")
        names.add(call.function.name)
        if call.function.name == "get_weather":
            Weather.model_validate_json(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
        with client.chat.completions.stream(model="edgespec", messages=HELLO, **fields) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        (again,) = streamed.message.tool_calls or []
        assert (again.function.name, again.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
    assert names <= {"get_weather", "now"} and (choice == "required" or names == {"get_weather"})


def test_what_a_forced_call_is_not_held_to_is_told_or_refused(client: openai.OpenAI):
    unique = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    arguments = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    function: dict[str, Any] = {"name": "f", "parameters": arguments}
    fields: dict[str, Any] = {"tool_choice": "required", "max_tokens": 24}
    for strict in ({}, {"strict": False}):
        raw = client.chat.completions.with_raw_response.create(
            model="edgespec",
            messages=HELLO,
            tools=[{"type": "function", "function": {**function, **strict}}],
            **fields,
        )
        warning = raw.headers["X-Edgespec-Warning"]
        assert "uniqueItems" in warning and warning.endswith("(arguments of f)")
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as error:
        ask(client, tools=[{"type": "function", "function": {**function, "strict": True}}], **fields)
    assert error.value.param == "tools"


def test_several_forced_calls(client: openai.OpenAI):
    answer = ask(client, tools=TOOLS[1:], tool_choice="required", seed=1, max_tokens=300)
    calls = answer.choices[0].message.tool_calls or []
    assert calls and {call.function.name for call in calls} == {"now"}
    assert len({call.id for call in calls}) == len(calls)


def test_a_conversation_with_calls_and_a_choice_of_none(client: openai.OpenAI):
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = ask(client, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content
    with_none = ask(client, tools=TOOLS, tool_choice="none", temperature=0)
    assert with_none.choices[0].message.content == ask(client, temperature=0).choices[0].message.content


def test_a_mistake_is_a_bad_request(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[deep(400)], tool_choice="required")
    assert caught.value.param == "tools"


def test_errors_are_the_clients_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="gpt-4o")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.code == "context_length_exceeded"


# ---- long prompts ----


def test_a_stream_tells_how_far_a_long_prompt_is_read_and_no_client_stumbles(tmp_path: Path):
    with serving(write_tiny_gguf(tmp_path / "long.gguf", n_ctx=2048)) as served, served.client() as plain:
        body = {"model": "edgespec", "prompt": [5] * 1500, "max_tokens": 2, "stream": True}
        said = plain.post("/v1/completions", json=body).text
        read = [
            (int(n), int(n_all)) for n, n_all in re.findall(r"^: reading (\d+) of (\d+) tokens$", said, re.M)
        ]
        assert read and {n_all for _, n_all in read} == {1500}
        assert [n for n, _ in read] == sorted({n for n, _ in read}) and read[-1][0] < 1500
        assert said.rindex(": reading") < said.index("data: {")
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            other = client.completions.create(model="edgespec", prompt=[6] * 1500, max_tokens=2, stream=True)
            assert [chunk.choices[0].finish_reason for chunk in other][-1] == "length"
        asked = {"model": "edgespec", "prompt": "the quick " * 150, "options": {"num_predict": 2}}
        lines = plain.post("/api/generate", json=asked).text.splitlines()
        assert all({"model", "created_at", "done", "response"} <= json.loads(line).keys() for line in lines)
        assert served.log == []
