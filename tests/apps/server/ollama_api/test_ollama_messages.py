"""Conversations with calls and thoughts, from Ollama's form and into it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ollama
import pytest

from edgespec.apps.server.ollama_api import (
    OllamaChatRequest,
    OllamaRequestMessage,
    OllamaWriter,
    openai_messages,
)
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Tally, Token, summarise
from ollama_requests import GREEDY, HELLO, refused
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf


def called(*names: str, **ids: str) -> dict[str, Any]:
    calls = [{"id": ids.get(name), "function": {"name": name, "arguments": {"n": 1}}} for name in names]
    return {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "ids"),  # of the calls, and of the results that belong to them
    [
        ([called("f"), {"role": "tool", "content": "1"}], ["call00100", "call00100"]),
        ([called("f"), {"role": "tool", "tool_name": "f"}], ["call00100", "call00100"]),
        (
            [called("f", "g"), {"role": "tool", "tool_name": "g"}, {"role": "tool", "tool_name": "f"}],
            ["call00100", "call00101", "call00101", "call00100"],
        ),
        ([called("f", "f"), {"role": "tool", "tool_name": "f"}, {"role": "tool", "tool_name": "f"}],
         ["call00100", "call00101", "call00100", "call00101"]),
        ([called("f", f="mine"), {"role": "tool", "tool_call_id": "mine"}], ["mine", "mine"]),
        ([called("f"), {"role": "tool"}, called("f"), {"role": "tool"}],
         ["call00100", "call00100", "call00300", "call00300"]),
        ([{"role": "tool", "tool_call_id": "lost"}], ["lost"]),
    ],
)  # fmt: skip
def test_results_belong_to_their_calls(messages: list[dict[str, Any]], ids: list[str]):
    """Ollama's clients send no ids; templates may need them."""
    read = OllamaChatRequest.model_validate({"messages": [*HELLO, *messages]}).messages or []
    found: list[str] = []
    for message in openai_messages(read):
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"]) == {"n": 1}
            found.append(call["id"])
        if message["role"] == "tool":
            found.append(message["tool_call_id"])
    assert found == ids


def lines_of(
    text: str, *, stream: bool, expected: AnswerForm, stop_reason: Any = "eog"
) -> list[dict[str, Any]]:
    """Return the lines of an answer whose tokens are characters."""
    plain: Any = SimpleNamespace(is_control=lambda _token: False)  # a model of which no more is asked
    request = PreparedRequest((PreparedText([1], Options(), expected),))
    writing = OllamaWriter(OllamaChatRequest(), request, plain, "m")
    tokens = [Token(0, character, "target") for character in text]
    stats = summarise(Tally(), n_prompt=1, n_tokens=len(text), ttft_s=0.1, total_s=0.2, peak_rss_bytes=0)
    result = Result(
        text, (0,) * len(text), 1, stop_reason, None, "m", None, "stock", {}, "", stats,
    )  # fmt: skip
    made = ""
    for token in tokens:
        lines = writing.add(0, [token])
        made += lines if stream else ""
    made += writing.finish(0, result) if stream else writing.whole([result])
    return [json.loads(line) for line in made.splitlines()]


CALLS = AnswerForm({"f": {}, "g": {}})
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": [1, "ü"]}}\n</tool_call>'


@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_objects_in_one_line(stream: bool):
    lines = lines_of(f"I look.\n{CALL % 'f'}\n{CALL % 'g'}", stream=stream, expected=CALLS)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": i, "name": name, "arguments": {"a": [1, "ü"]}} for i, name in enumerate("fg")
    ]
    assert all(call["id"].startswith("call_") for call in calls)
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "stop")
    if stream:
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cut_off_is_text(stream: bool):
    """Ollama's arguments are an object: there is none yet."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, '
    lines = lines_of(text, stream=stream, expected=CALLS, stop_reason="length")
    assert lines[-1]["done_reason"] == "length"
    assert not any("tool_calls" in line["message"] for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == '{"name": "f", "arguments": {"a": [1, '


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_thoughts_are_apart(stream: bool, at_once: bool):
    expected = AnswerForm({"f": {}}, thinking=("<think>", "</think>"), thinks_at_once=at_once)
    text = ("" if at_once else "<think>") + f"Hm: {CALL % 'f'}?</think>Yes.\n{CALL % 'f'}"
    lines = lines_of(text, stream=stream, expected=expected)
    said = [line["message"] for line in lines]
    assert "".join(one.get("thinking", "") for one in said).strip() == f"Hm: {CALL % 'f'}?"
    assert "".join(one["content"] for one in said).strip() == "Yes."
    assert [call["function"]["name"] for one in said for call in one.get("tool_calls", ())] == ["f"]


def test_tools_and_a_format_are_a_call_or_an_answer_in_it(client: ollama.Client):
    f = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for seed in range(4):
        options = {"seed": seed, "num_predict": 200}
        answer = client.chat("edgespec", HELLO, tools=[f], format={"enum": ["a", "b"]}, options=options)
        if calls := answer.message.tool_calls:
            assert {call.function.name for call in calls} == {"f"}
        else:
            assert json.loads(answer.message.content or "") in ("a", "b")


def test_an_answer_of_another_server_can_be_sent_back(served: Served):
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": None, "reasoning": "hm", "refusal": None, "tool_calls": [called]}
    messages = [*HELLO, said, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    body = {"model": "edgespec", "messages": messages, "stream": False, "options": {"num_predict": 2}}
    with served.client() as plain:
        answer = plain.post("/api/chat", json=body)
        assert answer.status_code == 200, answer.text
        assert "X-Edgespec-Warning" not in answer.headers
    read = [OllamaRequestMessage.model_validate(message) for message in messages]
    (_, again, result) = openai_messages(read)
    assert (again["reasoning"], again["tool_calls"]) == ("hm", [called])
    assert result["tool_call_id"] == "c"


def test_a_model_without_a_template_goes_on_with_the_prompt(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "base.gguf", seed=1, chat_template=None)
    with serving(path) as served, ollama.Client(served.url) as client:
        generated = client.generate("edgespec", "hello", options=GREEDY)
        assert generated.response == client.generate("edgespec", "hello", raw=True, options=GREEDY).response
        with pytest.raises(ollama.ResponseError, match="without a chat template does not support system"):
            client.generate("edgespec", "hello", system="be brief")
        refused(client, 400, "no chat template")
        assert client.show("edgespec").capabilities == ["completion"]
