"""Values of arguments that are not written as JSON: typed by the function's schema, or Python's literals."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from edgespec.decoding.json_schemas import target

_JSON_NAMES = {"true": True, "false": False, "null": None}
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def read_json(text: str) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON value of `text`. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python's reader accepts and JSON lacks."""
    raise ValueError(f"{constant} is not JSON")


def write_json(value: Any) -> str:  # noqa: ANN401 - JSON, or nearly
    """Return `value` as JSON text; values that JSON cannot express become strings."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_json)
    except (ValueError, TypeError):
        return json.dumps(str(value), ensure_ascii=False)


def _as_json(value: object) -> Any:  # noqa: ANN401 - JSON
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)


def is_text(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether `schema`, a part of `whole`, allows strings and nothing else."""
    return kinds(schema, whole) == {"string"}


def kinds(schema: Any, whole: Mapping[str, Any]) -> frozenset[str]:  # noqa: ANN401 - JSON
    """Return the JSON types that `schema` allows, as far as it names them; empty if it names none."""
    return frozenset(_kinds(schema, whole, 8))


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int) -> Iterator[str]:  # noqa: ANN401 - JSON
    if not isinstance(schema, dict) or not depth:
        return
    named = schema.get("type")
    if isinstance(named, str | list):
        yield from [named] if isinstance(named, str) else (one for one in named if isinstance(one, str))
        return
    for value in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]:
        yield kind_of(value)
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or []:
            yield from _kinds(part, whole, depth - 1)
    yield from _kinds(referenced(schema.get("$ref"), whole), whole, depth - 1)


def referenced(reference: object, whole: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the part of `whole` that a reference "#/..." points to; None if there is none."""
    return target(reference, whole) if str(reference).startswith("#") else None


def kind_of(value: object) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), "string")


def typed_json(text: str, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the JSON text of a value that was written without quotes, by the type that `schema` says.

    A text that is not of that type stays a string.
    """
    allowed = kinds(schema, whole)
    if allowed == {"string"}:
        return write_json(text)
    value = literal(text)
    kind = kind_of(value)
    if value is not _NOTHING and (kind in allowed or (kind == "integer" and "number" in allowed)):
        return write_json(value)
    if value is not _NOTHING and not allowed and kind != "string":
        return write_json(value)
    return write_json(text)


_NOTHING = object()


def literal(text: str) -> Any:  # noqa: ANN401 - a value
    """Return the value of a JSON or Python literal; `_NOTHING` if `text` is neither."""
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" is no mistake of ours
            tree = _Names().visit(ast.parse(text.strip(), mode="eval"))
            return ast.literal_eval(tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return _NOTHING


def literal_json(text: str) -> str:
    """Return a JSON or Python literal as JSON text; any other text as a string."""
    value = literal(text)
    return write_json(text.strip() if value is _NOTHING else value)


class _Names(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_NAMES:
            return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node)
        return node
