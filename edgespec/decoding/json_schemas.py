"""JSON schemas in the form that llguidance needs: objects have only the properties that they name.

A table lists the keywords: each is enforced, rewritten for the library, or named as not enforced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from llguidance import LLMatcher

from edgespec.errors import UsageError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


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
    """Return the treatment of a keyword, such as enforced; "" if it is no keyword."""
    return KEYWORDS.get(key, ("", ""))[0]


def form_of(key: str) -> str:
    """Return the form of a keyword's value; "" if it is no keyword."""
    return KEYWORDS.get(key, ("", ""))[1]


def schemas(root: Any) -> Iterator[Schema]:  # noqa: ANN401 - JSON
    """Yield each schema in `root` once, also those that only references reach."""
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
    """Return the target of a reference by its path; None if it is not in `root`."""
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
    """Return up to MOST_PARTS schemas, all of which each value of `schema` matches."""
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
    """Alternative schemas, of which one must match."""

    def __init__(self, alternatives: list[Any], root: Schema) -> None:
        """Look at `alternatives` of the schema `root`."""
        self._root, self._left = root, _MOST_COMPARISONS
        known = [parts_of(one, root) for one in alternatives]
        self.are_apart = all(self._excluded([*a, *b]) for n, a in enumerate(known) for b in known[:n])
        """Whether certainly no value matches two of them."""

    def _excluded(self, parts: list[Schema], depth: int = 0) -> bool:
        """Whether it is certain that no value matches all of `parts`."""
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
    """Return the types that a schema names; [] if it names none."""
    given = schema.get("type", [])
    return [given] if isinstance(given, str) else given


_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "types": ((str, list), "a string or a list"),
    "number": ((int, float), "a number"),
    "count": ((int, float), "a number"),
    **dict.fromkeys(("list", "several"), ((list,), "a list")),
    **dict.fromkeys(("named", "object"), ((dict,), "an object")),
}
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_FAR, _NEAR = 10**18 - 1024, 1e-15
"""The library's bounds end before 10^18, and grow long near zero."""
_MOST_CHOICES = 6  # each makes the grammar twice as large
_DEPENDING = {"anyOf", "dependentSchemas", "if", "oneOf"}
_SEVERAL = _DEPENDING | {"$ref", "allOf", "contains", "else", "not", "then"}
_OPENING = {
    "additionalProperties",
    "anyOf",
    "dependentSchemas",
    "if",
    "oneOf",
    "patternProperties",
    "unevaluatedProperties",
}
"""May allow more properties than a schema names."""
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
"""Formats of strings that are kept to."""


def escapes(root: Schema) -> str:
    r"""Return the letters that may follow a backslash in strings.

    \u is left out unless a value or a name needs it: with it, a property could be spelled in other ways.
    """
    keys = ("const", "enum", "required")
    texts = (json.dumps([*map(one.get, keys), *one.get("properties", ())]) for one in schemas(root))
    needed = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
    return 'nrbtf\\"' + ("u" if any(map(needed.search, texts)) else "")


def named(key: str, value: Any, why: str = "") -> str:  # noqa: ANN401 - JSON
    """Return a warning about a keyword and its value, as the user wrote it; `true` is left out."""
    text = json.dumps(value, ensure_ascii=False)
    text = "" if value is True else f": {text if len(text) <= 60 else f'{text[:57]}...'}"
    return f'"{key}"{text}{why and f", {why}"}'


def explained(message: str, root: Schema, warnings: Iterable[str]) -> list[str]:
    """Return the part of the library's message that `warnings` lack, with values of `root`."""
    keys = re.findall('"(.*?)"', message) if message.startswith("Unimplemented keys") else []
    keys += ["minProperties", "maxProperties"] if message.startswith("min/maxProperties") else []
    new = [key for key in keys if not any(one.startswith(f'"{key}"') for one in warnings)]
    told = [named(key, one[key]) for one in schemas(root) for key in new if key in one]
    return told or ([message] if new or not keys else [])


def check(schema: Schema) -> None:
    """Raise UsageError for a value that a keyword cannot have."""
    for key, value in schema.items():
        kinds, name = _FORMS.get(form_of(key)) or ((object,), "")
        is_number = isinstance(value, (int, float))
        if is_number and form_of(key) == "count" and (value < 0 or value % 1):
            raise UsageError(f'"{key}" must be a whole number, 0 or more, not {value}')
        if not isinstance(value, kinds):
            raise UsageError(f'"{key}" must be {name}, not {json.dumps(value)[:60]}')
    if not all(isinstance(one, str) for key in ("type", "required") for one in schema.get(key, ())):
        raise UsageError('"type" and "required" hold strings')
    values = [schema.get("const"), *schema.get("enum", ())]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and (abs(value) >= _FAR or float(value) != value):
            raise UsageError(f"the value {value} is too large to be enforced exactly")


