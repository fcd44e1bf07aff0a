"""Clients and frameworks that people use: LangChain, instructor, pydantic-ai, llm, and official clients.

Where the form alone matters the model is tiny and random; where an answer must mean something it is the real
pair, one server for all tests of this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import instructor
import ollama
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from server_app import Served, serving
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf


class Mood(BaseModel):
    """The mood of a text. All of its values are short, so that a random model says them whole."""

    mood: Literal["good", "bad"]
    sure: bool


class City(BaseModel):
    """A city of the user's question."""

    name: str
    country: str


@tool
def get_weather(city: str) -> str:
    """Return the current weather of a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("clients") / "tiny.gguf"
    with serving(write_tiny_gguf(path, seed=1, n_ctx=4096, chat_template=TOOLS_TEMPLATE)) as served:
        yield served
    assert served.log == []


@pytest.fixture(scope="module")
def real(pair: tuple[Path, Path]) -> Iterator[Served]:
    with serving(*pair) as served:
        yield served
    assert served.log == []


def openai_chat(served: Served, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="edgespec", base_url=f"{served.url}/v1", api_key="none", max_retries=0, temperature=0, **fields
    )


def ollama_chat(served: Served, **fields: Any) -> ChatOllama:
    return ChatOllama(model="edgespec", base_url=served.url, temperature=0, **fields)


LANGCHAIN = pytest.mark.parametrize("chat", [openai_chat, ollama_chat], ids=["openai", "ollama"])
QUESTION = "What is the weather in Paris?"


# ---- LangChain ----


@LANGCHAIN
def test_langchain_answers_and_streams(tiny: Served, chat: Any):
    model = chat(
        tiny, **({"max_tokens": 12} if chat is openai_chat else {"num_predict": 12, "num_ctx": 2048})
    )
    whole = model.invoke("hello")
    assert whole.content and whole.usage_metadata["output_tokens"] == 12
    chunks = list(model.stream([("system", "be brief"), ("human", "hello")]))
    assert len(chunks) > 1
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.content == model.invoke([("system", "be brief"), ("human", "hello")]).content


@pytest.mark.parametrize(
    ("chat", "method"),  # Ollama's API cannot force a call, and a random model makes none by itself
    [(openai_chat, "json_schema"), (openai_chat, "function_calling"), (ollama_chat, "json_schema")],
)
def test_langchain_structures(tiny: Served, chat: Any, method: str):
    found = chat(tiny).with_structured_output(Mood, method=method).invoke("hello")
    assert isinstance(found, Mood)


@pytest.mark.pair
@LANGCHAIN
def test_langchain_calls_a_tool_and_goes_on(real: Served, chat: Any):
    model = chat(real).bind_tools([get_weather])
    asked = HumanMessage(QUESTION)
    called = model.invoke([asked])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    streamed = None
    for chunk in model.stream([asked]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [one["args"] for one in streamed.tool_calls] == [{"city": "Paris"}]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"], name="get_weather")
    answer = chat(real).invoke([asked, called, result])  # with tools so small a model would call again
    assert isinstance(answer, AIMessage) and "rain" in answer.content.lower()


@pytest.mark.pair
@LANGCHAIN
def test_langchain_structures_what_is_meant(real: Served, chat: Any):
    found = chat(real).with_structured_output(City).invoke("I live in Rome. Which city, in which country?")
    assert isinstance(found, City) and (found.name, found.country) == ("Rome", "Italy")


# ---- instructor ----


def instructed(served: Served, mode: instructor.Mode) -> Any:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def ask_instructor(served: Served, mode: instructor.Mode, form: Any, text: str) -> Any:
    return instructed(served, mode).chat.completions.create(
        model="edgespec",
        messages=[{"role": "user", "content": text}],
        response_model=form,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor_gets_its_form_from_any_model(tiny: Served, mode: instructor.Mode):
    assert isinstance(ask_instructor(tiny, mode, Mood, "hello"), Mood)


@pytest.mark.pair
@pytest.mark.parametrize(
    "mode",
    [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON],
)
def test_instructor_extracts(real: Served, mode: instructor.Mode):
    found = ask_instructor(real, mode, City, "I live in Rome. Which city, in which country?")
    assert (found.name, found.country) == ("Rome", "Italy")


# ---- pydantic-ai ----


def agent(served: Served, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    settings: Any = {"temperature": 0, "max_tokens": 200}
    return Agent(OpenAIChatModel("edgespec", provider=provider), model_settings=settings, **options)


@pytest.mark.parametrize("form", [Mood, NativeOutput(Mood)], ids=["a forced call", "a schema"])
def test_pydantic_ai_gets_its_form_from_any_model(tiny: Served, form: Any):
    assert isinstance(agent(tiny, output_type=form).run_sync("hello").output, Mood)


def test_pydantic_ai_streams(tiny: Served):
    found = agent(tiny, instructions="be brief").run_stream_sync("hello")
    assert "".join(found.stream_text(delta=True)) == found.get_output()
    assert found.usage.output_tokens


@pytest.mark.pair
def test_pydantic_ai_calls_a_tool(real: Served):
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Return the current weather of a city."""
        asked.append(city)
        return f"rain in {city}"

    for event in agent(real, tools=[get_weather]).run_stream_sync(QUESTION).stream_text():
        assert event
    assert asked[0] == "Paris"


