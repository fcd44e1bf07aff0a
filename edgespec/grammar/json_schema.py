"""Convert a JSON schema to a grammar, with llama-cpp-python's converter.

The schema is rewritten first, because the converter mistakes definitions for properties of the same name,
silently drops what is beside a `$ref` or a list of types, and takes `{}` for an object. Its rules are made
strict, because they allow raw control characters in a string and a quote in a pattern, and break on a
backslash in a name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from edgespec.errors import UsageError
from edgespec.llama import backend

Schema = dict[str, Any]

_ANY: Schema = {"type": "value"}  # the converter's own name for it
_NOTES = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "$schema", "$id", "$comment", "$anchor", "$defs", "definitions",
}  # fmt: skip
_OF_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": set(),
    "integer": set(),
    "boolean": set(),
    "null": set(),
}
_FORMATS = {"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"}

_CHAR = r'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])'
_DOT = r'[^"\\\x00-\x1F]'
_ESCAPED_ONLY = '"\\' + "".join(map(chr, range(32)))  # what a JSON string must escape

_PATTERN_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " "}


@dataclass(frozen=True)
class Converted:
    """A grammar for a schema."""

    text: str
    """In GBNF; the root rule is "root"."""
    ignored: tuple[str, ...]
    """Keywords of the schema that the grammar does not enforce, sorted."""


@dataclass
class _Ordering:
    """Rewrites one schema for the converter."""

    root: Schema
    prefix: str
    ignored: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)  # a $ref: its definition's name
    found: dict[str, Schema] = field(default_factory=dict)

    def schema(self, given: object) -> Schema:
        """Return `given` without anything that the converter would misread."""
        if given is True or given == {}:
            return _ANY
        if not isinstance(given, dict):
            raise UsageError(f"{_short(given)} where a schema should be")
        merged = self._merged(given) if "allOf" in given else given
        if "$ref" in merged:
            self._note(merged, {"$ref"})
            return {"$ref": self._reference(merged["$ref"])}
        for union in ("anyOf", "oneOf"):
            if union in merged:
                self._note(merged, {union})
                return {"anyOf": [self.schema(one) for one in _list(merged, union)]}
        if "const" in merged:
            self._note(merged, {"const", "type"})
            return {"const": merged["const"]}
        if "enum" in merged:
            self._note(merged, {"enum", "type"})
            return {"enum": _list(merged, "enum")}
        kind = merged.get("type") or next((k for k, own in _OF_TYPE.items() if own & merged.keys()), None)
        if kind is None:
            self._note(merged, set())
            return _ANY
        if isinstance(kind, list):
            self._note(merged, {"type"}.union(*(_OF_TYPE.get(str(one), ()) for one in kind)))
            return {"anyOf": [self._typed({**merged, "type": k}) for k in _list(merged, "type")]}
        self._note(merged, {"type", *_OF_TYPE.get(str(kind), ())})
        return self._typed({**merged, "type": kind})

    def _typed(self, given: Schema) -> Schema:
        kind = given["type"]
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise UsageError(f"the type {_short(kind)} is none of JSON's")
        own = {key: given[key] for key in _OF_TYPE[kind] if key in given}
        if kind == "object":
            return self._object(own)
        if kind == "array":
            return self._array(own)
        if kind == "string":
            return self._string(own)
        return {"type": kind}

    def _object(self, own: Schema) -> Schema:
        properties = own.get("properties", {})
        if not isinstance(properties, dict):
            raise UsageError("properties must be an object")
        made = {name: self.schema(one) for name, one in properties.items()}
        more = own.get("additionalProperties")
        required = _list(own, "required") if "required" in own else []
        for name in required:
            made.setdefault(name, _ANY if more in (None, True, False) else self.schema(more))
        if not made and more in (None, True):
            return {"type": "object"}
        result: Schema = {"type": "object", "properties": made, "required": required}
        result["additionalProperties"] = False if more in (None, False) else self.schema(more)
        return result

    def _array(self, own: Schema) -> Schema:
        _check_counts(own, "minItems", "maxItems")
        if "prefixItems" in own:
            self.ignored.update(key for key in ("minItems", "maxItems") if key in own)
            if own.get("items", False) is not False:
                self.ignored.add("items")
            return {"type": "array", "prefixItems": [self.schema(one) for one in _list(own, "prefixItems")]}
        counts: Schema = {key: own[key] for key in ("minItems", "maxItems") if key in own}
        if counts.get("maxItems") == 0:
            return {"type": "array", "prefixItems": []}
        return {"type": "array", "items": self.schema(own.get("items", True)), **counts}

    def _string(self, own: Schema) -> Schema:
        _check_counts(own, "minLength", "maxLength")
        if "pattern" in own:
            self.ignored.update(own.keys() - {"pattern"})
            return {"type": "string", "pattern": _pattern(own["pattern"])}
        if own.get("format") in _FORMATS:
            self.ignored.update(own.keys() - {"format"})
            return {"type": "string", "format": own["format"]}
        if "format" in own:
            self.ignored.add("format")
        return {"type": "string", **{key: own[key] for key in ("minLength", "maxLength") if key in own}}

    def _merged(self, given: Schema) -> Schema:
        """Return `given` with its allOf merged in: one part of any kind, or several objects."""
        parts = [self._target(one["$ref"]) if isinstance(one, dict) and "$ref" in one else one
                 for one in _list(given, "allOf")]  # fmt: skip
        rest = {key: value for key, value in given.items() if key != "allOf"}
        if len(parts) == 1 and isinstance(parts[0], dict) and not (rest.keys() - _NOTES):
            part = given["allOf"][0]
            return self._merged(part) if "allOf" in part else dict(part)
        merged: Schema = {"type": "object", "properties": {}, "required": []}
        for part in [*parts, *([rest] if rest.keys() - _NOTES else [])]:
            if (
                not isinstance(part, dict)
                or part.get("type", "object") != "object"
                or not part.keys() <= _NOTES | {"type", *_OF_TYPE["object"]}
            ):
                raise UsageError("allOf of anything but objects and their properties cannot be converted")
            merged["properties"].update(part.get("properties", {}))
            merged["required"] += part.get("required", [])
        return merged

    def _reference(self, ref: object) -> str:
        """Return a $ref to the target of `ref`, stored under a unique name."""
        target = self._target(ref)
        key = str(ref)
        if key not in self.places:
            name = self.places[key] = f"{self.prefix}{len(self.places)}"
            self.found[name] = self.schema(target)
        return f"#/$defs/{self.places[key]}"

    def _target(self, ref: object) -> object:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise UsageError(f"$ref {_short(ref)}: only what is in the schema itself (#/...) can be used")
        target: Any = self.root
        for step in ref.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(key)] if isinstance(target, list) else target[key]
            except (LookupError, TypeError, ValueError):
                raise UsageError(f"$ref {_short(ref)} points to nothing") from None
        return target

    def _note(self, given: Schema, enforced: set[str]) -> None:
        self.ignored.update(given.keys() - enforced - _NOTES)


class _Converter(backend.SchemaConverter):
    """The converter, with rules that allow valid JSON only."""

    def visit(self, schema: Schema, name: str) -> str:
        """Return the rule for `schema`. A string's length becomes {min,max}: a rule per length is slow."""
        if schema.get("type") == "string" and schema.keys() & {"minLength", "maxLength"}:
            char = self._add_primitive("char", backend.PRIMITIVE_RULES["char"])
            counts = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
            return self._add_rule(f"{name}-text" if name else "root", rf'"\"" {char}{{{counts}}} "\"" space')
        return str(super().visit(schema, name))  # type: ignore[no-untyped-call]

    def _add_rule(self, name: str, rule: str) -> str:
        strict = {"char": _CHAR, "dot": _DOT}
        rule = strict.get(name, rule) if rule.startswith("[^") else rule
        return str(super()._add_rule(name, rule))  # type: ignore[no-untyped-call]

    def _format_literal(self, literal: str) -> str:
        """Return a JSON text as a GBNF string, with letters unescaped, as a model writes them."""
        text = json.dumps(json.loads(literal), ensure_ascii=False)
        if any("\ud800" <= char <= "\udfff" for char in text):
            text = literal
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'


