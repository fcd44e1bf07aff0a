"""Words of JSON Schema that llguidance passes over or reads otherwise, put as it reads them rightly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import quote, unquote

from edgespec.errors import UsageError

# ---- regular expressions of JSON schemas, ECMA-262's, as Rust's regex crate takes them ----


_SPACES = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_SETS = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACES}]",
    "S": f"[^{_SPACES}]",
}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}

_PIECE = re.compile(
    r"""(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})
    | \\(?:u\{(?P<long>[0-9a-fA-F]{1,6})\} | u(?P<four>[0-9a-fA-F]{4}) | x(?P<two>[0-9a-fA-F]{2}))
    | \\c(?P<control>[A-Za-z])
    | (?P<property>\\[pP]\{[\w=]+\})
    | \\(?P<escaped>.)
    | (?P<group>\((?:\?(?:[:=!]|<[=!]|P?<\w+>|-?[a-z]+[:)])?)?)
    | (?P<repeat>\{[0-9]+(?:,[0-9]*)?\})
    | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_GROUP = re.compile(r"\((\?(:|P?<\w+>|-?i[:)]))?")


def rust_regex(pattern: str) -> str:
    """Return `pattern` in Rust's syntax. Raises UsageError that names what it has no word for."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        piece = _next(pattern, at)
        at = piece.end()
        if piece["group"]:
            if not _GROUP.fullmatch(piece[0]):
                raise _refused(pattern, f"a group that begins with {piece[0]}")
            out.append(piece[0])
        elif piece["repeat"] or (piece["plain"] and piece[0] in "^$|)*+?"):
            out.append(piece[0])
        elif piece[0] == ".":
            out.append(_ANY)
        elif piece[0] == "[":
            text, at = _class(pattern, at)
            out.append(text)
        else:
            text, is_set = _atom(pattern, piece)
            out.append(text if is_set else _written(text))
    return "".join(out)


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the class that begins at `at`, after its bracket, and where it ends."""
    negated = pattern.startswith("^", at)
    at += negated
    out: list[str] = []
    while not pattern.startswith("]", at):
        first, is_set, at = _member(pattern, at)
        if pattern.startswith("-", at) and not pattern.startswith("-]", at):
            last, is_last_set, end = _member(pattern, at + 1)
            if not is_set and not is_last_set:
                out.append(f"{_written(first)}-{_written(last)}")
                at = end
                continue
        out.append(first if is_set else _written(first))
    if not out:
        return (r"[\s\S]" if negated else r"[^\s\S]"), at + 1
    return f"[{'^' * negated}{''.join(out)}]", at + 1


def _member(pattern: str, at: int) -> tuple[str, bool, int]:
    if at >= len(pattern):
        raise _refused(pattern, "a class that does not end")
    piece = _next(pattern, at)
    if piece["group"] or piece["repeat"]:  # plain characters here
        return pattern[at], False, at + 1
    if piece["escaped"] == "b":
        return "\b", False, piece.end()
    return *_atom(pattern, piece), piece.end()


def _next(pattern: str, at: int) -> re.Match[str]:
    piece = _PIECE.match(pattern, at)
    if piece is None or piece[0] == "\\":
        raise _refused(pattern, "a backslash at its end")
    return piece


def _atom(pattern: str, piece: re.Match[str]) -> tuple[str, bool]:
    """Return the character that `piece` stands for; or a set of them, as written in Rust, and True."""
    if piece["pair"]:
        return bytes.fromhex(piece[0].replace("\\u", "")).decode("utf-16-be"), False
    code = piece["long"] or piece["four"] or piece["two"]
    if code:
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise _refused(pattern, f"{piece[0]}, half a character")
        return chr(number), False
    if piece["control"]:
        return chr(ord(piece["control"]) % 32), False
    if piece["property"]:
        return piece[0], True
    escaped = piece["escaped"]
    if not escaped:
        return piece[0], False
    if escaped in _SETS:
        return _SETS[escaped], True
    if escaped in _CONTROLS:
        return _CONTROLS[escaped], False
    if escaped.isalnum():
        raise _refused(pattern, piece[0])
    return escaped, False


def _written(character: str) -> str:
    return character if character.isalnum() else f"\\u{{{ord(character):x}}}"


def _refused(pattern: str, what: str) -> UsageError:
    return UsageError(f'the pattern "{pattern[:80]}" with {what}')


# ---- which schemas no value can match two of: of those "oneOf" means the same as "anyOf" ----


