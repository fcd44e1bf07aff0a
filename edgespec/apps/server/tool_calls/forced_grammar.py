"""The grammar of a forced call in a model's own form, in llguidance's Lark.

The texts between names and arguments are those of the model's template; the arguments follow the functions'
schemas. Arguments in their own tags, or as Python writes them, follow theirs one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from edgespec.apps.server.api_errors import ApiError, field_error
from edgespec.apps.server.request_schema import ChatRequest, NamedTool
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm
from edgespec.apps.server.tool_calls.argument_values import kinds, referenced, write_json
from edgespec.apps.server.tool_calls.call_forms import CALL_ID, HERMES, ArgumentForm, CallForm
from edgespec.decoding.grammars import Grammar, GrammarSource
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

Schema = Mapping[str, Any]
FindToken = Callable[[str], int | None]
"""Returns the id of the control token with this name; None if it is none."""

_ANYTHING = "(?s:.*)"
_ID = "[a-zA-Z0-9]{9}"
_MARKER = re.compile(r"(<[^<>\n]+>|\[/?[A-Z_]{3,}\])")
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "additionalProperties", "not", "if")
_TOGETHER = {
    *_COMBINING,
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "maxProperties",
    "minProperties",
}
"""Words on several arguments at once."""
_NOT_IN_TEXTS = _TOGETHER | {
    *("format", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "minItems", "maxItems", "properties", "required"),
}
_MOST_REFERENCES = 8
_OBJECT = re.compile(r'\{\s*"(\w+)":\s*"",\s*"(\w+)":\s*')


@dataclass(frozen=True)
class ForcedCalls:
    """The calls that an answer is held to."""

    form: CallForm
    functions: Mapping[str, Schema]
    """Schemas of the arguments, by the names of the functions that may be called."""
    many: bool = False
    """Whether there may be several calls, where the form has a way to write them."""
    otherwise: bool = False
    """Whether the answer may also be what @answer stands for, without calls."""
    thought_end: str | None = None
    """The end of the thought that the prompt has begun."""


def forced_calls(forced: ForcedCalls, find_token: FindToken) -> str:
    """Return the grammar, whose rule is "start". Raises UsageError for what no grammar can express."""
    return "\n".join(_Writer(forced, find_token).lines())


def after_thought(end: str, find_token: FindToken) -> str:
    """Return the grammar of @answer after the end of the thought that the prompt has begun."""
    writer = _Writer(ForcedCalls(HERMES, {}, thought_end=end), find_token)
    return "\n".join(["start: thought @answer", *writer.thought(end)])


def arguments_schema(parameters: Schema | None) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object of the named properties and no others.

    The schema itself may allow others.
    """
    schema = {**(parameters or {}), "type": "object"}
    target = referenced(schema.get("$ref"), schema)
    if target and "$ref" not in target and "properties" not in schema:  # as Go's generators write it
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    if not any(key in schema for key in _COMBINING):
        schema = schema | {"properties": schema.get("properties", {}), "additionalProperties": False}
    return schema


def unenforced_parts(forced: ForcedCalls) -> tuple[str, ...]:
    """Return the parts of the functions' schemas that the grammar of calls does not enforce."""
    told: dict[str, None] = {}
    for name, parameters in forced.functions.items():
        schema = arguments_schema(parameters)
        lines = [*GrammarSource.json_schema(schema, "tools").warnings]
        if forced.form.keyed:
            together = [word for word in sorted(schema.keys() & _TOGETHER) if schema[word] is not False]
            lines += [f'"{word}" beside properties' for word in together]
            if not forced.form.keyed.quoted:
                lines += _loose_texts(schema)
        told |= dict.fromkeys(line + of_function(name) for line in lines)
    return (*told,)


def of_function(name: str) -> str:
    """Return the end of a line of `unenforced_parts` on the function `name` ends."""
    return f" (arguments of {name})"


def _loose_texts(schema: Schema) -> Iterator[str]:
    for key, part in schema.get("properties", {}).items():
        words = _followed(part, schema).keys()
        if not words & {"enum", "const"} and kinds(part, schema) <= {"string"}:
            yield from (f'"{word}" of {key}' for word in sorted(words & _NOT_IN_TEXTS))


