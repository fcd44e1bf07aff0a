"""Which schemas no value can match two of: of those "oneOf" means the same as "anyOf"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Follow = Callable[[Any], Any]
"""Returns what a reference points to."""

MOST_PARTS = 64
_MOST = 100_000  # comparisons, half a second; 300 objects that a constant tells apart take as many


@dataclass(slots=True)
class _Known:
    """Facts about the values that match a schema; None: nothing is known."""

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
    left = iter(range(_MOST))

    def apart(a: _Known, b: _Known) -> bool:
        if next(left, None) is None:
            return False
        if a.types is not None and b.types is not None and not a.types & b.types:
            return True
        if a.values is not None and b.values is not None and not a.values & b.values:
            return True
        if {"object"} in (a.types, b.types):
            for name in (a.required | b.required) & a.properties.keys() & b.properties.keys():
                if apart(*(_known({"allOf": one.properties[name]}, follow) for one in (a, b))):
                    return True
        return any(
            all(apart(_known(part, follow), other) for part in parts)
            for one, other in ((a, b), (b, a))
            for parts in one.choices
        )

    known = [_known(one, follow) for one in schemas]
    return all(apart(one, other) for n, one in enumerate(known) for other in known[:n])


def _known(schema: Any, follow: Follow) -> _Known:  # noqa: ANN401 - JSON
    known = _Known()
    for part in parts_of(schema, follow):
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


def parts_of(schema: Any, follow: Follow) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - JSON
    """Yield schemas that each value of `schema` matches, MOST_PARTS of them at most."""
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MOST_PARTS:
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