def schema_to_gbnf(schema: str | Schema) -> Converted:
    """Return a grammar of the JSON values that `schema` describes.

    Raises UsageError, without the name of a file, if the text is no JSON or cannot be converted.
    """
    try:
        given = json.loads(schema) if isinstance(schema, str) else schema
        if given is True:
            given = {}
        prefix = "definition-"
        while prefix in json.dumps(given):
            prefix += "x-"
        ordering = _Ordering(given, prefix)
        ordered = {**ordering.schema(given)}
        if ordering.found:
            ordered["$defs"] = ordering.found
        converter = _Converter(  # type: ignore[no-untyped-call]
            prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False
        )
        converter.resolve_refs(ordered, "")
        converter.visit(ordered, "")
        text: str = converter.format_grammar()  # type: ignore[no-untyped-call]
    except RecursionError:
        raise UsageError("the schema is nested too deeply") from None
    except UsageError:
        raise
    except (ValueError, AssertionError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UsageError(f"not a schema that can be converted: {reason}") from None
    return Converted(text, tuple(sorted(ordering.ignored)))


def _pattern(pattern: object) -> str:
    """Return a regular expression that the converter understands and that cannot match a string's end."""
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        raise UsageError(f"pattern {_short(pattern)}: must begin with ^ and end with $")
    made = []
    for part in _PATTERN_PART.findall(pattern[1:-1]):
        if part.startswith("["):
            made.append(_class(part, pattern))
        elif part.startswith("\\"):
            made.append(_escape(part[1], pattern))
        elif part in _ESCAPED_ONLY:
            raise UsageError(f"pattern {_short(pattern)}: {part!r} must be escaped in a JSON string")
        else:
            made.append(part)
    return f"^{''.join(made)}$"


def _escape(char: str, pattern: str) -> str:
    if char in _CLASSES:
        return f"[{_CLASSES[char]}]"
    if char.isalnum() or char in _ESCAPED_ONLY:
        raise UsageError(f"pattern {_short(pattern)}: \\{char} cannot be converted")
    return f"\\{char}" if char in "[]()|{}*+?" else "[.]" if char == "." else char


def _class(part: str, pattern: str) -> str:
    """Return a class of characters in GBNF; a negated class also excludes what a JSON string must escape."""
    try:
        holds = re.compile(part)
    except re.error:
        raise UsageError(f"pattern {_short(pattern)}: {part} is no class of characters") from None
    negated = part.startswith("[^")
    if not negated and any(holds.fullmatch(char) for char in _ESCAPED_ONLY if char not in "\t\n\r\v\f"):
        raise UsageError(f'pattern {_short(pattern)}: {part} has a character (", \\) that JSON escapes')
    inner = []
    for one in re.findall(r"\\.|.", part[2 if negated else 1 : -1], re.DOTALL):
        if len(one) == 1:
            inner.append(one)
        elif one[1] in _CLASSES:
            inner.append(_CLASSES[one[1]])
        elif one[1].isalnum():
            raise UsageError(f"pattern {_short(pattern)}: {one} cannot be converted")
        else:
            inner.append(f"\\x{ord(one[1]):02X}" if ord(one[1]) < 256 else one[1])
    return f'[^"\\\\\\x00-\\x1F{"".join(inner)}]' if negated else f"[{''.join(inner)}]"


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema[key]
    if not isinstance(value, list):
        raise UsageError(f"{key} must be a list")
    if not value and key not in {"required", "prefixItems"}:
        raise UsageError(f"{key} is empty: nothing could match")
    return value


def _check_counts(own: Schema, least: str, most: str) -> None:
    for key in (least, most):
        if key in own and (not isinstance(own[key], int) or isinstance(own[key], bool) or own[key] < 0):
            raise UsageError(f"{key} {_short(own[key])}: must be 0 or more")
    if own.get(least, 0) > own.get(most, float("inf")):
        raise UsageError(f"{least} {own[least]} is more than {most} {own[most]}")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
