"""Parses one call of a known function, in whichever form it is written; the text may end within it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import (
    is_text,
    literal_json,
    read_json,
    typed_json,
    write_json,
)
from edgespec.apps.server.tool_calls.call_forms import ArgumentForm, CallForm

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")

Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of the functions that may be called, by name."""


@dataclass(frozen=True)
class ReadCall:
    """A call of the function `name`; not `complete`: the text ended amid its arguments."""

    name: str
    arguments: str
    """JSON text of an object; of a call that is not complete its beginning."""
    complete: bool = True


class UnfinishedCallError(Exception):
    """The text ends within what may be a call: `call` is the part so far, if it has a name."""

    def __init__(self, call: ReadCall | None = None) -> None:
        super().__init__()
        self.call = call


class NoCallError(ValueError):
    """The text is no call, whatever follows."""


Parsed = tuple[ReadCall, int]
"""A call, and the position after it."""

_DECODER = json.JSONDecoder(strict=False)
_START = re.compile(r"\s*(?:```(?:json)?\s*)?")
_BEGUN_FENCE = re.compile(r"`{1,3}(?:j|js|jso)?\Z")
_OBJECT = re.compile(r"(?:\[\s*)?(\{)(?=\s*[^\s{])|(?:\[\s*)?\{\s*(\{)")  # some double the braces
_BEGUN_OBJECT = re.compile(r"\[\s*\Z|(?:\[\s*)?\{\s*\Z")
_NAME_FIELD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
    r'"(?:name|tool_name|function)"\s*:\s*"([^"\\]*)"'
)
_ARGUMENTS_FIELD = re.compile(r'"(?:arguments|parameters|args)"\s*:\s*(?=\{)')
_NAME_KEY = re.compile(r'\{\s*"([^"\\]*)"\s*:\s*(?=\{)')  # {NAME: {...}}
_BEGUN_WORD = re.compile(r"\s*[\w+.\-]*\Z")
_GLUE = re.compile(r"[^{]{0,100}")  # between a name and its arguments
_OPEN_MARKER = re.compile(r"[<\[][^<>\[\]{}]{0,60}\Z")
_PYTHON_KEY = re.compile(r"\s*([A-Za-z_$@][\w$@.\-]*)\s*=(?!=)")  # also names that Python does not have
_PIECE = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\"'()\[\]{},]", re.DOTALL)
_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class CallParser:
    """Parses calls of some functions, in some forms among others."""

    def __init__(self, functions: Functions, forms: Sequence[CallForm]) -> None:
        """Parse calls of `functions`, also in `forms`."""
        self._functions = functions
        keyed = [form.keyed for form in forms if form.keyed]
        self._tagged = [_Tagged(form) for form in keyed if not (form.quoted or form.quote)]
        self._marked = next((form for form in keyed if form.quote), None)
        self._reads_python = any(form.quoted for form in keyed)
        edges = {mark for form in forms for mark in (*form.openers[:1], *form.closers)}
        marker = "".join(f"(?!{re.escape(edge)})" for edge in edges) + r"[<\[][^<>\[\]{}]{0,60}[>\]]"
        words = rf"(?:[\w.\-]*(?:[=:\s]|{marker})\s*){{0,4}}"  # before a name: its type, an id
        names = "|".join(map(re.escape, sorted(functions, key=len, reverse=True)))
        self._words = re.compile(words + r"[\w.\-]*")
        self._named = re.compile(rf"{words}(?:functions\.)?({names})(?![\w.\-])")

    def parse(self, text: str, start: int = 0) -> Parsed:
        """Return the call that begins at `start`. Raises NoCallError and UnfinishedCallError."""
        found = _START.match(text, start)
        at = found.end() if found else start
        if at == len(text) or _BEGUN_FENCE.match(text, at) or _BEGUN_OBJECT.match(text, at):
            raise UnfinishedCallError
        if found := _OBJECT.match(text, at):
            return self._object(text, found.start(1) if found[1] else found.start(2))
        if text[at] == "[" and self._reads_python:
            at += 1
        if found := self._named.match(text, at):
            return self._after_name(text, found[1], found.end())
        words = self._words.match(text, at)
        end = words.end() if words else at
        if text.startswith("{", end):
            return self._object(text, end)
        if end == len(text) or _OPEN_MARKER.match(text, end):
            raise UnfinishedCallError
        raise NoCallError

    # ---- objects of JSON ----

    def _object(self, text: str, start: int) -> Parsed:
        """Return the call that the object at `start` expresses."""
        try:
            value, end = _DECODER.raw_decode(text, start)
        except RecursionError:
            raise NoCallError from None
        except json.JSONDecodeError as error:
            return self._broken_object(text, start, error)
        found = call_of(value, self._functions)
        if found is None:
            raise NoCallError
        return found, end

    def _broken_object(self, text: str, start: int, error: json.JSONDecodeError) -> Parsed:
        """Return the call in an object that is cut off, or lacks a bracket: its name and its arguments."""
        is_cut = _is_cut(error)
        end = len(text) if is_cut else error.pos
        name = _NAME_FIELD.match(text, start, end)
        arguments = _ARGUMENTS_FIELD.search(text, name.end(), end) if name else None
        if name is None and (key := _NAME_KEY.match(text, start, end)) and key[1] in self._functions:
            name = arguments = key
        if name and name[1] not in self._functions:
            raise NoCallError
        if name and arguments:
            call, end = self._arguments(text, name[1], arguments.end())
            if not is_cut:
                return call, end
            raise UnfinishedCallError(call)
        raise UnfinishedCallError if is_cut else NoCallError

    def _arguments(self, text: str, name: str, start: int) -> Parsed:
        """Return a call whose arguments are the object at `start`, unchanged if it is no JSON."""
        try:
            value, end = _DECODER.raw_decode(text, start)
        except RecursionError:
            raise NoCallError from None
        except json.JSONDecodeError as error:
            if not _is_cut(error) and (closed := _end_of_brackets(text, start)):
                return ReadCall(name, text[start:closed]), closed
            raise UnfinishedCallError(ReadCall(name, text[start:], complete=False)) from None
        return ReadCall(name, json.dumps(value, ensure_ascii=False)), end

    # ---- a name, and what follows ----

    def _after_name(self, text: str, name: str, at: int) -> Parsed:
        """Return the call of `name`, which ends at `at`; an object, tagged values or no arguments follow."""
        if self._marked and text.startswith(self._marked.none, at):
            return self._marked_object(text, name, at, self._marked.quote)
        for tagged in self._tagged:
            if found := tagged.parse(text, name, at, self._functions[name]):
                return found
        if self._reads_python and text.startswith("(", at):
            return self._python(text, name, at + 1)
        glue = _GLUE.match(text, at)
        at = glue.end() if glue else at
        if text.startswith("{", at):
            return self._arguments(text, name, at)
        if at == len(text):
            raise UnfinishedCallError
        raise NoCallError

    def _marked_object(self, text: str, name: str, start: int, quote: str) -> Parsed:
        """Return the call whose arguments are an object with bare keys, and `quote` around texts."""
        mark = re.escape(quote)
        piece = re.compile(
            rf'{mark}(?P<text>.*?){mark}|{mark}(?P<open>.*)\Z|(?P<json>"(?:[^"\\]|\\.)*")|(?P<sign>[{{}}\[\],:])'
            r"|(?P<word>[^\s,:{}\[\]<]+)(?P<key>\s*:)?|.",
            re.DOTALL,
        )
        made, depth = "", 0
        for found in piece.finditer(text, start):
            if (said := found["text"] if found["open"] is None else found["open"]) is not None:
                made += write_json(said)[: None if found["open"] is None else -1]
            elif found["json"] or found["sign"]:
                sign = found["sign"] or ""
                depth += _DEPTHS.get(sign, 0)
                made += f"{found[0]} " if sign and sign in ",:" else found[0]
            elif word := found["word"]:
                made += f"{write_json(word)}: " if found["key"] else literal_json(word)
            if depth == 0:
                return ReadCall(name, made), found.end()
        raise UnfinishedCallError(ReadCall(name, made, complete=False))

    def _python(self, text: str, name: str, start: int) -> Parsed:
        """Return the call whose arguments begin at `start`, as Python writes them."""
        places = [*self._functions[name].get("properties", {})]
        made: list[str] = []
        for argument, end, sign in _python_arguments(text, start):
            if argument.strip() and sign:
                key = _PYTHON_KEY.match(argument)
                n = len(made)
                named = key[1] if key else places[n] if n < len(places) else f"argument_{n + 1}"
                value = literal_json(argument[key.end() :] if key else argument)
                made.append(f"{write_json(named)}: {value}")
            if sign == ")":
                return ReadCall(name, "{" + ", ".join(made) + "}"), end
        begun = "{" + ", ".join(made) if made else ""
        raise UnfinishedCallError(ReadCall(name, begun, complete=False))


