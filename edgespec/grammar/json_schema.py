"""JSON schemas as llguidance takes them: objects have only the properties that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from llguidance import LLMatcher

from edgespec.errors import UsageError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Schema = Mapping[str, Any]

_COMPACT: JsonCompileOptions = {"whitespace_flexible": False}
"""No white space between values; a schema's own "x-guidance" may ask for some."""

_PARTS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "not", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", *_PARTS)
_DATA = ("const", "enum", "default", "examples")


def from_schema(schema: str | Schema, *, lenient: bool) -> str:
    """Return llguidance's grammar of the JSON values that `schema` describes, written without white space.

    An object has other properties than it names only where the schema says so ("additionalProperties"), or
    where it is made of several schemas. `lenient` leaves out what cannot be enforced. Raises UsageError,
    without the name of a file, if the schema is no JSON.
    """
    try:
        given = json.loads(schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False))
        if given is True:
            given = {}
        if not isinstance(given, dict):
            raise UsageError("a schema must be a JSON object")
        combined = {id(part) for one in _schemas(given) for part in _combined(one, given)}
        for one in [*_schemas(given)]:
            if "properties" in one and id(one) not in combined and not any(key in one for key in _OPEN):
                one["additionalProperties"] = False
        overrides: JsonCompileOptions = {"lenient": lenient, "coerce_one_of": lenient}
        return LLMatcher.grammar_from_json_schema(given, defaults=_COMPACT, overrides=overrides)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError("the schema is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"no JSON schema: {' '.join(str(error).split())[:160]}") from None


def _schemas(value: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Yield `value` and what is in it, wherever a schema may stand."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key not in _DATA:
                yield from _schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _schemas(inner)


def _combined(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas that must hold beside others, so that none of them names all properties."""
    parts = [key for key in _PARTS if key in schema]
    if parts and ("allOf" in schema or "properties" in schema or len(parts) > 1):
        waiting = [schema[key] for key in parts]
        seen: set[int] = set()
        while waiting:
            part = waiting.pop()
            if isinstance(part, str):
                part = _target(part, root)
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            inner = [part[key] for key in _PARTS if key in part] if isinstance(part, dict) else part
            waiting += inner if isinstance(inner, list) else []


def _target(ref: str, root: Any) -> Any:  # noqa: ANN401 - JSON
    """Return what a reference points to; None where that is not in this schema."""
    target = root
    for step in ref.partition("#")[2].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    return target