def _followed(schema: Any, whole: Schema) -> Schema:  # noqa: ANN401 - JSON
    found: Schema = schema if isinstance(schema, Mapping) else {}
    for _ in range(_MOST_REFERENCES):
        target = referenced(found.get("$ref"), whole)
        if not isinstance(target, Mapping):
            break
        found = {**target, **{key: value for key, value in found.items() if key != "$ref"}}
    return found


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, forced: ForcedCalls, find_token: FindToken) -> None:
        self._forced = forced
        self._find_token = find_token
        # Where an answer may begin with a brace as well, both must be JSON to the library: it does not take
        # back that it read a brace as text.
        self._whole_objects = forced.otherwise and _OBJECT.fullmatch(forced.form.before + forced.form.after)

    def lines(self) -> Iterator[str]:
        """Yield all rules, a line of Lark each."""
        forced, form = self._forced, self._forced.form
        before, end, between = form.before, form.end, form.between or ""
        if self._whole_objects:
            before, end, between = "", end.removeprefix("}"), between.removeprefix("}").partition("{")[0]
        more = f"({self._text(between)} call)*" if forced.many and between else ""
        before, end = self._text(before), self._text(end)
        thought = "thought " if forced.thought_end else ""
        answer = f"{before} call {more} {end}"
        if forced.otherwise:
            answer = "(calls | @answer)"
            yield f"calls: {before} call {more} {end}"
        yield f"start: {thought}{answer}"
        if forced.thought_end:
            yield from self.thought(forced.thought_end)
        yield "call: " + " | ".join(f"call_{i}" for i, _ in enumerate(forced.functions))
        for i, (name, parameters) in enumerate(forced.functions.items()):
            schema = arguments_schema(parameters)
            if form.keyed:
                yield from self._keyed(f"call_{i}", name, schema, form.keyed)
            elif self._whole_objects:
                yield f"call_{i}: {json_expression(_call_object(form, name, schema))}"
            else:
                yield f"call_{i}: {write_json(name)} {self._text(form.after)} {json_expression(schema)}"

    def thought(self, end: str) -> Iterator[str]:
        yield "thought: " + self._up_to(end, "thinking") + " /[ \\n]{0,4}/"
        if self._find_token(end) is None:
            yield f"thinking[lazy]: /{_ANYTHING}{_regex(end)}/"

    def _up_to(self, end: str, rule: str) -> str:
        """Return the expression of text that ends with `end`: a lazy rule, or any text before a token."""
        token = self._find_token(end)
        return rule if token is None else f"/{_ANYTHING}/ <[{token}]>"

    def _text(self, text: str) -> str:
        """Return a text of the form as an expression: literals, control tokens, and ids of calls."""
        made = []
        for part in _MARKER.split(text):
            token = self._find_token(part) if _MARKER.fullmatch(part) else None
            if token is not None:
                made.append(f"<[{token}]>")
                continue
            for i, piece in enumerate(part.split(CALL_ID)):
                if i:
                    made.append(f"/{_ID}/")
                if piece:
                    made.append(write_json(piece))
        return " ".join(made)

    # ---- arguments one by one ----

    def _keyed(self, rule: str, name: str, schema: Schema, keyed: ArgumentForm) -> Iterator[str]:
        """Yield the rules of a call whose arguments come in the schema's order.

        `RULE_I_first` are the arguments from number I where none has come yet, `RULE_I_more` where one has.
        """
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        none, closing = self._text(keyed.none), keyed.closing
        following = self._text(keyed.following.removeprefix(closing))
        yield f"{rule}: {write_json(name)} {rule}_0_first"
        for i, (key, part) in enumerate(properties.items()):
            pair = f"{write_json(key)} {self._text(keyed.equals)} {rule}_{i}_value {rule}_{i + 1}_more"
            first, more = f"{self._text(keyed.first)} {pair}", f"{following} {pair}"
            optional = key not in required
            yield from self._value(f"{rule}_{i}_value", part, schema, keyed)
            yield f"{rule}_{i}_first: {first}" + (f" | {rule}_{i + 1}_first" if optional else "")
            yield f"{rule}_{i}_more: {more}" + (f" | {rule}_{i + 1}_more" if optional else "")
        n = len(properties)
        yield f"{rule}_{n}_first: {none or write_json('')}"
        yield f"{rule}_{n}_more: {write_json('')}"

    def _value(self, rule: str, schema: Any, whole: Schema, keyed: ArgumentForm) -> Iterator[str]:  # noqa: ANN401 - JSON
        """Yield the rule for a value and what closes it."""
        schema = _followed(schema, whole)
        closing, quote = self._text(keyed.closing), self._text(keyed.quote)
        if keyed.quoted:
            yield f"{rule}: ({_python(schema, whole)}) {closing}"
            return
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if choices and all(isinstance(choice, str) for choice in choices):
            yield f"{rule}: {quote} ({' | '.join(map(write_json, choices))}) {quote} {closing}"
        elif kinds(schema, whole) <= {"string"}:
            mark = keyed.quote or keyed.closing
            token, closing = self._find_token(mark.strip()), closing if keyed.quote else ""
            anything = _characters(schema)
            end = "" if token is None else f" <[{token}]>"
            options = "[lazy]" if token is None else ""
            text = f"/{anything}{_regex(mark) if token is None else ''}/{end}"
            if not keyed.quote:
                yield f"{rule}{options}: {text}"
            else:
                yield f"{rule}: {quote} {rule}_text {closing}"
                yield f"{rule}_text{options}: {text}"
        else:
            yield f"{rule}: {json_expression(_with_definitions(schema, whole))} {closing}"


