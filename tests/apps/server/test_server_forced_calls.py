"""Forced calls: a grammar in the model's own form, whose texts are calls that fit the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import llguidance.numpy
import pytest

from chat_templates import FAMILIES
from edgespec.apps.server.chat_prompts import choose_form
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm, AnswerReader, ThoughtText
from edgespec.apps.server.tool_calls.call_forms import HERMES, CallForm, TemplateTraits
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.apps.server.tool_calls.forced_grammar import (
    ForcedCalls,
    after_thought,
    arguments_schema,
    forced_calls,
    unenforced_parts,
)
from edgespec.decoding.grammars import GrammarSource
from edgespec.errors import UsageError
from edgespec.llama.chat_template import ChatTemplate
from matching import verdicts
from schema_corpus import generators, models, tools

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
        "unit": {"enum": ["c", "f"]},
        "sure": {"type": "boolean"},
        "where": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "unit"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "now": {}, "today": {"type": "object", "properties": {}}}
TOKENIZER = llguidance.LLTokenizer("byte")


def no_token(_text: str) -> None:
    return None


def form_of(family: str) -> CallForm:
    form = choose_form(TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>")))
    assert form
    return form


def walk(compiled: str, seed: int, most: int = 1500, *, whole: bool = True) -> str:
    """Return a random text of a grammar, which prefers what ends it; "" if it need not be `whole`."""
    matcher = llguidance.LLMatcher(TOKENIZER, compiled)
    assert not matcher.is_error(), matcher.get_error()
    rng = random.Random(seed)
    mask = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    text = bytearray()
    while not matcher.is_stopped() and len(text) < most:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [i for i in range(128) if mask[0][i // 32] >> (i % 32) & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5):
            break
        allowed = (
            [i for i in allowed if 32 <= i < 127 or i == 10]
            or allowed
            or [i for i in range(128, 256) if mask[0][i // 32] >> (i % 32) & 1]
        )
        closers = [i for i in allowed if chr(i) in '"<}]'] or allowed
        text.append(rng.choice(closers if rng.random() < 0.4 else allowed))
        assert matcher.consume_token(text[-1]), matcher.get_error()
    assert matcher.is_accepting() or not whole, bytes(text)
    return text.decode() if matcher.is_accepting() else ""


def read(text: str, form: CallForm, **fields: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Return what is said and what is called, with the arguments as objects."""
    reader = AnswerReader(AnswerForm(FUNCTIONS, form, **fields))
    said, calls = "", []
    for part in [*reader.feed(text), *reader.finish()]:
        if isinstance(part, ReadCall):
            assert part.complete
            calls.append((part.name, part.arguments))
        elif not isinstance(part, ThoughtText):
            said += text[part.start : part.end]
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def check(name: str, arguments: dict[str, Any]) -> None:
    if name != "get_weather":
        assert arguments == {}
        return
    assert {"city", "unit"} <= {*arguments} <= {*WEATHER["properties"]}
    assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 9
    assert arguments["unit"] in ("c", "f")
    assert arguments.get("days", 1) in range(1, 6)
    assert arguments.get("sure", True) in (True, False)
    assert isinstance(arguments.get("where", {"x": 1})["x"], int)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_in_the_familys_form_and_fit_the_schema(family: str):
    form, names = form_of(family), set()
    lark = forced_calls(ForcedCalls(form, FUNCTIONS), no_token)
    several = forced_calls(ForcedCalls(form, FUNCTIONS, many=True), no_token)
    for seed in range(12):
        said, calls = read(walk(GrammarSource.lark(lark, "tools").compiled, seed), form, forced=True)
        assert said == "" and len(calls) == 1
        _, more = read(walk(GrammarSource.lark(several, "tools").compiled, seed), form, forced=True)
        for name, arguments in [*calls, *more]:
            check(name, arguments)
            names.add(name)
    assert names == {*FUNCTIONS}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_what_the_template_writes(family: str):
    """The grammar takes the template's own text of a call, so that the model writes what it has learnt."""
    traits = TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>"))
    assert traits.samples
    properties = {key: {"type": "string"} for key in ("key_one", "key_two")}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    functions = {"probe_alpha": schema, "probe_beta": schema, "bare": {}}
    lark = forced_calls(ForcedCalls(form_of(family), functions, many=True), no_token)
    texts = [traits.samples.one, (traits.samples.bare or "").replace("probe_alpha", "bare")]
    if traits.samples.two:
        texts.append(traits.samples.two)
    assert (traits.samples.two is None) is (family == "llama")
    for text in texts:
        matcher = llguidance.LLMatcher(TOKENIZER, lark)
        assert matcher.try_consume_tokens([*text.encode()]) == len(text.encode()), text
        assert matcher.is_accepting()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_or_an_answer_in_a_format(family: str):
    form = form_of(family)
    schema = {"type": "object", "properties": {"name": {"enum": ["x"]}}, "required": ["name"]}
    answer = GrammarSource.json_schema(schema, "response_format")
    source = answer.inside(forced_calls(ForcedCalls(form, FUNCTIONS, otherwise=True), no_token))
    outcomes = set()
    for seed in range(16):
        said, calls = read(walk(source.compiled, seed), form)
        assert bool(said) is not bool(calls)
        assert not said or json.loads(said) == {"name": "x"}
        for name, arguments in calls:
            check(name, arguments)
        outcomes.add(bool(calls))
    if family != "functools":
        assert outcomes == {True, False}