# ---- rewriting ----


class Rewriting:
    """Rewrites schemas in place, so that the library enforces what they say."""

    def __init__(self, root: Schema) -> None:
        """Rewrite the schemas in `root`. Raises UsageError for invalid or unenforceable values."""
        every = [*schemas(root)]
        self._root = root
        self._written = dict(zip(map(id, every), schemas(json.loads(json.dumps(root))), strict=True))
        self.warnings: dict[str, None] = {}
        """What is not enforced, a line each."""
        for schema in every:
            check(schema)
        places = {one.get("$ref", "").partition("#/")[2].split("/")[0] for one in every}
        for schema in every:
            for key, value in schema.items():
                if kind_of(key) == "not" and (key not in ("not", "uniqueItems") or value is not False):
                    self._name(schema, key)
                elif not kind_of(key) and key[:2] != "x-" and not (schema is root and key in places):
                    self._name(schema, key, "which is no word of JSON Schema")
            self._combinations(schema)
        for schema in every:
            for rewrite in (self._words, self._numbers, self._strings, self._objects, self._arrays):
                rewrite(schema)

    def _name(self, schema: Schema, key: str, why: str = "", *, part: object = None) -> None:
        value = self._written[id(schema)][key] if part is None else part
        self.warnings[named(key, value, why)] = None

    def _combinations(self, schema: Schema) -> None:
        """Rewrite keywords that depend on several schemas so that each stands alone."""
        if "oneOf" in schema:
            if not Alternatives(schema["oneOf"], self._root).are_apart:
                self._name(schema, "oneOf", "of which several may match")
            if "anyOf" in schema:
                _also(schema, {"anyOf": schema.pop("oneOf")})
            else:  # in its place: properties come in the order of the keywords
                schema.update([("anyOf" if key == "oneOf" else key, schema.pop(key)) for key in [*schema]])
        parts = parts_of(schema, self._root) if schema.keys() & {"$ref", "allOf"} else []
        steps = [part["multipleOf"] for part in parts if part.get("multipleOf")]
        exact = [Fraction(str(step)) for step in steps]
        scale = math.lcm(*(step.denominator for step in exact))
        if len(steps) > 1 and math.prod(sorted(int(abs(step) * scale) for step in exact)[-2:]) >= 2**32:
            self._name(schema, "multipleOf", "of several schemas", part=steps)
        others = {word for part in parts for word in part.keys() & _OPENING if part[word] is not False}
        if schema.get("unevaluatedProperties") is False and 0 < len(parts) < MOST_PARTS and not others:
            del schema["unevaluatedProperties"]
            names = {name: True for part in parts for name in part.get("properties", {})}
            _also(schema, {"properties": names, "additionalProperties": False})

    def _words(self, schema: Schema) -> None:
        for key in [*schema]:
            if kind_of(key) == "drop":
                del schema[key]
            elif form_of(key) == "count":
                schema[key] = min(int(schema[key]), 2**32 - 1) if key[:3] == "max" else int(schema[key])
        if "$ref" in schema:
            schema["$ref"] = quote(schema["$ref"], safe="/:#?&=+,;@!$'()*~%")
        if schema.pop("nullable", None) is True:
            if "type" in schema:
                schema["type"] = [*types_of(schema), "null"]
                schema.update({"enum": [*schema["enum"], None]} if "enum" in schema else {})
            else:
                inner = {key: schema.pop(key) for key in [*schema] if key not in ("$defs", "definitions")}
                schema["anyOf"] = [inner, {"type": "null"}]

    def _numbers(self, schema: Schema) -> None:
        if width := re.fullmatch(r"(u?)int(8|16|32)", schema.get("format", "")):
            most = 2 ** (int(width[2]) - (not width[1])) - 1
            del schema["format"]
            _also(schema, {"minimum": 0 if width[1] else -most - 1, "maximum": most})
        if "integer" in (types := types_of(schema)) and "number" not in types:
            for bounds, far in ((_LOWEST, -_FAR), (_HIGHEST, _FAR)):  # else digits without end may be written
                if not {*bounds} & schema.keys():
                    schema[bounds[0]] = far
        for key in [key for key in (*_LOWEST, *_HIGHEST) if not isinstance(schema.get(key, True), bool)]:
            sign = 1 if key in _LOWEST else -1  # booleans are draft 4's
            if sign * schema[key] > _FAR:
                self._name(schema, key)
                del schema[key]
            else:
                schema[key] = sign * _inward(sign * schema[key])

    def _strings(self, schema: Schema) -> None:
        if "pattern" in schema:
            try:
                schema["pattern"] = rust_regex(schema["pattern"])
            except UsageError as error:
                self._name(schema, "pattern", f"with {error}")
                del schema["pattern"]
        known = schema.get("format", "")
        if known not in FORMATS:
            if known in STRICTER:
                schema["format"] = "uuid"
            elif schema.pop("format", None) and known not in ("int64", "float", "double", "password"):
                self._name(schema, "format")
        encoding = schema.get("contentEncoding", "")
        if encoding and encoding not in ENCODINGS:
            self._name(schema, "contentEncoding")
        patterns = (*STRICTER.get(known, ()), ENCODINGS.get(encoding))
        _also(schema, *({"pattern": pattern} for pattern in patterns if pattern))

    def _objects(self, schema: Schema) -> None:
        if "propertyNames" in schema and not self._puts_names(schema):
            self._name(schema, "propertyNames")
        for pattern, value in [*schema.get("patternProperties", {}).items()]:
            del schema["patternProperties"][pattern]
            try:
                schema["patternProperties"][rust_regex(pattern)] = value
            except UsageError as error:
                self._name(schema, "patternProperties", f"with {error}", part=pattern)
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if len(schema.get(key, ())) > _MOST_CHOICES:
                self._name(schema, key)
                continue
            for name, needed in schema.pop(key, {}).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                _also(schema, {"anyOf": [{"properties": {name: False}}, then]})
        if "unevaluatedProperties" in schema:
            if schema.keys() & _SEVERAL:
                self._name(schema, "unevaluatedProperties")
            else:
                schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        if "patternProperties" in schema and "additionalProperties" in schema:  # read together side by side
            for key in ("patternProperties", "additionalProperties"):
                schema[key] = schema.pop(key)
        self._counts(schema)

    def _puts_names(self, schema: Schema) -> bool:
        """Rewrite "propertyNames" as other keywords if nothing else names properties; return if it was."""
        names = schema["propertyNames"]
        names = target(names["$ref"], self._root) if isinstance(names, dict) and "$ref" in names else names
        if names is True:
            names = {}
        rules = names if isinstance(names, dict) else {"not": {}}
        rules = {k: v for k, v in rules.items() if k != "type" and kind_of(k) != "says"}
        value = schema.get("additionalProperties", True)
        put: Schema = {}
        if rules.keys() == {"enum"}:
            put = {"properties": {name: value for name in rules["enum"] if isinstance(name, str)}}
        elif rules.keys() == {"pattern"}:
            put = {"patternProperties": {rules["pattern"]: value}}
        elif rules and rules.keys() <= {"minLength", "maxLength"}:
            counts = f"{rules.get('minLength', 0)},{rules.get('maxLength', '')}"
            put = {"patternProperties": {f"^[\\s\\S]{{{counts}}}$": value}}
        if (rules and not put) or (put and schema.keys() & {"properties", "patternProperties"}):
            return False
        del schema["propertyNames"]
        schema.update({**put, "additionalProperties": False} if put else {})
        return True

    def _counts(self, schema: Schema) -> None:
        """Remove limits on the number of properties that the library misreads or does not support."""
        n_required = len({*schema.get("required", ())})
        least, most = schema.get("minProperties", 0) - n_required, schema.get("maxProperties")
        is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
        if schema.get("properties", {}).keys() - {*schema.get("required", ())}:
            few = least <= 1 and (most is None or most - n_required == 1) and not is_open
            asked = {"minProperties": least > 0, "maxProperties": most is not None}
            for key in [key for key, is_asked in asked.items() if is_asked and not few]:
                self._name(schema, key, "beside optional properties")
                del schema[key]
        elif least > 0 and not is_open:
            told = named("minProperties", self._written[id(schema)]["minProperties"])
            raise UsageError(f"nothing matches {told}: the schema allows no more than {n_required}")
        elif least > 1:
            self._name(schema, "minProperties", "where a name may come twice")

    def _arrays(self, schema: Schema) -> None:
        others = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        if others == "items":
            schema.pop("additionalItems", None)
        if "unevaluatedItems" in schema:
            if schema.keys() & _SEVERAL:
                self._name(schema, "unevaluatedItems")
            else:
                schema.setdefault(others, schema.pop("unevaluatedItems"))
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]


