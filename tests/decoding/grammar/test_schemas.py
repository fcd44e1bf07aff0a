"""JSON schemas of many makers: what their grammars allow, told by hand and by two validators."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema_specifications import REGISTRY as SPECIFICATIONS

from edgespec import Engine, SamplingParams
from edgespec.decoding.grammars import Grammar
from edgespec.errors import UsageError
from edgespec.models.registry import load_registry
from matching import accepts, read, verdicts, walk
from schema_corpus import Row, Text, rows, written

ROWS = rows()
PLAIN = [row for row in ROWS if not row.unenforced and not row.is_openapi]
WALKS = 3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_values_that_match_are_allowed_and_no_others(tiny_target, row: Row):
    grammar = Grammar.from_json_schema(tiny_target, row.schema)
    assert [text for text in row.texts(row.yes) if not accepts(grammar, text)] == []
    assert [text for text in row.texts(row.no) if accepts(grammar, text)] == []
    assert row.unenforced in " ".join(grammar.warnings)
    assert bool(row.unenforced) == bool(grammar.warnings), grammar.warnings


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_random_texts_match(tiny_target, row: Row):
    grammar = Grammar.from_json_schema(tiny_target, row.schema)
    texts = [text for seed in range(WALKS) if (text := walk(grammar, seed)) is not None]
    values = [read(text) for text in texts]
    assert [value for value in values if not all(verdicts(row.schema, value))] == []
    assert [one for one in row.yes if not isinstance(one, Text) and not all(verdicts(row.schema, one))] == []


# ---- the real models ----


@pytest.fixture(scope="module")
def engine(pair):
    with Engine(pair[0], load_registry().pairs["default"].draft) as engine:
        yield engine


SAMPLE = [row for row in PLAIN if "object" in str(row.schema)][1::9]


@pytest.mark.pair
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_what_a_model_writes_matches(engine, row: Row):
    grammar = Grammar.from_json_schema(engine.target, row.schema)
    prompt = f"Write an example of this JSON schema:\n{json.dumps(row.schema)}"
    result = engine.generate(
        prompt, params=SamplingParams(temperature=1.0), seed=len(prompt), n_predict=56, grammar=grammar
    )
    if result.stop_reason == "eog":
        assert all(verdicts(row.schema, read(result.text))), result.text
    else:
        with grammar.begin() as constraint:
            assert constraint.fitting((), result.token_ids) == len(result.token_ids) == 56


# ---- each keyword ----

VOCABULARIES = [
    f"https://json-schema.org/draft/{draft}/meta/{part}"
    for draft in ("2019-09", "2020-12")
    for part in ("core", "applicator", "validation", "meta-data", "content")
]
METASCHEMAS = [
    "http://json-schema.org/draft-04/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    *VOCABULARIES,
    "https://json-schema.org/draft/2019-09/meta/format",
    "https://json-schema.org/draft/2020-12/meta/format-annotation",
    "https://json-schema.org/draft/2020-12/meta/unevaluated",
]
ENFORCED = {  # a schema, and what it forbids
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, 1),
    "additionalItems": ({"type": "array", "items": [{}], "additionalItems": {"type": "null"}}, [1, 1]),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "null"}}, {"a": 1}),
    "allOf": ({"allOf": [{"type": "null"}]}, 1),
    "anyOf": ({"anyOf": [{"type": "null"}]}, 1),
    "const": ({"const": 2}, 1),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "a"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    "enum": ({"enum": [2]}, 1),
    "exclusiveMaximum": ({"exclusiveMaximum": 1}, 1),
    "exclusiveMinimum": ({"exclusiveMinimum": 1}, 1),
    "format": ({"type": "string", "format": "date"}, "a"),
    "items": ({"type": "array", "items": {"type": "null"}}, [1]),
    "maximum": ({"maximum": 1}, 2),
    "maxItems": ({"type": "array", "maxItems": 1}, [1, 1]),
    "maxLength": ({"type": "string", "maxLength": 1}, "ab"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 1}),
    "minimum": ({"minimum": 2}, 1),
    "minItems": ({"type": "array", "minItems": 1}, []),
    "minLength": ({"type": "string", "minLength": 1}, ""),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "multipleOf": ({"multipleOf": 2}, 1),
    "oneOf": ({"oneOf": [{"type": "null"}, {"type": "string"}]}, 1),
    "pattern": ({"type": "string", "pattern": "b"}, "a"),
    "patternProperties": ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, {"a": 1}),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "null"}]}, [1]),
    "properties": ({"type": "object", "properties": {"a": {"type": "null"}}}, {"a": 1}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^b"}}, {"a": 1}),
    "required": ({"type": "object", "required": ["a"]}, {}),
    "type": ({"type": "null"}, 1),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": {"type": "null"}}, [1]),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": {"type": "null"}}, {"a": 1}),
}  # fmt: skip
PARTLY = {  # where the same words are too much, and what is said of it
    "minProperties": {"type": "object", "minProperties": 2},
    "maxProperties": {
        "type": "object",
        "properties": {"a": {}},
        "maxProperties": 1,
        "additionalProperties": True,
    },
    "oneOf": {"oneOf": [{"minimum": 2}, {"maximum": 3}]},
    r"\bword": {"type": "string", "pattern": r"\bword\b"},
    "(?=a)": {"type": "object", "patternProperties": {"(?=a)": {}}},
    "propertyNames": {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 1}},
    '"regex"': {"type": "string", "format": "regex"},
    "unevaluatedProperties": {"anyOf": [{"required": ["a"]}], "unevaluatedProperties": False},
    '"minimum"': {"type": "integer", "minimum": 1e19},
    "nulable": {"type": "string", "nulable": True},
    "contentEncoding": {"type": "string", "contentEncoding": "7bit"},
    "dependentRequired": {"type": "object", "dependentRequired": {f"p{n}": ["a"] for n in range(7)}},
}
NAMED = {
    "$dynamicRef": {"$dynamicRef": "#a", "$dynamicAnchor": "a"},
    "$recursiveRef": {"type": "array", "items": {"$recursiveRef": "#"}},
    "contains": {"type": "array", "contains": {}},
    "contentMediaType": {"type": "string", "contentMediaType": "text/html"},
    "contentSchema": {"type": "string", "contentSchema": {"type": "object"}},
    "else": {"if": {"type": "null"}, "else": {"type": "string"}},
    "if": {"if": {"type": "null"}, "then": False},
    "maxContains": {"type": "array", "contains": {}, "maxContains": 1},
    "minContains": {"type": "array", "contains": {}, "minContains": 1},
    "not": {"not": {"type": "null"}},
    "then": {"if": {"type": "null"}, "then": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
}
SAYING_NOTHING = [
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$id",
    "$recursiveAnchor",
    "$schema",
    "$vocabulary",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
]


def metaschema_words():
    return {word for uri in METASCHEMAS for word in SPECIFICATIONS.contents(uri)["properties"]}


def test_each_keyword_is_enforced_or_named_or_says_nothing():
    known = {*ENFORCED, *NAMED, *SAYING_NOTHING}
    assert metaschema_words() == known


@pytest.mark.parametrize("word", sorted(ENFORCED))
def test_a_keyword_is_enforced(tiny_target, word):
    schema, forbidden = ENFORCED[word]
    grammar = Grammar.from_json_schema(tiny_target, schema, strict=True)
    assert grammar.warnings == ()
    assert not accepts(grammar, written(forbidden))
    assert accepts(Grammar.from_json_schema(tiny_target, without(schema, word)), written(forbidden))


@pytest.mark.parametrize("draft", ["", *METASCHEMAS[:3], "https://json-schema.org/draft/2019-09/schema"])
@pytest.mark.parametrize("schema", [*NAMED.items(), *PARTLY.items()], ids=lambda item: item[0])
def test_a_keyword_that_is_not_enforced_is_named(tiny_target, schema, draft):
    """Whether or not it is a word of the draft that the schema names."""
    word, asked = schema
    if draft:
        asked = {"$schema": draft, **asked}
    grammar = Grammar.from_json_schema(tiny_target, asked)
    assert word in " ".join(grammar.warnings)
    if word in asked and asked[word] is not True:
        assert f'"{word}": {json.dumps(asked[word])[:50]}' in " ".join(grammar.warnings)
    with pytest.raises(UsageError, match="cannot be enforced"):
        Grammar.from_json_schema(tiny_target, asked, strict=True)


CLOSED = {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
COUNTED = [
    {"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 3, "additionalProperties": True},
    {"properties": {"a": {}}, "required": ["a"], "minProperties": 3},
    {"minProperties": 3},
    {"allOf": [{"properties": {"a": {}, "b": {}}}, {"minProperties": 3}]},
    {"allOf": [CLOSED, {"minProperties": 3}]},
]


@pytest.mark.parametrize("schema", COUNTED, ids=str)
def test_a_number_is_told_as_it_was_written(tiny_target, schema):
    """Not less the properties that are required, as the library counts."""
    try:
        said = Grammar.from_json_schema(tiny_target, {"type": "object", **schema}).warnings
    except UsageError as error:
        said = [str(error)]
    assert "minProperties" in " ".join(said)
    assert {*re.findall(r"minProperties\W+(\d+)", " ".join(said))} <= {"3"}


def without(schema, word):
    return {key: value for key, value in schema.items() if key != word}


@pytest.mark.parametrize("word", sorted(SAYING_NOTHING))
def test_an_annotation_is_passed_over(tiny_target, word):
    value = {} if word in ("$defs", "definitions", "$vocabulary") else "a"
    grammar = Grammar.from_json_schema(tiny_target, {"type": "integer", word: value}, strict=True)
    assert accepts(grammar, "1")
    assert not accepts(grammar, '"a"')


# ---- schemas that ask for too much ----

REFUSED = [
    ({"const": -(2**63) + 1}, "too large to be enforced exactly"),  # the library would end the process
    ({"enum": [{"a": [1e300]}]}, "too large to be enforced exactly"),
    ({"enum": {}}, '"enum" must be a list'),
    ({"required": True}, '"required" must be a list'),
    ({"type": ["integer", 3]}, '"type" and "required" hold strings'),
    ({"properties": {"a": {"$ref": 3}}}, '"$ref" must be a string'),
    ({"dependentRequired": []}, '"dependentRequired" must be an object'),
    ({"multipleOf": 0}, "invalid multiple of"),
    ({"not": {}, "enum": []}, "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=str)
def test_a_schema_is_refused_in_one_line(tiny_target, schema, reason):
    with pytest.raises(UsageError) as error:
        Grammar.from_json_schema(tiny_target, schema)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


LARGE = [
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    {"oneOf": [{"const": n} for n in range(400)]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in range(200)]},
    {"type": "array", "prefixItems": [{}] * 2000},
    {"type": "string", "minLength": 100_000},
    {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(1500)} | {"d1500": {}},
    },
]  # fmt: skip


@pytest.mark.parametrize("schema", LARGE, ids=lambda schema: str(schema)[:40])
def test_a_large_schema_is_enforced(tiny_target, schema):
    grammar = Grammar.from_json_schema(tiny_target, schema, strict=True)
    assert grammar.warnings == ()
    walk(grammar, 1, longest=20)