def test_a_thought_that_the_prompt_has_begun_comes_first():
    thinking = ("<think>", "</think>")
    lark = forced_calls(ForcedCalls(HERMES, FUNCTIONS, thought_end="</think>"), no_token)
    for seed in range(4):
        text = "Hm, <tool_call>!" + "</think>\n\n"
        matcher = llguidance.LLMatcher(TOKENIZER, lark)
        assert matcher.try_consume_tokens([*text.encode()]) == len(text)
        whole = text + walk(forced_calls(ForcedCalls(HERMES, FUNCTIONS), no_token), seed)
        assert read(whole, HERMES, thinking=thinking, thinks_at_once=True)[0] == ""
        assert llguidance.LLMatcher(TOKENIZER, lark).try_consume_tokens([*whole.encode()]) == len(
            whole.encode()
        )
    answer = GrammarSource.json_schema({"type": "object", "properties": {}}, "response_format")
    after = answer.inside(after_thought("</think>", no_token)).compiled
    for text, accepts in (("Hm.</think>\n\n{}", True), ("{}", False), ("</think>{}", True)):
        matcher = llguidance.LLMatcher(TOKENIZER, after)
        assert matcher.try_consume_tokens([*text.encode()]) == len(text)
        assert matcher.is_accepting() is accepts


def test_markers_that_are_control_tokens_are_tokens_of_the_grammar():
    lark = forced_calls(
        ForcedCalls(form_of("lfm"), {"now": {}}), {"<|tool_call_start|>": 300, "<|tool_call_end|>": 301}.get
    )
    assert lark.splitlines()[0] == 'start: <[300]> "[" call  ")]" <[301]>'
    assert "<[7]>" in after_thought("</think>", {"</think>": 7}.get)


@pytest.mark.parametrize(
    ("parameters", "made"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": ["object", "null"]}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object", "additionalProperties": True}, {"type": "object", "additionalProperties": True}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {}}},
            {"type": "object", "$ref": "#/$defs/A", "$defs": {"A": {}}},
        ),
    ],
)
def test_a_function_without_parameters_takes_none(parameters: dict[str, Any] | None, made: dict[str, Any]):
    assert arguments_schema(parameters) == made


def test_a_schema_that_no_grammar_can_hold_is_named():
    with pytest.raises(UsageError) as caught:
        forced_calls(
            ForcedCalls(HERMES, {"f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}}),
            no_token,
        )
    assert caught.value.field == "tools"


LOOSE = {
    "type": "object",
    "properties": {
        "when": {"type": "string", "format": "date", "pattern": "^2"},
        "how": {"type": "string", "enum": ["a"], "pattern": "a"},
        "n": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "path": {"type": "string", "format": "path"},
    },
    "anyOf": [{"required": ["when"]}, {"required": ["n"]}],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_call_is_not_held_to_is_named(family: str):
    form = form_of(family)
    told = unenforced_parts(ForcedCalls(form, {"f": LOOSE, **FUNCTIONS}))
    wanted = ["uniqueItems", '"format": "path"']
    if form.keyed:
        wanted += ['"anyOf" beside properties']
        if not form.keyed.quoted:
            wanted += ['"format" of when', '"pattern" of when', '"format" of path']
    assert [word for word in wanted if not any(word in line for line in told)] == []
    assert len(told) == len(wanted)
    assert all(line.endswith("(arguments of f)") for line in told)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_by_reference_is_that_of_the_arguments(family: str):
    form = form_of(family)
    functions = {
        "get_weather": {"$ref": "#/$defs/Weather", "$defs": {**WEATHER["$defs"], "Weather": WEATHER}}
    }
    assert unenforced_parts(ForcedCalls(form, functions)) == ()
    for seed in range(4):
        text = walk(
            GrammarSource.lark(forced_calls(ForcedCalls(form, functions), no_token), "tools").compiled, seed
        )
        (_, [(name, arguments)]) = read(text, form, forced=True)
        check(name, arguments)


MADE = [row for row in (*tools.ROWS, *generators.ROWS, *models.rows()) if isinstance(row.yes[0], dict)]
CORPUS = [row for row in MADE if not (row.unenforced or row.is_openapi or "'number'" in str(row.schema))]


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_fit_the_schemas_that_clients_send(family: str):
    """A family has a third of the schemas, and each schema a third of the families."""
    form = form_of(family)
    for row in CORPUS[[*FAMILIES].index(family) % 3 :: 3]:
        functions = {"f": row.schema}
        forced = ForcedCalls(form, functions)
        compiled = GrammarSource.lark(forced_calls(forced, no_token), "tools").compiled
        text = walk(compiled, 1, whole=False)
        reader = AnswerReader(AnswerForm(functions, form, forced=True))
        calls = [part for part in [*reader.feed(text), *reader.finish()] if isinstance(part, ReadCall)]
        arguments = "".join(call.arguments for call in calls)
        if text and not unenforced_parts(forced):
            assert all(verdicts(row.schema, json.loads(arguments))), (row.name, text, arguments)
