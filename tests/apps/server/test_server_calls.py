# ruff: noqa: E501, RUF001 - answers as models write them
"""Calls in every family's own form: found in its template, read while they come, told from text."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import FAMILIES
from edgespec.apps.server.chat_prompts import choose_form
from edgespec.apps.server.openai_writer import ChatWriter
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.tool_calls.answer_reader import (
    AnswerForm,
    AnswerReader,
    PlainText,
    ReadPart,
    ThoughtText,
)
from edgespec.apps.server.tool_calls.call_forms import HERMES, CallForm, TemplateTraits
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.decoding.options import Options
from edgespec.decoding.records import Token
from edgespec.llama.chat_template import ChatTemplate
from edgespec.llama.weights import Model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "sure": {"type": "boolean"},
        "any": {},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
FUNCTIONS = {"f": SCHEMA, "get.it_now-2": {}, "g": {}}
THINK = ("<think>", "</think>")


def form_of(family: str) -> CallForm | None:
    return choose_form(TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>")))


FORMS = {family: form_of(family) for family in FAMILIES}


class Read:
    """What a reader found in a text that came in pieces."""

    def __init__(self, pieces: list[str], expected: AnswerForm) -> None:
        reader = AnswerReader(expected)
        self.parts: list[ReadPart] = []
        for piece in pieces:
            self.parts += reader.feed(piece)
        self.parts += reader.finish()
        text = "".join(pieces)
        self.said = "".join(text[part.start : part.end] for part in self.parts if type(part) is PlainText)
        self.thought = "".join(
            text[part.start : part.end] for part in self.parts if type(part) is ThoughtText
        )
        calls = [part for part in self.parts if isinstance(part, ReadCall)]
        self.calls = [(call.name, call.arguments) for call in calls]
        self.complete = all(call.complete for call in calls)

    @property
    def outcome(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.said, self.thought, self.calls


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in itertools.cycle(sizes):
        pieces.append(text[start : start + size])
        start += size
        if start >= len(text):
            return pieces
    raise AssertionError


def read(text: str, expected: AnswerForm) -> Read:
    """Read `text` in pieces of many sizes, which make no difference."""
    whole = Read([text], expected)
    rng = random.Random(len(text))
    for sizes in ([1], [2], [3], [5], *([rng.randint(1, 12) for _ in range(8)] for _ in range(12))):
        assert Read(pieces_of(text, sizes), expected).outcome == whole.outcome, sizes
    return whole


F = ("f", '{"a": 1}')
TAGGED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"days": 1}}\n</tool_call>', "", [("f", '{"days": 1}')]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"days": 1}}}</tool_call>',
        "",
        [("f", '{"days": 1}')],
    ),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "f"}</tool_call>', "", [("f", '{"days": 1}')]),
    (
        "coder",
        "Ah.\n\n<tool_call>\n<function=f>\n<parameter=days>\n12\n</parameter>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=sure>\nTrue\n</parameter>\n<parameter=deep>\n{\"a\": [1]}\n</parameter>\n"
        "<parameter=any>\n[1]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>",
        "Ah.",
        [("f", '{"days": 12, "city": "12", "sure": true, "deep": {"a": [1]}, "any": [1], "maybe": null}')],
    ),
    (
        "coder",
        '<tool_call>\n<function=f>\n<parameter=city>\n\n <b>"x"\\\n</b>\n\n</parameter>\n</function>\n</tool_call>\nOk',
        "\nOk",
        [("f", json.dumps({"city": '\n <b>"x"\\\n</b>\n'}))],
    ),
    (
        "coder",
        "<function=f>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>",
        "",
        [("f", '{"city": "x"}')],
    ),
    ("coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
    ("coder", "<tool_call>\n<function=f>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>", "",
     [("f", '{"days": "many"}')]),
    (
        "llama",
        '{"name": "f", "parameters": {"days": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    ("llama", '<|python_tag|>{"type": "function", "name": "g", "parameters": {}}', "", [("g", "{}")]),
    ("llama", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    (
        "mistral",
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"days": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        "Well.",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"days": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    ("mistral-args", '[TOOL_CALLS]f[ARGS]{"days": 1}', "", [("f", '{"days": 1}')]),
    ("mistral-args", '[TOOL_CALLS][{"name": "f", "arguments": {"days": 1}}]', "", [("f", '{"days": 1}')]),
    ("mistral-args", '[TOOL_CALLS]get.it_now-2{"a": 1}', "", [("get.it_now-2", '{"a": 1}')]),
    (
        "lfm",
        '<|tool_call_start|>[f(days=1, city="a, (b)", deep={"k": True}, any=None), g()]<|tool_call_end|>Done',
        "Done",
        [("f", '{"days": 1, "city": "a, (b)", "deep": {"k": true}, "any": null}'), ("g", "{}")],
    ),
    (
        "lfm",
        "<|tool_call_start|>[f('it\\'s', days=-2.5, any=__import__('os'))]<|tool_call_end|>",
        "",
        [("f", '{"city": "it\'s", "days": -2.5, "any": "__import__(\'os\')"}')],
    ),
    ("lfm", '<|tool_call_start|>f(days=1)<|tool_call_end|>', "", [("f", '{"days": 1}')]),
    (
        "glm",
        "<tool_call>f\n<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n<arg_key>city</arg_key>\n"
        "<arg_value>x y</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        "",
        [("f", '{"days": 1, "city": "x y"}'), ("g", "{}")],
    ),
    ("glm", "<tool_call>f<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>", "", [("f", '{"days": 1}')]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"days\": 1}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    (
        "command",
        'Action: ```json\n[\n    {"tool_name": "f", "parameters": {"days": 1}},\n    {"tool_name": "g", "parameters": {}}\n]```',
        "",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    (
        "gemma",
        '<|tool_call>call:f{days:1,city:<|"|>a, {b}: "c"<|"|>,deep:{k:true,list:[1,<|"|>x<|"|>]}}<tool_call|><|tool_call>call:g{}<tool_call|>',
        "",
        [("f", '{"days": 1, "city": "a, {b}: \\"c\\"", "deep": {"k": true, "list": [1, "x"]}}'), ("g", "{}")],
    ),
    ("command", 'Action: ```json\n[{"f": {"days": 1}}]\n```', "", [("f", '{"days": 1}')]),
    ("functools", 'functools[{"name": "f", "arguments": {"days": 1}}]', "", [("f", '{"days": 1}')]),
    (
        "apriel",
        '<tool_calls>[{"name": "f", "arguments": {"days": 1}, "id": "x"}, {"name": "g", "arguments": {}}]</tool_calls>',
        "",
        [("f", '{"days": 1}'), ("g", "{}")],
    ),
    # ---- what small models write, and what is no call ----
    ("hermes", "", "", []),
    ("hermes", "  \n", "  \n", []),
    ("hermes", f"Let me see.\n\n{TAGGED}\n", "Let me see.", [F]),
    ("hermes", f"{TAGGED}\n{TAGGED}", "", [F, F]),
    ("hermes", f"{TAGGED}\ndone", "\ndone", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": "a </tool_call> \\" b"}}</tool_call>', "",
     [("g", '{"x": "a </tool_call> \\" b"}')]),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}', "", [F]),
    ("hermes", '{{"name": "f", "arguments": {"a": 1}}}', "", [F]),
    ("hermes", '```json\n{\n "name": "f",\n "arguments": {"a": 1}\n}\n```', "", [F]),
    ("hermes", '<tools>\n{"name": "f", "arguments": {"a": 1}}\n</tools>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "", [("f", '{"a": NaN}')]),
    ("hermes", f"<tool_call>oops</tool_call> {TAGGED}", "<tool_call>oops</tool_call>", [F]),
    *(("hermes", text, text, []) for text in (
        '[{"name": "f", "arguments": {"a": 1}}]', '{"name": "h", "arguments": {}}', '{"x": 1}', "```python\nf()\n```",
        "a < b <tool", "<tool_call>nonsense</tool_call>!", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    )),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "said", "calls"), CALLS)
def test_calls_in_the_familys_own_form(family: str, text: str, said: str, calls: list[tuple[str, str]]):
    found = read(text, AnswerForm(FUNCTIONS, FORMS[family]))
    assert (found.said, found.calls, found.complete) == (said, calls, True)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [True, False])
def test_what_the_template_itself_writes_is_read(family: str, known: bool):
    """The samples, with other names and values: also where nothing is known of the model."""
    samples = TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>")).samples
    assert samples and samples.bare
    text = samples.one.replace("probe_alpha", "f").replace("key_one", "city").replace("key_two", "any")
    if family == "llama" and not known:
        text = "<|python_tag|>" + text
    if family == "functools" and not known:
        pytest.skip("no marker but a word")
    found = read(text, AnswerForm(FUNCTIONS, FORMS[family] if known else None))
    assert found.calls == [("f", '{"city": "value one", "any": "value two"}')] and found.said == ""
    assert read(samples.bare.replace("probe_alpha", "g"), AnswerForm(FUNCTIONS, FORMS[family])).calls == [
        ("g", "{}")
    ]


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, text, _, calls in CALLS if calls])
def test_nothing_of_a_call_is_text_wherever_it_is_cut(family: str, text: str):
    expected = AnswerForm(FUNCTIONS, FORMS[family])
    whole = Read([text], expected)
    for n in range(len(text)):
        so_far = AnswerReader(expected).feed(text[:n])
        said = "".join(text[part.start : part.end] for part in so_far if isinstance(part, PlainText))
        assert whole.said.startswith(said)
        calls = [(part.name, part.arguments) for part in so_far if isinstance(part, ReadCall)]
        assert calls == whole.calls[: len(calls)]


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Par', [("f", '{"city": "Par')]),
        ("coder", "<tool_call>\n<function=f>\n<parameter=city>\nPar", [("f", '{"city": "Par')]),
        ("llama", '{"name": "f", "parameters": {"city": "Par', [("f", '{"city": "Par')]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Par', [("f", '{"city": "Par')]),
        ("lfm", '<|tool_call_start|>[f(days=1, city="Par', [("f", '{"days": 1')]),
        ("glm", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Par", [("f", '{"city": "Par')]),
        ("gemma", '<|tool_call>call:f{days:1,city:<|"|>Par', [("f", '{"days": 1, "city": "Par')]),
    ],
)  # fmt: skip
def test_a_call_that_is_cut(family: str, text: str, calls: list[tuple[str, str]]):
    found = read(text, AnswerForm(FUNCTIONS, FORMS[family]))
    assert (found.said, found.calls, found.complete) == ("", calls, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_never_text_wherever_it_is_cut(family: str):
    samples = TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>")).samples
    assert samples
    text = samples.one.replace("probe_alpha", "f")
    for n in range(len(text)):
        found = Read([text[:n]], AnswerForm({"f": SCHEMA}, FORMS[family], forced=True))
        assert found.said == "" and [name for name, _ in found.calls] == ["f"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(data=st.data())
def test_nothing_is_lost_that_is_no_call(family: str, data: st.DataObject):
    form = FORMS[family]
    assert form
    parts = [
        *form.openers,
        *form.closers,
        form.after,
        '{"name": "f"',
        "f",
        "(",
        "{",
        "}",
        "[",
        " ",
        "\n",
        '"',
        "x",
        "<",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    found = Read([text], AnswerForm(FUNCTIONS, form))
    if not found.calls:
        assert found.said == text
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    assert (
        Read(pieces_of(text, sizes) if text else [""], AnswerForm(FUNCTIONS, form)).outcome == found.outcome
    )


THOUGHTS: list[tuple[str, bool, str, str, int]] = [
    ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", 0),
    ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes.", 0),
    ("<think>Hm.</think>Yes.", True, "Hm.", "Yes.", 0),
    ("Hm. <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n</think>\nNo.", True,
     "Hm. <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "No.", 0),
    ("<think>Hm.</think>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", False, "Hm.", "", 1),
    ("<think></think>\n\nYes.", False, "", "Yes.", 0),
    ("<think>never ends", False, "never ends", "", 0),
    ("Yes, it writes <think> first.", False, "", "Yes, it writes <think> first.", 0),
    ("  Yes.", False, "", "  Yes.", 0),
    ("a </think", True, "a </think", "", 0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "at_once", "thought", "said", "n_calls"), THOUGHTS)
def test_thoughts_are_kept_apart(text: str, at_once: bool, thought: str, said: str, n_calls: int):
    found = read(text, AnswerForm(FUNCTIONS, HERMES, THINK, thinks_at_once=at_once))
    assert (found.thought, found.said, len(found.calls)) == (thought, said, n_calls)


def test_a_model_that_knows_no_thoughts_writes_the_tags_as_text():
    text = "<think>Hm.</think>Yes."
    assert read(text, AnswerForm(FUNCTIONS, HERMES)).said == text


def test_text_is_not_held_longer_than_needed():
    reads = AnswerReader(AnswerForm({"f": {}}, HERMES))
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


def test_a_json_answer_is_not_held_back_as_a_possible_call():
    reader = AnswerReader(AnswerForm(FUNCTIONS, HERMES))
    assert list(reader.feed('{"city": "Par')), "its first key is none of a call"
    reader = AnswerReader(AnswerForm(FUNCTIONS, HERMES))
    assert list(reader.feed('{"name": "nobody", ')), "a function that nobody offered"