Follow = Callable[[Any], Any]
"""Returns what a reference points to."""

MOST_PARTS = 64
_MOST_COMPARISONS = 100_000  # half a second; 300 objects that a constant tells apart take as many


@dataclass(slots=True)
class _Known:
    """Facts about the values that match a schema; None: nothing is known."""

    types: set[str] | None = None
    values: set[tuple[str, Any]] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    choices: list[list[Any]] = field(default_factory=list)

    def has(self, *, types: set[str] | None = None, values: set[tuple[str, Any]] | None = None) -> None:
        if types is not None:
            self.types = types if self.types is None else self.types & types
        if values is not None:
            self.values = values if self.values is None else self.values & values


def are_apart(schemas: Sequence[Any], follow: Follow) -> bool:
    """Whether certainly no value matches two of `schemas`."""
    left = iter(range(_MOST_COMPARISONS))

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


# ---- words ----


Schema = dict[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ONE = _words(
    "additionalItems additionalProperties contains else if items not propertyNames then unevaluatedItems "
    "unevaluatedProperties"
)
_SEVERAL = _words("allOf anyOf oneOf prefixItems")
_NAMED = _words("$defs definitions dependencies dependentSchemas patternProperties properties")
_LOWEST, _HIGHEST = _words("minimum exclusiveMinimum"), _words("maximum exclusiveMaximum")
_MOST, _LEAST = _words("maxItems maxLength maxProperties"), _words("minItems minLength minProperties")
_ENFORCED = (_ONE | _SEVERAL | _NAMED | _LOWEST | _HIGHEST | _MOST | _LEAST) | _words(
    "$dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef $ref const dependentRequired enum format "
    "maxContains minContains multipleOf nullable pattern required type uniqueItems"
)
"""Enforced, or refused by the library under their names."""
_ANNOTATIONS = _words(
    "$anchor $comment $id $schema $vocabulary contentEncoding contentMediaType contentSchema default "
    "deprecated description discriminator enumDescriptions enumNames example examples externalDocs id "
    "markdownDescription propertyOrder readOnly title writeOnly xml"
)
"""Say nothing of which values there are."""
_DROPPED = ("$schema", "$dynamicAnchor", "$recursiveAnchor")
"""Would choose which words count, or be refused although they ask for nothing."""
_SHAPES: tuple[tuple[frozenset[str], type | tuple[type, ...], str], ...] = (
    (_words("$ref format pattern"), str, "a string"),
    (_words("enum required") | _SEVERAL, list, "a list"),
    (_NAMED | {"dependentRequired"}, dict, "an object"),
    (_LOWEST | _HIGHEST | _MOST | _LEAST | {"multipleOf"}, (int, float), "a number"),
    (_words("type"), (str, list), "a string or a list"),
)

_FAR, _NEAR = 10**18 - 1024, 1e-15
"""The library's bounds end before 10^18, and grow long near zero."""
_MOST_CHOICES = 6
_OPENING = _words(
    "additionalProperties anyOf dependentSchemas if oneOf patternProperties unevaluatedProperties"
)
"""May allow more properties than a schema names."""
FORMATS = _words("date date-time duration email hostname ipv4 ipv6 time uri uuid")
"""Formats of strings that are kept to."""
_DAY = (
    "^[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|"
    "^(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
_STRICTER = {
    "date": (_DAY,),
    "date-time": (_DAY, "^.{17}[0-5]"),
    "email": (r"^[^@]{1,64}@(?:[^.]{1,63}\.)*[^.]{1,63}$",),
    "hostname": ("^.{1,253}$",),
    "time": ("^.{6}[0-5]",),
}
"""Values that the library's formats let pass: the 29th of any February, any leap second, long names."""


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
            if key in _NAMED and isinstance(value, dict):
                waiting += value.values()
            elif (key in _SEVERAL or key == "items") and isinstance(value, list):
                waiting += value
            elif key in _ONE:
                waiting.append(value)
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


def prepare(root: Schema) -> list[str]:
    """Rewrite the schemas in `root` in place; return what in them is not enforced.

    Raises UsageError for a value that the library cannot hold.
    """
    every = [*schemas(root)]
    _check_shapes(every)
    places = {str(one.get("$ref", "")).partition("#/")[2].split("/")[0] for one in every}
    warnings: list[str] = []
    for schema in every:
        warnings += _parts_together(schema, lambda ref: target(ref, root))
    for schema in every:
        for key in schema.keys() - _ENFORCED - _ANNOTATIONS:
            if not key.startswith("x-") and not (schema is root and key in places):
                warnings.append(f'"{key}", which is no word of JSON Schema')
        _property_names(schema, root)
        for rewrite in (_plain_words, _numbers, _strings, _objects, _arrays, _nullable):
            warnings += rewrite(schema)
    return sorted(set(warnings))


def escapes(root: Schema) -> str:
    r"""Return the letters that may follow a backslash in strings.

    \u is left out, or a property could be spelled in other ways, unless a value or a name needs it.
    """
    texts = [
        json.dumps([one.get("const"), one.get("enum"), one.get("required"), [*one.get("properties", ())]])
        for one in schemas(root)
    ]
    needed = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
    return 'nrbtf\\"' + ("u" if any(map(needed.search, texts)) else "")


def _check_shapes(every: Iterable[Schema]) -> None:
    for schema in every:
        for words, shape, name in _SHAPES:
            for key in words & schema.keys():
                if not isinstance(schema[key], shape):
                    raise UsageError(f'"{key}" must be {name}')
        if not all(isinstance(one, str) for key in ("type", "required") for one in schema.get(key, ())):
            raise UsageError('"type" and "required" hold strings')


def _also(schema: Schema, more: Iterable[Any]) -> None:
    added = [*schema.get("allOf", ()), *more]
    if added:
        schema["allOf"] = added


def _parts_together(schema: Schema, follow: Callable[[Any], Any]) -> Iterator[str]:
    """Put what depends on several parts of a schema so that it does not."""
    if "oneOf" in schema and are_apart(schema["oneOf"], follow):
        if "anyOf" in schema:
            _also(schema, [{"anyOf": schema.pop("oneOf")}])
        else:
            _replace(schema, {("anyOf" if key == "oneOf" else key): value for key, value in schema.items()})
    parts = [*parts_of(schema, follow)] if schema.keys() & {"$ref", "allOf"} else []
    steps = [Fraction(str(part["multipleOf"])) for part in parts if part.get("multipleOf")]
    scale = math.lcm(*(step.denominator for step in steps))
    if len(steps) > 1 and math.prod(sorted(int(abs(step) * scale) for step in steps)[-2:]) >= 2**32:
        yield '"multipleOf" of several schemas'
    others = {word for part in parts for word in part.keys() & _OPENING if part[word] is not False}
    if schema.get("unevaluatedProperties") is False and 0 < len(parts) < MOST_PARTS and not others:
        del schema["unevaluatedProperties"]
        names = {name: True for part in parts for name in part.get("properties", {})}
        _also(schema, [{"properties": names, "additionalProperties": False}])


def _replace(schema: Schema, words: Schema) -> None:
    schema.clear()
    schema.update(words)


def _plain_words(schema: Schema) -> Iterator[str]:
    for key in _DROPPED:
        schema.pop(key, None)
    if "$ref" in schema:
        schema["$ref"] = quote(schema["$ref"], safe="/:#?&=+,;@!$'()*~%")
    values = [schema.get("const"), *schema.get("enum", ())]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and (abs(value) >= _FAR or (float(value) != value)):
            raise UsageError(f"the value {value} is too large to be enforced exactly")
    for key in (_MOST | _LEAST) & schema.keys():
        count = schema[key]
        if isinstance(count, float) and count.is_integer():
            count = schema[key] = int(count)
        if key in _MOST and count >= 2**32:
            schema[key] = 2**32 - 1
    yield from ()


def _numbers(schema: Schema) -> Iterator[str]:
    width = re.fullmatch(r"(u?)int(8|16|32)", str(schema.get("format")))
    if width:
        most = 2 ** (int(width[2]) - (not width[1])) - 1
        del schema["format"]
        _also(schema, [{"minimum": 0 if width[1] else -most - 1, "maximum": most}])
    if "integer" in schema.get("type", ()) and "number" not in schema["type"]:  # a string, or a list of them
        for bounds, far in ((_LOWEST, -_FAR), (_HIGHEST, _FAR)):  # else a model may write digits without end
            if not bounds & schema.keys():
                schema[min(bounds, key=len)] = far
    for key in (_LOWEST | _HIGHEST) & schema.keys():
        bound = schema[key]
        if isinstance(bound, bool):  # as draft 4 has it
            continue
        sign = 1 if key in _LOWEST else -1
        if sign * bound > _FAR:
            del schema[key]
            yield f'"{key}" of {bound}'
        else:
            schema[key] = sign * _inward(sign * bound)


def _inward(lowest: float) -> float:
    if lowest < -_FAR:
        return -_FAR
    if abs(lowest) < _NEAR:
        return _NEAR if lowest > 0 else 0
    held = float(lowest)
    if held == lowest:
        return lowest
    return int(held if held > lowest else math.nextafter(held, math.inf))


def _strings(schema: Schema) -> Iterator[str]:
    if "pattern" in schema:
        try:
            schema["pattern"] = rust_regex(schema["pattern"])
        except UsageError as error:
            del schema["pattern"]
            yield str(error)
    known = schema.get("format")
    if known is None:
        return
    version = re.fullmatch("uuid([1-8])", known)
    if version:
        schema["format"] = "uuid"
        _also(schema, [{"pattern": f"^.{{14}}{version[1]}"}])
    elif known not in FORMATS:
        del schema["format"]
        if known not in ("int64", "float", "double", "password"):
            yield f'the format "{known}"'
    _also(schema, ({"pattern": pattern} for pattern in _STRICTER.get(known, ())))


def _objects(schema: Schema) -> Iterator[str]:
    for pattern, value in [*schema.get("patternProperties", {}).items()]:
        del schema["patternProperties"][pattern]
        try:
            schema["patternProperties"][rust_regex(pattern)] = value
        except UsageError as error:
            yield str(error)
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if len(schema.get(key, {})) > _MOST_CHOICES:  # each makes the grammar twice as large
            continue
        for name, needed in schema.pop(key, {}).items():
            then = {"required": needed} if isinstance(needed, list) else needed
            _also(schema, [{"anyOf": [{"properties": {name: False}}, then]}])
    parts = schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not"}
    if "unevaluatedProperties" in schema and not parts:
        unevaluated = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", unevaluated)
    if "patternProperties" in schema and "additionalProperties" in schema:  # read together if side by side
        for key in ("patternProperties", "additionalProperties"):
            schema[key] = schema.pop(key)
    yield from _property_counts(schema)


def _property_counts(schema: Schema) -> Iterator[str]:
    """Leave out the counts that the library takes wrongly or not at all."""
    required = {*schema.get("required", ())}
    least, most = schema.get("minProperties", 0) - len(required), schema.get("maxProperties")
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if schema.get("properties", {}).keys() - required:
        few = least <= 1 and (most is None or most - len(required) == 1) and not is_open
        if not few and least > 0:
            yield f'"minProperties" of {schema.pop("minProperties")} beside optional properties'
        if not few and most is not None:
            yield f'"maxProperties" of {schema.pop("maxProperties")} beside optional properties'
    elif least > 1 and is_open:
        yield '"minProperties" where a name is written twice'


def _property_names(schema: Schema, root: Schema) -> None:
    """Put "propertyNames" as properties, or as a pattern of names, where nothing else names any."""
    names = schema.get("propertyNames")
    if names in ({}, True, {"type": "string"}):
        del schema["propertyNames"]
        return
    if isinstance(names, dict) and "$ref" in names:
        names = target(names["$ref"], root)
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return
    value = schema.get("additionalProperties", True)
    asked = names.keys() - _ANNOTATIONS - {"type"}
    if asked == {"enum"}:
        put = {"properties": {name: value for name in names["enum"] if isinstance(name, str)}}
    elif asked == {"pattern"}:
        put = {"patternProperties": {names["pattern"]: value}}
    elif asked and asked <= {"minLength", "maxLength"}:
        length = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        put = {"patternProperties": {length: value}}
    else:
        return
    del schema["propertyNames"]
    schema.update(put, additionalProperties=False)


def _arrays(schema: Schema) -> Iterator[str]:
    if not isinstance(schema.get("items"), list):
        schema.pop("additionalItems", None)
    if "unevaluatedItems" in schema and not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "contains"}:
        unevaluated = schema.pop("unevaluatedItems")
        schema.setdefault(
            "additionalItems" if isinstance(schema.get("items"), list) else "items", unevaluated
        )
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    yield from ()


def _nullable(schema: Schema) -> Iterator[str]:
    """Put OpenAPI's "nullable" as a type."""
    if schema.pop("nullable", None) is True:
        types = schema.get("type")
        if types is None:
            inner = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
            for key in inner:
                del schema[key]
            schema["anyOf"] = [inner, {"type": "null"}]
        else:
            schema["type"] = [*([types] if isinstance(types, str) else types), "null"]
            if "enum" in schema:
                schema["enum"] = [*schema["enum"], None]
    yield from ()
