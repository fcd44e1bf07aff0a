"""Schemas in a JSON schema: what keywords hold, where references lead, which no value can match two of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_TABLE = """
enforced string  $ref format pattern
enforced list    enum required
enforced several allOf anyOf oneOf prefixItems
enforced one     additionalItems additionalProperties items
enforced named   patternProperties properties
enforced number  minimum exclusiveMinimum maximum exclusiveMaximum multipleOf
enforced count   maxItems maxLength maxProperties minItems minLength minProperties
enforced types   type
enforced any     const nullable
put      one     propertyNames unevaluatedItems unevaluatedProperties
put      named   dependencies dependentSchemas
put      object  dependentRequired
put      string  contentEncoding
not      one     contains contentSchema else if not then
not      any     $dynamicRef $recursiveRef contentMediaType maxContains minContains uniqueItems
says     named   $defs definitions
says     any     $anchor $comment $id $vocabulary default deprecated description discriminator example
says     any     enumDescriptions enumNames examples externalDocs id markdownDescription propertyOrder
says     any     readOnly title writeOnly xml
drop     any     $schema $dynamicAnchor $recursiveAnchor
"""
"""What becomes of keywords, and the form of their values: one schema, several, or those that have a name.

put: enforced where other keywords say the same, else named. not: not enforced, and named. says: nothing of
which values there are. drop: nothing either, but the library would refuse it, or not count other keywords.
"""
KEYWORDS = {word: line.split()[:2] for line in _TABLE.splitlines() for word in line.split()[2:]}
"""Keyword -> what becomes of it, and the form of its value."""


def kind_of(key: str) -> str:
    """Return what becomes of a keyword; "" where it is none."""
    return KEYWORDS.get(key, ("", ""))[0]


def form_of(key: str) -> str:
    """Return the form of a keyword's value; "" where it is none."""
    return KEYWORDS.get(key, ("", ""))[1]


def schemas(root: Any) -> Iterator[Schema]:  # noqa: ANN401 - JSON
    """Yield each schema in `root` once, also where only references lead."""
    waiting, seen = [root], set[int]()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        for key, value in schema.items():
            form = form_of(key)
            if form == "named" and isinstance(value, dict):
                waiting += value.values()
            elif form in ("one", "several"):
                waiting += value if isinstance(value, list) else [value]
            elif key == "$ref":
                waiting.append(target(value, root))


def target(ref: Any, root: Any) -> Any:  # noqa: ANN401 - JSON
    """The target of a reference by its path; None where that is not in `root`."""
    if not isinstance(ref, str) or ref.partition("#")[2].partition("/")[0]:
        return None
    found = root
    for step in ref.partition("#")[2].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


MOST_PARTS = 64


def parts_of(schema: Any, root: Schema) -> list[Schema]:  # noqa: ANN401 - JSON
    """Return schemas that each value of `schema` matches, MOST_PARTS of them at most."""
    waiting, parts = [schema], dict[int, Schema]()
    while waiting and len(parts) < MOST_PARTS:
        part = waiting.pop()
        part = {"type": []} if part is False else part
        if isinstance(part, dict) and id(part) not in parts:
            parts[id(part)] = part
            waiting += [target(part["$ref"], root)] if "$ref" in part else []
            waiting += part.get("allOf", [])
    return [*parts.values()]


# ---- schemas that no value can match two of: of those "oneOf" means the same as "anyOf" ----

_MOST_COMPARISONS, _MOST_DEPTH = 100_000, 16  # a second
_TYPES: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "number", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}


class Alternatives:
    """Schemas of which one is to match."""

    def __init__(self, alternatives: list[Any], root: Schema) -> None:
        """Look at `alternatives` of the schema `root`."""
        self._root, self._left = root, _MOST_COMPARISONS
        known = [parts_of(one, root) for one in alternatives]
        self.are_apart = all(self._excluded([*a, *b]) for n, a in enumerate(known) for b in known[:n])
        """Whether certainly no value matches two of them."""

    def _excluded(self, parts: list[Schema], depth: int = 0) -> bool:
        """Whether certainly no value matches all of `parts`."""
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            return False
        types, values = {*_TYPES.values()}, None
        for part in parts:
            if "type" in part:
                types &= {"number" if one == "integer" else one for one in types_of(part)}
            if "const" in part or "enum" in part:
                given = [part["const"]] if "const" in part else part["enum"]
                types &= {_TYPES[type(value)] for value in given}
                if not any(isinstance(value, (dict, list)) for value in given):
                    found = {(isinstance(value, bool), value) for value in given}
                    values = found if values is None else values & found
        if not types or values == set():
            return True
        inner = [[*self._properties(parts, name)] for name in _required(parts) if types == {"object"}]
        if any(self._excluded(one, depth + 1) for one in inner):
            return True
        for part in parts:
            others = [one for one in parts if one is not part]
            for choices in (part[key] for key in ("anyOf", "oneOf") if key in part):
                rest = [{key: value for key, value in part.items() if value is not choices}, *others]
                if all(self._excluded([*parts_of(one, self._root), *rest], depth + 1) for one in choices):
                    return True
        return False

    def _properties(self, parts: list[Schema], name: str) -> Iterator[Schema]:
        """Yield what the property called `name` must match, by all of `parts`."""
        for part in parts:
            others = True if "patternProperties" in part else part.get("additionalProperties", True)
            yield from parts_of(part.get("properties", {}).get(name, others), self._root)


def _required(parts: list[Schema]) -> set[str]:
    return {name for part in parts for name in part.get("required", ())}


def types_of(schema: Schema) -> list[str]:
    """Return the types that a schema names; [] where it names none."""
    given = schema.get("type", [])
    return [given] if isinstance(given, str) else given