def _end_of_brackets(text: str, start: int) -> int | None:
    """Return the position after the bracket that closes the one at `start`; None if there is none."""
    depth = 0
    for found in _PIECE.finditer(text, start):
        depth += _DEPTHS.get(found[0], 0)
        if not depth:
            return found.end()
    return None


def _python_arguments(text: str, start: int) -> Iterator[tuple[str, int, str]]:
    """Yield each argument with the position after it and the sign that ends it: "," or ")", "" for none."""
    depth, begun = 0, start
    for found in _PIECE.finditer(text, start):
        sign = found[0]
        if sign in ('"', "'"):  # a text that does not end
            break
        if not depth and sign in (",", ")"):
            yield text[begun : found.start()], found.end(), sign
            begun = found.end()
            if sign == ")":
                return
        depth += _DEPTHS.get(sign, 0)
    yield text[begun:], len(text), ""


class _Tagged:
    """Parses arguments that are written one by one, each in tags."""

    def __init__(self, form: ArgumentForm) -> None:
        self._opener = form.opener
        edge = form.none.strip() or form.first.strip()[: -len(form.opener)].strip()
        edges = "|".join(map(re.escape, [edge, *([edge[1:]] if edge[:1] == '"' else [])])) if edge else ""
        self._edge = re.compile(rf"\s*(?:{edges})\s*")
        equals = r"\s*".join(map(re.escape, form.equals.split())) or ">"
        first_line, last_line = (
            "\n?" if end else "" for end in (form.equals[-1:] == "\n", form.closing[:1] == "\n")
        )
        pair = rf"\s*{re.escape(form.opener)}(?P<key>.*?){equals}{first_line}(?P<value>.*?)"
        closing = re.escape(form.closing.strip())
        self._pair = re.compile(rf"{pair}{last_line}{closing}", re.DOTALL)
        self._begun = re.compile(rf"{pair}\Z", re.DOTALL)
        self._closing = form.closing.strip()

    def parse(self, text: str, name: str, at: int, schema: Mapping[str, Any]) -> Parsed | None:
        """Return the call of `name`, whose arguments begin at `at`; None if they are not in this form."""
        edge = self._edge.match(text, at)
        if edge is None:
            if not text[at:].strip():
                raise UnfinishedCallError
            return None
        at = edge.end()
        made: list[str] = []
        while found := self._pair.match(text, at):
            made.append(self._written(found, schema))
            at = found.end()
        rest = text[at:].lstrip()
        if not made and rest and not rest.startswith(("<", self._opener)):
            return None
        begun = "{" + ", ".join(made)
        if rest and not (rest.startswith(self._opener) or self._opener.startswith(rest)):
            return ReadCall(name, begun + "}"), at
        if found := self._begun.match(text, at):
            written = self._written(found, schema, is_cut=True)
            begun += f"{', ' if made else ''}{written}" if written else ""
        elif not rest:
            begun += "}"
        raise UnfinishedCallError(ReadCall(name, begun, complete=False))

    def _written(self, pair: re.Match[str], whole: Mapping[str, Any], *, is_cut: bool = False) -> str:
        """Return a key and its value as JSON; for a string that is cut off, its beginning."""
        key, value = pair["key"].strip(), pair["value"]
        schema = whole.get("properties", {}).get(key)
        schema = schema if isinstance(schema, Mapping) else {}
        if is_cut:
            value = value[: len(value) - n_open(value, [f"\n{self._closing}", self._closing])]
            return f"{write_json(key)}: {write_json(value)[:-1]}" if is_text(schema, whole) else ""
        return f"{write_json(key)}: {typed_json(value, schema, whole)}"


def n_open(text: str, literals: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin one of `literals`."""
    longest = max((len(one) for one in literals), default=0)
    ends = (text[-n:] for n in range(min(longest - 1, len(text)), 0, -1))
    return next((len(end) for end in ends if any(one.startswith(end) for one in literals)), 0)


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Whether invalid JSON may be the beginning of valid JSON."""
    return error.msg.startswith("Unterminated") or bool(_BEGUN_WORD.match(error.doc, error.pos))


def call_of(value: Any, functions: Functions) -> ReadCall | None:  # noqa: ANN401 - JSON
    """Return the call of one of `functions` that a JSON value expresses; None if it is no call."""
    if not isinstance(value, dict):
        return None
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name: Any = next((value[key] for key in (*NAME_KEYS, "function") if key in value), None)
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if name is None:  # {NAME: {...}}
        name = next((key for key, part in value.items() if key in functions and isinstance(part, dict)), None)
        arguments = value.get(name)
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if (
        not isinstance(name, str)
        or name not in functions
        or not isinstance(arguments := arguments or {}, dict)
    ):
        return None
    return ReadCall(name, json.dumps(arguments, ensure_ascii=False))
