"""Requests of Anthropic's API in OpenAI's terms, and answers in Anthropic's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from anthropic.types import Message

from anthropic_events import message_of
from edgespec.apps.server.anthropic_api import (
    CountTokensRequest,
    MessagesRequest,
    MessagesWriter,
    openai_messages,
)
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Tally, Token, summarise


def openai(messages: Any, system: Any = None, *, later_system: bool = True) -> list[dict[str, Any]]:
    body = CountTokensRequest.model_validate({"model": "m", "messages": messages, "system": system})
    return openai_messages(body, later_system=later_system)


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def test_a_conversation_with_calls_and_thoughts():
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "ü"}, "caller": {"type": "direct"}}
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "?"},
        text("I look.", citations=None),
        use,
        use | {"id": "b", "name": "g", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": [text("no"), text("way")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "a", "content": "5", **cached},
        {"type": "tool_result", "tool_use_id": "lost"},
    ]
    found = openai(
        [
            user(text("hi"), text("you", **cached)),
            {"role": "assistant", "content": said},
            user(*results, text("?")),
        ],
        [text("x-anthropic-billing-header: cc_version=2.1; cch=0a1b;"), text("Be brief."), text("Be kind.")],
    )
    functions = [{"name": "f", "arguments": '{"x": "ü"}'}, {"name": "g", "arguments": "{}"}]
    assert found == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "hi\nyou"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": name, "type": "function", "function": function}
                for name, function in zip("ab", functions, strict=True)
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "Error: no\nway", "name": "g"},
        {"role": "tool", "tool_call_id": "a", "content": "5", "name": "f"},
        {"role": "tool", "tool_call_id": "lost", "content": ""},
        {"role": "user", "content": "?"},
    ]


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ("x-anthropic-billing-header: cch=1;\n\nBe brief.", ["Be brief."]),
        ("x-anthropic-billing-header: cch=1;", []),
        ("No x-anthropic-billing-header: cch=1;", ["No x-anthropic-billing-header: cch=1;"]),
        ("", []),
    ],
)
def test_noise_before_the_system_prompt_is_cut(system: str, left: list[str]):
    """It differs from request to request: with it, no prompt would be in the cache."""
    found = openai([user(text("hi"))], system)
    assert [message["content"] for message in found[:-1]] == left


def test_messages_of_one_role_are_one():
    said = {"role": "assistant", "content": "a"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    found = openai(
        [user(text("1")), {"role": "user", "content": "2"}, said, said | {"content": [text("b"), call]}]
    )
    assert [(message["role"], message["content"]) for message in found] == [
        ("user", "1\n2"),
        ("assistant", "a\nb"),
    ]
    assert len(found[1]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("later_system", "expected"),
    [
        (True, [("system", "s\n0"), ("user", "1"), ("system", "2"), ("user", "3")]),
        (False, [("system", "s\n0"), ("user", "1\n2\n3")]),
    ],
)
def test_instructions_amid_a_conversation(later_system: bool, expected: list[tuple[str, str]]):
    first, later = ({"role": "system", "content": content} for content in ("0", [text("2")]))
    found = openai([first, user(text("1")), later, user(text("3"))], "s", later_system=later_system)
    assert [(message["role"], message["content"]) for message in found] == expected


def test_documents_of_text_are_read():
    plain = {"type": "text", "media_type": "text/plain", "data": "one"}
    blocks = {"type": "content", "content": [text("two"), text("three")]}
    found = openai(
        [
            user(
                {"type": "document", "source": plain, "title": "T", "context": "C"},
                {"type": "document", "source": blocks, "citations": {"enabled": False}},
                {"type": "search_result", "source": "s", "title": "t", "content": [text("four")]},
            )
        ]
    )
    assert found == [{"role": "user", "content": "T\nC\none\ntwo\nthree\nt\ns\nfour"}]


# ---- answers ----


def written(
    said: str,
    *,
    stream: bool,
    expected: AnswerForm,
    stop_reason: Any = "eog",
    stop: tuple[str, ...] = (),
    rest: str = "",
    max_tokens: int = 1000,
    shows_thoughts: bool = True,
) -> Message:
    """Return an answer whose tokens are characters; `rest`: what was written and is not shown."""
    model: Any = SimpleNamespace(is_control=lambda _token: False, piece=lambda token: chr(token).encode())
    thinking = None if shows_thoughts else {"type": "adaptive", "display": "omitted"}
    asked = {"messages": [user(text("a"))], "max_tokens": max_tokens, "thinking": thinking}
    request = PreparedRequest((PreparedText([1, 2], Options(stop=stop), expected),))
    writer = MessagesWriter(MessagesRequest.model_validate(asked), request, model, "m")
    tokens = [Token(ord(one), one, "target") for one in said]
    ids = tuple(map(ord, said + rest))
    stats = summarise(Tally(), n_prompt=1, n_tokens=len(said), ttft_s=0.1, total_s=0.2, peak_rss_bytes=0)
    result = Result(
        said, ids, 9, stop_reason, None, "m", None, "stock", {}, "", stats, n_cached=4
    )  # fmt: skip
    if not stream:
        writer.drain(writer.parts(0, tokens))
        return Message.model_validate_json(writer.whole([result]))
    made = writer.begin() + "".join(writer.add(0, [token]) for token in tokens)
    return message_of(made + writer.finish(0, result))


STREAM = pytest.mark.parametrize("stream", [True, False])
FUNCTIONS: dict[str, Any] = {"f": {}, "g": {}}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": [1, "ü"]}}\n</tool_call>'


@STREAM
@pytest.mark.parametrize("at_once", [True, False])
def test_thoughts_text_and_calls_are_blocks(stream: bool, at_once: bool):
    expected = AnswerForm(FUNCTIONS, thinking=("<think>", "</think>"), thinks_at_once=at_once)
    said = ("" if at_once else "<think>") + f"Hm.</think>I look.\n{CALL % 'f'}\n{CALL % 'g'}"
    found = written(said, stream=stream, expected=expected)
    thought, spoken, first, second = found.content
    assert thought.type == "thinking" and (thought.thinking.strip(), thought.signature) == ("Hm.", "edgespec")
    assert spoken.type == "text" and spoken.text.strip() == "I look."
    for call, name in ((first, "f"), (second, "g")):
        assert call.type == "tool_use" and (call.name, call.input) == (name, {"a": [1, "ü"]})
    assert found.stop_reason == "tool_use"
    assert found.usage.input_tokens == 5 and found.usage.cache_read_input_tokens == 4
    assert found.usage.output_tokens == len(said)


@STREAM
def test_thoughts_that_are_not_wanted_are_not_sent(stream: bool):
    expected = AnswerForm({}, thinking=("<think>", "</think>"), thinks_at_once=True)
    found = written("Hm.</think>Yes.", stream=stream, expected=expected, shows_thoughts=False)
    thought, spoken = found.content
    assert thought.type == "thinking" and thought.thinking == "" and thought.signature
    assert spoken.type == "text" and spoken.text == "Yes."


@STREAM
@pytest.mark.parametrize(
    ("arguments", "given"), [('{"a": [1, "ab', {"a": [1]}), ("{", {}), ('{"a": "b"', {"a": "b"})]
)
def test_of_a_call_that_is_cut_off_there_is_what_clients_read(stream: bool, arguments: str, given: Any):
    said = f'<tool_call>\n{{"name": "f", "arguments": {arguments}'
    found = written(
        said, stream=stream, expected=AnswerForm(FUNCTIONS), stop_reason="length", max_tokens=len(said)
    )
    assert found.stop_reason == "max_tokens"
    assert [block.input for block in found.content if block.type == "tool_use"] == [given]


@STREAM
@pytest.mark.parametrize(
    ("stop_reason", "fields", "expected"),
    [
        ("eog", {}, ("end_turn", None)),
        ("length", {"max_tokens": 2}, ("max_tokens", None)),
        ("length", {"max_tokens": 3}, ("model_context_window_exceeded", None)),
        ("context", {}, ("model_context_window_exceeded", None)),
        ("stop", {"stop": ("b", "ENDE", "END"), "rest": "END"}, ("stop_sequence", "END")),
    ],
)
def test_why_an_answer_ends(
    stream: bool, stop_reason: Any, fields: dict[str, Any], expected: tuple[str, Any]
):
    found = written("hm", stream=stream, expected=AnswerForm({}), stop_reason=stop_reason, **fields)
    assert (found.stop_reason, found.stop_sequence) == expected


@STREAM
def test_an_answer_without_text_has_no_block(stream: bool):
    assert written("", stream=stream, expected=AnswerForm({})).content == []
