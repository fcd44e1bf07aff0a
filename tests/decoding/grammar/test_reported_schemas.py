"""Schemas that came back wrong from other engines, or from us, as users reported them: a row each.

`good` are texts that the schema describes, `bad` texts that it does not.
"""

from __future__ import annotations

import json

import pytest

from edgespec.decoding.grammars import Grammar
from matching import accepts


def text(**keywords):
    return {"type": "string", **keywords}


def record(required=None, **properties):
    return {"type": "object", "properties": properties, "required": required or [*properties]}


def matched(pattern, good, bad):
    """The row of a pattern, in an object."""
    return (
        record(s=text(pattern=pattern)),
        [json.dumps({"s": one}, ensure_ascii=False) for one in good],
        [json.dumps({"s": one}, ensure_ascii=False) for one in bad],
    )


CONFIG = {
    "$ref": "#/$defs/Config",
    "$defs": {"Config": record(level={"$ref": "#/$defs/Level"}), "Level": {"enum": ["low", "high"]}},
}
BESIDE = record(["repo"], repo=text(), number={"type": "integer"}, title=text())
EITHER = [{"required": ["number"]}, {"required": ["title"]}]

ROWS = {
    "1 alternatives with anchors": matched(
        "^open|closed$", ["open", "closed", "open it", "is closed"], ["reopen", "closed it", "x"]
    ),
    "1 an empty alternative": matched("^$|^[0-9]{5}$", ["", "12345"], ["1234", "123456", "x"]),
    "2 a reference at the top": (CONFIG, ['{"level":"high"}', '{"level":"low"}'], ["{}", '{"level":"x"}']),
    "3 anyOf beside properties": (
        {**BESIDE, "anyOf": EITHER},
        ['{"repo":"r","number":1}', '{"repo":"r","title":"t"}', '{"repo":"r","number":1,"title":"t"}'],
        ['{"repo":"r"}', '{"number":1}', '{"repo":1,"number":1}', '{"repo":"r","number":"1"}'],
    ),
    "3 oneOf beside properties": (
        {**BESIDE, "oneOf": EITHER},
        ['{"repo":"r","number":1}', '{"repo":"r","title":"t"}'],
        ['{"repo":"r"}', '{"number":1}', '{"repo":"r","title":2}'],
    ),
    "4 an object without properties": (
        {"type": "object", "properties": {}, "additionalProperties": False},
        ["{}"],
        ['{"a":1}', "[]"],
    ),
    "5 a property without a name": (
        record(**{"": {"type": "integer"}}),
        ['{"":3}'],
        ["true", "{}", '{"":"3"}'],
    ),
    "6 a lazy quantifier": matched("^a+?$", ["a", "aa"], ["", "b", "a?"]),
    "6 a lazy count": matched("^a{2}?$", ["aa"], ["a", "", "aaa"]),
    "6 an anchor in a group": matched("^(^a|b$)$", ["a", "b"], ["ab", ""]),
    "7 a group that captures nothing": matched("^(?:ab)+$", ["ab", "abab"], ["aba"]),
    "7 a pattern without anchors": matched(r"\S", ["x", " x "], ["", " "]),
    "7 all but line ends": matched(r"^[^\n]+$", ["ab c"], ["a\nb", ""]),
    "7 a character by its code": matched(r"^\u00e9$", ["é"], ["e", "u00e9"]),
    "7 a dollar sign": matched(r"^\d+\$$", ["12$"], ["12", "$"]),
    "7 a long text": (text(maxLength=5000), ['"a"', f'"{"a" * 5000}"'], [f'"{"a" * 5001}"']),
    "7 a long list": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 3000},
        ["[]", "[1,2]", f"[{','.join(['1'] * 300)}]"],
        ['["a"]', "[1,]"],
    ),
    "7 a tuple of draft-07": (
        {"type": "array", "items": [text(), {"type": "integer"}], "additionalItems": False, "minItems": 2},
        ['["a",1]'],
        ['["a"]', '[1,"a"]', '["a",1,2]'],
    ),
    "7 a property called $ref": (record(**{"$ref": text()}), ['{"$ref":"x"}'], ["{}", '{"$ref":1}']),
    "7 allOf of strings": (
        {"allOf": [text(), {"minLength": 2}, {"maxLength": 3}]},
        ['"ab"', '"abc"'],
        ['"a"', '"abcd"', "12"],
    ),
    "7 allOf that narrows a property twice": (
        {"allOf": [record(n={"type": "integer", "minimum": 3}), record(n={"type": "integer", "maximum": 5})]},
        ['{"n":3}', '{"n":5}'],
        ['{"n":2}', '{"n":6}', "{}"],
    ),
    "8 bounds of a number": (
        record(rating={"type": "integer", "minimum": 1, "maximum": 5}),
        ['{"rating":1}', '{"rating":5}'],
        ['{"rating":0}', '{"rating":92}', '{"rating":"3"}'],
    ),
}


def spaced(text):
    """A JSON text as edgespec writes it; what is no JSON as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except ValueError:
        return text


@pytest.mark.parametrize("row", ROWS)
def test_a_reported_schema_holds(tiny_target, row):
    schema, good, bad = ROWS[row]
    grammar = Grammar.from_json_schema(tiny_target, schema)
    assert [one for one in good if not accepts(grammar, spaced(one))] == []
    assert [one for one in bad if accepts(grammar, spaced(one))] == []
