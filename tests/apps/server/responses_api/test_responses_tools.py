"""Tools in the Responses API: functions, custom tools, namespaces; what is refused or left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from responses_requests import GET_WEATHER, ask, stream
from scripted_texts import writing
from server_app import Served, serving

LONG = "a long text " * 20
NOTE = {"type": "custom", "name": "note", "description": "takes a note"}
CODE = NOTE | {"name": "code", "format": {"type": "grammar", "syntax": "regex", "definition": '[ab]{2,3}"'}}
LARK = NOTE | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x" | "y"'}}
SPACE = {"type": "namespace", "name": "zoo", "description": "animals", "tools": [GET_WEATHER, NOTE]}
SEARCH = {"type": "web_search", "external_web_access": True}


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=True)
    return f"<tool_call>\n{said}\n</tool_call>"


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI, http: httpx.Client, served: Served):
    fields: dict[str, Any] = {"model": "edgespec", "tools": [GET_WEATHER]}
    with writing(served, call("get_weather", city="Paris"), "rain", "rain") as prompts:
        events = stream(http, input="weather?", tools=[GET_WEATHER])
        (made,) = events[-1].response.output
        assert (made.type, made.name, json.loads(made.arguments)) == (
            "function_call",
            "get_weather",
            {"city": "Paris"},
        )
        output = {"type": "function_call_output", "call_id": made.call_id, "output": "wet"}
        answer = client.responses.create(
            previous_response_id=events[-1].response.id, input=[output], **fields
        )
        assert answer.output_text == "rain"
        parts = [{"type": "input_text", "text": "wet"}]
        items = [{"role": "user", "content": "weather?"}, made.model_dump(), output | {"output": parts}]
        client.responses.create(input=items, **fields)
    assert prompts[1] == prompts[2]
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompts[1]
    assert "<|im_start|>tool\nwet<|im_end|>" in prompts[1]


@pytest.mark.parametrize(
    ("tools", "choice", "name"),
    [
        ([GET_WEATHER], "required", "get_weather"),
        ([GET_WEATHER, CODE], {"type": "function", "name": "get_weather"}, "get_weather"),
        (
            [GET_WEATHER, CODE],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "code"}]},
            "code",
        ),
        ([GET_WEATHER, CODE], {"type": "custom", "name": "code"}, "code"),
    ],
    ids=["required", "function", "allowed", "custom"],
)
def test_a_choice_of_tools_is_kept(http: httpx.Client, tools: list[Any], choice: Any, name: str):
    parameters = GET_WEATHER["parameters"] | {"properties": {"city": {"enum": ["Paris", "Rome"]}}}  # type: ignore[operator]
    tools = [tool | {"parameters": parameters} if tool is GET_WEATHER else tool for tool in tools]
    answer = ask(http, tools=tools, tool_choice=choice, seed=1, parallel_tool_calls=False)
    assert (answer.status, [item.name for item in answer.output]) == ("completed", [name])  # type: ignore[union-attr]
    (made,) = answer.output
    if made.type == "custom_tool_call":
        assert re.fullmatch('[ab]{2,3}"', made.input)
    elif made.type == "function_call":
        assert json.loads(made.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("text", ['*** Begin\n+a "quoted" \\n\n', "ä € 😀 \u2028", ""])
def test_a_custom_tool_takes_text(http: httpx.Client, served: Served, text: str):
    with writing(served, call("note", input=text), "ok") as prompts:
        (made,) = stream(http, tools=[NOTE])[-1].response.output
        assert (made.type, made.name, made.input) == ("custom_tool_call", "note", text)
        output = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "noted"}
        ask(http, tools=[NOTE], input=[{"role": "user", "content": "x"}, made.model_dump(), output])
    if text:
        assert json.dumps({"input": text}, ensure_ascii=False) in prompts[1].replace("\\u2028", "\u2028")
    assert "tool\nnoted" in prompts[1]


def test_a_call_that_is_cut_is_incomplete(http: httpx.Client, served: Served):
    with writing(served, call("note", input=LONG)):
        answer = stream(http, tools=[NOTE], max_output_tokens=80)[-1].response
    assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
    assert answer.output[0].input and LONG.startswith(answer.output[0].input)


def test_a_namespace_is_part_of_the_name(http: httpx.Client, served: Served):
    with writing(served, call("zoo__get_weather", city="x"), call("get_weather", city="y")) as prompts:
        answer = stream(http, tools=[GET_WEATHER, SPACE])[-1].response
        (made,) = answer.output
        assert (made.name, made.namespace) == ("get_weather", "zoo")
        items = [{"role": "user", "content": "x"}, made.model_dump()]
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "1"})
        (made,) = ask(http, tools=[GET_WEATHER, SPACE], input=items).output
        assert made.type == "function_call" and made.namespace is None
    assert '{"name": "zoo__get_weather", "arguments"' in prompts[1]


@pytest.mark.parametrize("names", [("a", "b__c", "a__b", "c"), ("mcp." + "s" * 70, "t" * 128, "u", "v.w-x")])
def test_names_of_two_namespaces_survive(http: httpx.Client, served: Served, names: tuple[str, ...]):
    """However long they are, and where two of them join to the same."""
    spaces = [SPACE | {"name": n, "tools": [GET_WEATHER | {"name": t}]} for n, t in (names[:2], names[2:])]
    for i, space in enumerate(spaces):
        chosen = {"type": "function", "name": names[2 * i + 1], "namespace": names[2 * i]}
        made = ask(http, tools=spaces, tool_choice=chosen, max_output_tokens=400, seed=1).output[0]
        assert (made.type, made.namespace, made.name) == ("function_call", names[2 * i], names[2 * i + 1])
        items = [{"role": "user", "content": "x"}, made.model_dump() | {"arguments": "{}"}]
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "1"})  # type: ignore[union-attr]
        with writing(served, "ok") as prompts:
            ask(http, tools=spaces, input=items)
        joined = f"{space['name']}__{names[2 * i + 1]}" + "_" * (i and names[0] == "a")
        assert f'{{"name": "{joined}", "arguments"' in prompts[0]


def test_what_is_done_only_in_part_is_told(http: httpx.Client, served: Served):
    body: dict[str, Any] = {
        "model": "edgespec",
        "input": "x",
        "tools": [SEARCH, LARK, {"type": "tool_search"}],
    }
    body |= {"text": {"verbosity": "low"}}
    with writing(served, "ok") as prompts:
        answer = http.post("/v1/responses", json=body)
    told = answer.headers["X-Edgespec-Warning"]
    for words in (
        "tools.0: web_search is left out",
        "tools.1.format: not enforced",
        "tools.2: tool_search",
        "text.verbosity",
    ):
        assert words in told
    assert [tool["type"] for tool in answer.json()["tools"]] == ["custom"]
    assert 'start: \\"x\\" | \\"y\\"' in prompts[0] and "web_search" not in prompts[0]
    assert answer.json()["usage"]["edgespec"]["warnings"]


@pytest.mark.pair
def test_a_real_model_calls_a_tool_and_goes_on(pair: tuple[Path, Path]):
    with (
        serving(*pair) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields: dict[str, Any] = {"model": "edgespec", "tools": [GET_WEATHER], "temperature": 0}
        with client.responses.stream(input="What is the weather in Paris?", **fields) as events:
            called = events.get_final_response()
        (made,) = called.output
        assert made.type == "function_call" and json.loads(made.arguments) == {"city": "Paris"}
        output: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "rain in Paris"}
        fields |= {"previous_response_id": called.id, "input": [output], "max_output_tokens": 40}
        again = client.responses.create(**fields)  # so small a model calls again
        assert again.usage and again.usage.input_tokens_details.cached_tokens > 100
        answer = client.responses.create(**fields, tool_choice="none")
        assert "rain" in answer.output_text.lower()
        assert served.log == []