def _characters(schema: Schema) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(?s:.{{{least},{most}}})" if least or most != "" else _ANYTHING


def _regex(text: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "/": "\\/"}
    return "".join(named.get(char) or (f"\\{char}" if char in "\\.+*?()|[]{}^$" else char) for char in text)


def _call_object(form: CallForm, name: str, arguments: Schema) -> dict[str, Any]:
    keys = _OBJECT.fullmatch(form.before + form.after)
    name_key, arguments_key = keys.groups() if keys else ("name", "arguments")
    moved = _moved(arguments, f"#/properties/{arguments_key}")
    properties = {name_key: {"const": name}, arguments_key: moved}
    return {"type": "object", "properties": properties, "required": [*properties]}


def _moved(schema: Any, place: str) -> Any:  # noqa: ANN401 - JSON
    """Return `schema` with the references to itself changed to where it is inserted, `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


def json_expression(schema: Schema) -> str:
    """Return an expression for the JSON values that `schema` allows, spaced as models space them.

    Raises UsageError, which mentions tools.
    """
    source = GrammarSource.json_schema(schema, "tools")
    return "%json " + json.dumps(
        json.loads(source.compiled)["grammars"][0]["json_schema"], ensure_ascii=False
    )


def _python(schema: Schema, whole: Schema) -> str:
    allowed = kinds(schema, whole)
    if allowed == {"boolean"} and "enum" not in schema and "const" not in schema:
        return '"True" | "False"'
    if allowed == {"null"}:
        return '"None"'
    return json_expression(_with_definitions(schema, whole))


def _with_definitions(schema: Schema, whole: Schema) -> dict[str, Any]:
    kept = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    target = referenced(schema.get("$ref"), whole)
    return {**kept, **schema} if target is None or kept else dict(target)


# ---- grammars of calls ----

_KEPT = 16


class CallGrammars:
    """Makes grammars for one model, and caches them: conversations send their tools again."""

    def __init__(self, model: Model) -> None:
        """Make grammars for `model`."""
        self._model = model
        self._kept = lru_cache(maxsize=_KEPT)(self._made)

    def of(self, request: ChatRequest, expected: AnswerForm, answer: Grammar | None) -> Grammar | None:
        """Return the grammar that the answer to `request` is held to; None: none. Raises ApiError.

        `expected`: what the answer may consist of; `answer`: what it must match where it is no call.
        """
        thought_end = expected.thinking[1] if expected.thinking and expected.thinks_at_once else None
        choice, functions = request.tool_choice, expected.functions
        many = request.parallel_tool_calls is not False
        if not functions and not (answer and thought_end):
            return answer
        if functions and choice not in (None, "auto"):
            if isinstance(choice, NamedTool):
                name = choice.function.name
                functions, many = {name: functions[name]}, False
            answer = None
        elif answer is None:
            return None
        form = expected.form or HERMES
        wanted = json.dumps(functions) if functions else ""
        source = answer.source if answer else None
        try:
            grammar = self._kept(form, wanted, many, thought_end, source)
        except UsageError as error:
            raise field_error(error, "tools" if functions else error.field) from None
        strict = tuple(
            of_function(tool.function.name) for tool in request.tools or () if tool.function.strict
        )
        refused = [line for line in grammar.warnings if line.endswith(strict)] if functions else []
        if refused:
            raise ApiError(400, f"cannot be enforced: {', '.join(refused)}", field="tools")
        return grammar

    def _made(
        self, form: CallForm, wanted: str, many: bool, thought_end: str | None, answer: GrammarSource | None
    ) -> Grammar:
        find = self._model.control_token
        warnings = answer.warnings if answer else ()
        if wanted:
            functions: Mapping[str, Mapping[str, Any]] = json.loads(wanted)
            forced = ForcedCalls(form, functions, many, otherwise=answer is not None, thought_end=thought_end)
            lark, warnings = forced_calls(forced, find), (*warnings, *unenforced_parts(forced))
        else:
            lark = after_thought(thought_end or "", find)
        source = answer.inside(lark) if answer else GrammarSource.lark(lark, "tools")
        return Grammar(self._model, replace(source, warnings=warnings))
