"""JSON schemas as llguidance takes them: objects have only the properties that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from edgespec.decoding.json_schema.references import schemas, target
from edgespec.decoding.json_schema.words import Rewriting, escapes
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Schema = Mapping[str, Any]

_ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""A line as models write it: more of what is drafted is accepted, and answers are done sooner, than without
spaces. A schema's own "x-guidance" may ask for something else."""

_PARTS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "not", "dependentSchemas")
_NAMING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
_OPEN = (_NAMING | {*_PARTS}) - {"not"}  # which can name no property that there may be


def read_schema(schema: str | Schema) -> tuple[dict[str, Any], list[str]]:
    """Return `schema` in words that llguidance takes as meant, and what of it cannot be enforced.

    An object has other properties than it names only where the schema says so ("additionalProperties"), or
    where it is made of several schemas. Raises UsageError, without the name of a file, if it is no schema.
    """
    try:
        given = json.loads(schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False))
        if given is True:
            given = {}
        if not isinstance(given, dict):
            raise UsageError("a schema must be a JSON object")
        _close(given)
        return given, sorted(Rewriting(given).warnings)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError("the schema is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"no JSON schema: {' '.join(str(error).split())[:160]}") from None


def compiled(schema: dict[str, Any]) -> str:
    """Return llguidance's grammar of the JSON values that `schema` describes, written in one line.

    What it cannot enforce it leaves out, and says so. Raises UsageError for a schema nested too deeply.
    """
    overrides: JsonCompileOptions = {"lenient": True, "json_allowed_escapes": escapes(schema)}
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_ONE_LINE, overrides=overrides)
    except ValueError as error:
        raise UsageError(f"no JSON schema: {' '.join(str(error).split())[:160]}") from None


def _close(root: dict[str, Any]) -> None:
    every = [*schemas(root)]
    combined: set[int] = set()
    for one in every:
        _combine(one, root, combined)
    for one in every:
        if "properties" in one and id(one) not in combined and not _OPEN & one.keys():
            one["additionalProperties"] = False


def _combine(schema: dict[str, Any], root: dict[str, Any], combined: set[int]) -> None:
    """Add the schemas that must hold beside others to `combined`: none of them names all properties."""
    parts = [key for key in _PARTS if key in schema]
    if parts and ("allOf" in schema or "properties" in schema or len(parts) > 1):
        waiting = [schema[key] for key in parts if key != "dependentSchemas"]
        waiting += schema.get("dependentSchemas", {}).values()
        while waiting:
            part = waiting.pop()
            if isinstance(part, str):
                part = target(part, root)
            if id(part) not in combined:
                combined.add(id(part))
                inner = [part[key] for key in _PARTS if key in part] if isinstance(part, dict) else part
                waiting += inner if isinstance(inner, list) else []