# ---- llm ----


def run_llm(folder: Path, served: Served, *arguments: str) -> str:
    model = {
        "model_id": "edgespec",
        "model_name": "edgespec",
        "api_base": f"{served.url}/v1",
        "supports_schema": True,
        "supports_tools": True,
    }
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "edgespec", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_llm_prompts_and_streams(tiny: Served, tmp_path: Path):
    options = ("-o", "max_tokens", "8", "-o", "temperature", "0")
    streamed = run_llm(tmp_path, tiny, "hello", "-s", "be brief", *options)
    assert streamed.strip()
    assert run_llm(tmp_path, tiny, "hello", "-s", "be brief", "--no-stream", *options) == streamed


def test_llm_schema(tiny: Served, tmp_path: Path):
    schema = json.dumps(Mood.model_json_schema())
    text = run_llm(
        tmp_path, tiny, "hello", "--schema", schema, "-o", "max_tokens", "60", "-o", "temperature", "0"
    )
    Mood.model_validate_json(text)


# ---- official clients ----

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


@pytest.mark.pair
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_openai_calls_a_tool(real: Served, choice: Literal["auto", "required"]):
    function = {"name": "get_weather", "description": "Current weather of a city", "parameters": CITY}
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="edgespec",
            messages=[{"role": "user", "content": QUESTION}],
            tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
            tool_choice=choice,
            temperature=0,
            max_tokens=60,
        ).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] == "Paris"


@pytest.mark.pair
def test_anthropic_calls_a_tool_and_goes_on(real: Served):
    tools = [{"name": "get_weather", "description": "The current weather of a city.", "input_schema": CITY}]
    messages: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "edgespec", "max_tokens": 64, "tools": tools, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(messages=messages, **asked) as stream:
            found = stream.get_final_message()
        call: Any = found.content[-1]
        assert (call.name, call.input, found.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain, 12 degrees"}
        messages += [found.to_param(), {"role": "user", "content": [result]}]
        again = client.messages.create(messages=messages, **asked)  # so small a model calls again
        told: Any = client.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert told.stop_reason == "end_turn" and "rain" in told.content[0].text
    assert again.usage.cache_read_input_tokens > 100


@pytest.mark.pair
def test_ollama_calls_a_tool_and_goes_on(real: Served):
    def get_weather(city: str) -> str:
        """Return the current weather of a city.

        Args:
            city: The city's name.
        """
        return f"rain in {city}"

    options = {"temperature": 0}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with ollama.Client(real.url) as client:
        answer = client.chat("edgespec", messages, tools=[get_weather], options=options)
        (call,) = answer.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
        parts = client.chat("edgespec", messages, tools=[get_weather], options=options, stream=True)
        called = [one.function.arguments for part in parts for one in part.message.tool_calls or ()]
        assert called == [{"city": "Paris"}]
        messages += [
            answer.message,
            {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)},
        ]
        last = client.chat("edgespec", messages, options=options)
        assert "rain" in (last.message.content or "").lower()


@pytest.mark.pair
def test_ollama_format_means_something(real: Served):
    with ollama.Client(real.url) as client:
        answer = client.chat(
            "edgespec",
            [{"role": "user", "content": "I live in Rome. Which city, in which country? Answer in JSON."}],
            format=City.model_json_schema(),
            options={"temperature": 0},
        )
        assert City.model_validate_json(answer.message.content or "") == City(name="Rome", country="Italy")
        assert "completion" in (client.show("edgespec").capabilities or ())