def _also(schema: Schema, *more: Schema) -> None:
    if more:
        schema["allOf"] = [*schema.get("allOf", ()), *more]


def _inward(lowest: float) -> float:
    if lowest < -_FAR:
        return -_FAR
    if abs(lowest) < _NEAR:
        return _NEAR if lowest > 0 else 0
    held = float(lowest)
    if held == lowest:
        return lowest
    return int(held if held > lowest else math.nextafter(held, math.inf))


# ---- patterns of strings in JSON schemas: of formats, and ECMA-262's as Rust's regex crate takes them ----


_DAY = (
    "^[0-9]{4}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|"
    "^(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
STRICTER = {
    "date": (_DAY,),
    "date-time": (_DAY, "^.{17}[0-5]"),
    "email": (r"^[^@]{1,64}@(?:[^.]{1,63}\.)*[^.]{1,63}$",),
    "hostname": ("^.{1,253}$",),
    "time": ("^.{6}[0-5]",),
    **{f"uuid{version}": (f"^.{{14}}{version}",) for version in range(1, 9)},
}
"""Formats -> patterns against what the library lets pass: any 29th of February or leap second, long names."""
ENCODINGS = {
    "base16": "^(?:[0-9A-Fa-f]{2})*$",
    "base32": "^(?:[A-Z2-7]{8})*(?:[A-Z2-7]{2}={6}|[A-Z2-7]{4}={4}|[A-Z2-7]{5}={3}|[A-Z2-7]{7}=)?$",
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""Values of "contentEncoding" -> patterns."""

_SPACES = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}
_HEX = "[0-9a-fA-F]"
_ONE = (
    rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u\{{{_HEX}{{1,6}}\}}|\\u{_HEX}{{4}}|\\x{_HEX}{{2}}"
    r"|\\c[A-Za-z]|\\[pP]\{[\w=]+\}|\\.|[^\\]"
)
_MEMBER = re.compile(rf"({_ONE})(?:-({_ONE}))?", re.DOTALL)
_PIECE = re.compile(
    r"(?P<kept>\((?:\?(?::|P?<\w+>|-?i[:)])|(?!\?))|\{[0-9]+(?:,[0-9]*)?\}|[\^$|)*+?])"
    rf"|(?P<group>\(\?(?:<?[=!]|.?))|(?P<any>\.)|\[(?P<class>(?:\\.|[^\\\]])*)\]|(?P<one>(?!\[)(?:{_ONE}))",
    re.DOTALL,
)


def rust_regex(pattern: str) -> str:
    """Return `pattern` in Rust's syntax. Raises UsageError, which names the part that Rust lacks."""
    out, at = "", 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if not piece or piece["group"]:
            ends = "a class that does not end" if pattern[at] == "[" else "a backslash at its end"
            raise UsageError(f"a group that begins with {piece['group']!a}" if piece else ends)
        at = piece.end()
        if piece["class"] is not None:
            out += _class(piece["class"])
        else:
            out += piece["kept"] or (piece["any"] and _ANY) or _written(piece["one"])
    return out


def _class(members: str) -> str:
    if members in ("", "^"):
        return r"[\s\S]" if members else r"[^\s\S]"
    out, inside = "[^" if members[0] == "^" else "[", members.removeprefix("^")
    for ends in _MEMBER.findall(inside):
        both = [_written(r"\x08" if one == r"\b" else one) for one in ends if one]
        dash = "-" if not any(one[0] == "[" or one[:2] in (r"\p", r"\P") for one in both) else r"\u{2d}"
        out += dash.join(both)
    return out + "]"


def _written(one: str) -> str:
    """Return a character, or the set that an escape stands for, as Rust writes it."""
    escaped = one[1:] if one[0] == "\\" else ""
    if escaped.lower() in _SETS:
        return f"[{'^' * escaped.isupper()}{_SETS[escaped.lower()]}]"
    if escaped[:1] in ("p", "P") and len(escaped) > 1:
        return one
    if len(escaped) > 10:  # both halves of one
        character = bytes.fromhex(one.replace("\\u", "")).decode("utf-16-be")
    elif escaped[:1] in ("u", "x") and len(escaped) > 1:
        number = int(escaped[1:].strip("{}"), 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise UsageError(f"{one}, half a character")
        character = chr(number)
    elif escaped[:1] == "c" and len(escaped) > 1:
        character = chr(ord(escaped[1]) % 32)
    elif escaped.isalnum() and escaped not in _CONTROLS:
        raise UsageError(one)
    else:
        character = _CONTROLS.get(escaped, escaped or one)
    return character if character.isalnum() else f"\\u{{{ord(character):x}}}"


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


def read_schema(schema: str | Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `schema` in keywords that llguidance enforces, and warnings about those it cannot.

    An object may have properties that it does not name only if the schema says so ("additionalProperties"),
    or combines several schemas. Raises UsageError, without the name of a file, if it is no schema.
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

    Parts that it cannot enforce are left out, with a warning. Raises UsageError for too deep a schema.
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
    """Add to `combined` the schemas that apply together with others: none of them names all properties."""
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
