"""Calls of functions in a model's text, and the grammar that forces them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.server.openai_writer import ChatWriter
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.request_schema import ChatRequest, Tool
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm, AnswerReader, PlainText, ReadPart
from edgespec.apps.server.tool_calls.call_forms import HERMES
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.decoding.options import Options
from edgespec.decoding.records import Token
from edgespec.llama.weights import Model
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

Called = tuple[str, str]
F: Called = ("f", '{"a": 1}')
TAGGED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def reader(*names: str) -> AnswerReader:
    return AnswerReader(AnswerForm({name: {} for name in names}, HERMES))


def read(text: str, cuts: list[int]) -> tuple[str, list[Called]]:
    """Feed `text` in pieces; return what is said and what is called."""
    reads = reader("f", "g")
    parts: list[ReadPart] = []
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        parts += reads.feed(text[start:end])
    parts += reads.finish()
    said = [part for part in parts if isinstance(part, PlainText)]
    assert all(a.end <= b.start for a, b in itertools.pairwise(said)), "in order, nothing twice"
    calls = [(part.name, part.arguments) for part in parts if isinstance(part, ReadCall)]
    return "".join(text[part.start : part.end] for part in said), calls


CASES: list[tuple[str, str, list[Called]]] = [
    ("hello", "hello", []),
    ("", "", []),
    ("  \n", "  \n", []),
    (TAGGED, "", [F]),
    (f"Let me see.\n\n{TAGGED}\n", "Let me see.", [F]),
    (f"{TAGGED}\n{TAGGED}", "", [F, F]),
    (f"{TAGGED}\ndone", "\ndone", [F]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),  # cut off by the end, or by a stop string
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [F]),
    ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    (
        '<tool_call>{"name": "g", "arguments": {"x": "a </tool_call> \\" b"}}</tool_call>',
        "",
        [("g", '{"x": "a </tool_call> \\" b"}')],
    ),
    # As small models write them.
    ('{"name": "f", "arguments": {"a": 1}}', "", [F]),
    ('{{"name": "f", "arguments": {"a": 1}}}', "", [F]),
    ('```json\n{\n "name": "f",\n "arguments": {"a": 1}\n}\n```', "", [F]),
    ('<tools>\n{"name": "f", "arguments": {"a": 1}}\n</tools>', "", [F]),
    ('[{"name": "f", "arguments": {"a": 1}}]', '[{"name": "f", "arguments": {"a": 1}}]', []),
    # What is no call stays text.
    ('{"name": "h", "arguments": {}}', '{"name": "h", "arguments": {}}', []),
    ('{"x": 1}', '{"x": 1}', []),
    ("```python\nf()\n```", "```python\nf()\n```", []),
    ("a < b <tool", "a < b <tool", []),
    ("<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),  # type: ignore[list-item]
    # Once its arguments have begun it is a call, as the model wrote it.
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", [("f", '{"a": NaN}')]),
    ("<tool_call>" + "[" * 50_000, None, []),  # type: ignore[list-item]
    (f"<tool_call>oops</tool_call> {TAGGED}", "<tool_call>oops</tool_call>", [F]),
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_calls_are_told_from_text(text: str, said: str | None, calls: list[Called]):
    assert read(text, []) == (text if said is None else said, calls)


@given(
    st.sampled_from([case for case in CASES if len(case[0]) < 200]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_it_does_not_matter_how_the_text_comes(case: tuple[str, str | None, list[Called]], cuts: list[int]):
    text, said, calls = case
    assert read(text, cuts) == (text if said is None else said, calls)


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"}', '"', "{", "}", " ", "x", "\\"]))
)
def test_nothing_is_lost_that_is_no_call(parts: list[str]):
    text = "".join(parts)
    said, calls = read(text, [])
    if not calls:
        assert said == text


def test_text_is_not_held_longer_than_needed():
    reads = reader("f")
    assert reads.feed("Hello ") == [PlainText(0, 5)]
    assert reads.feed("there <to") == [PlainText(5, 11)]
    assert reads.feed("p> x") == [PlainText(11, 19)]


def test_a_call_in_chunks(tiny_target: Model):
    """The name comes first, then the arguments; the text around keeps its origins."""
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    request = PreparedRequest((PreparedText([1], Options(), AnswerForm({"f": {}})),))
    writer = ChatWriter(asked, request, tiny_target, "m", "fp")
    text = f"So: {TAGGED}"
    tokens = [Token(5, text[i : i + 3], "accepted") for i in range(0, len(text), 3)]
    deltas = [chunk["choices"][0]["delta"] for token in tokens for chunk in writer.parts(0, [token])]
    assert "".join(delta.get("content", "") for delta in deltas) == "So:"
    first, *rest = (delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert first["id"].startswith("call_")
    assert (first["index"], first["type"], first["function"]) == (
        0,
        "function",
        {"name": "f", "arguments": ""},
    )
    assert all(delta["index"] == 0 and [*delta["function"]] == ["arguments"] for delta in rest)
    assert "".join(delta["function"]["arguments"] for delta in rest) == '{"a": 1}'


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_a_template_takes_tools(tmp_path: Path):
    template = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
    messages = [{"role": "user", "content": "hi"}]
    offered = [tool("f").model_dump(exclude_none=True)]
    with Model(write_tiny_gguf(tmp_path / "tools.gguf", chat_template=template)) as model:
        plain = model.render_chat(messages)
        assert model.render_chat(messages, offered) == json.dumps(offered[0]) + "\n" + plain
        assert model.render_chat(messages, []) == plain
        with_tools = model.tokenize_chat(messages, offered)
        assert with_tools == model.tokenize(
            model.render_chat(messages, offered), add_special=True, parse_special=True
        )
