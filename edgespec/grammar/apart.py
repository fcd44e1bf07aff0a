"""Which schemas no value can match two of: of those "oneOf" means the same as "anyOf"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Follow = Callable[[Any], Any]
"""Returns what a reference points to."""

_MOST = 100  # schemas, each compared with each
_DEEPEST = 8  # properties of properties


@dataclass(slots=True)
class _Known:
    """What is known of the values that match a schema; None: nothing."""

    types: set[str] | None = None
    values: set[tuple[str, Any]] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    choices: list[list[Any]] = field(default_factory=list)

    def has(self, *, types: set[str] | None = None, values: set[tuple[str, Any]] | None = None) -> None:
        """Keep what is in `types` and `values` only."""
        if types is not None:
            self.types = types if self.types is None else self.types & types
        if values is not None:
            self.values = values if self.values is None else self.values & values


def are_apart(schemas: Sequence[Any], follow: Follow) -> bool:
    """Return whether certainly no value matches two of `schemas`."""
    return len(schemas) <= _MOST and all(
        _apart(one, other, follow, 0) for n, one in enumerate(schemas) for other in schemas[:n]
    )


def _apart(one: Any, other: Any, follow: Follow, depth: int) -> bool:  # noqa: ANN401 - JSON
    if depth > _DEEPEST:
        return False
    a, b = _known(one, follow), _known(other, follow)
    if a.types is not None and b.types is not None and not a.types & b.types:
        return True
    if a.values is not None and b.values is not None and not a.values & b.values:
        return True
    if {"object"} in (a.types, b.types):
        for name in (a.required | b.required) & a.properties.keys() & b.properties.keys():
            if _apart({"allOf": a.properties[name]}, {"allOf": b.properties[name]}, follow, depth + 1):
                return True
    return any(all(_apart(part, other, follow, depth + 1) for part in parts) for parts in a.choices) or any(
        all(_apart(one, part, follow, depth + 1) for part in parts) for parts in b.choices
    )


def _known(schema: Any, follow: Follow) -> _Known:  # noqa: ANN401 - JSON
    known = _Known()
    for part in _parts(schema, follow):
        types = part.get("type")
        if types is not None:
            each = {types} if isinstance(types, str) else {*types}
            known.has(types=each | {"integer"} if "number" in each else each)
        given = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(given, list) and not any(isinstance(value, (dict, list)) for value in given):
            values = {_value(value) for value in given}
            kinds = {kind for kind, _ in values}
            known.has(types=kinds | {"integer"} if "number" in kinds else kinds, values=values)
        known.required.update(part.get("required", ()))
        for name, value in part.get("properties", {}).items():
            known.properties.setdefault(name, []).append(value)
        known.choices += [part[key] for key in ("anyOf", "oneOf") if key in part]
    return known


def _parts(schema: Any, follow: Follow) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Yield the schemas that each value of `schema` matches."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [follow(part["$ref"])] if "$ref" in part else []
            waiting += part.get("allOf", [])


def _value(value: Any) -> tuple[str, Any]:  # noqa: ANN401 - JSON
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "boolean", value
    return ("string", value) if isinstance(value, str) else ("number", value)
