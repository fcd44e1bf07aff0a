"""Splits an answer that comes in pieces into plain text, thoughts and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.apps.server.tool_calls.argument_values import (
    is_text,
    literal_json,
    read_json,
    refuse_constant,
    typed_json,
    write_json,
)
from edgespec.apps.server.tool_calls.call_forms import ArgumentForm, CallForm, markers_in, readable_forms
from edgespec.apps.server.tool_calls.text_source import (
    BracketScan,
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    PlainText,
    Steps,
    TextSource,
    ThoughtText,
    n_open,
)

# ---- answers that consist of calls alone, without tags, fenced, with doubled braces ----


NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")

_BEGINNINGS = ("{", "```json", "```\n{", "<tools>")
_WRAPPING = re.compile(r"^(?:```(?:json)?|<tools>)|(?:```|</tools>)$")
_NEXT = re.compile(r"[^\s},;]|$")  # where the next value begins
_FIRST_KEY = re.compile(r'(?:```(?:json)?|<tools>)?[\s{]*"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?')
_DECIDING = 512  # characters that have the first key of a call, and a function's name
_KEYS = frozenset([*NAME_KEYS, *ARGUMENT_KEYS, "type", "function", "id"])


def may_be_calls(text: str, names: Collection[str]) -> bool:
    """Whether a text that begins with `text` may consist of calls of these functions."""
    text = text.lstrip()
    if not any(text.startswith(start) or start.startswith(text) for start in _BEGINNINGS):
        return False
    if not (first := _FIRST_KEY.match(text)):
        return True
    return first[1] in _KEYS and (first[1] not in NAME_KEYS or first[2] is None or first[2] in names)


def calls_of(text: str, names: Collection[str]) -> list[tuple[Event, ...]]:
    """Return the calls that `text` consists of; [] if it contains anything else."""
    try:
        found = [call_of(value) for value in _values(text)]
    except (ValueError, RecursionError):
        return []
    calls = [call for call in found if call and call[0] in names]
    if len(calls) != len(found):
        return []
    return [(CallStart(name), CallArguments(arguments), CallEnd(complete=True)) for name, arguments in calls]


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of `text` one after another. Raises ValueError for anything between them."""
    text = _WRAPPING.sub("", text.strip()).strip()
    if text.startswith("{{"):
        text = text[1:]  # the closing bracket is skipped like a comma
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    position = 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        yield from value if isinstance(value, list) else [value]
        found = _NEXT.search(text, position)
        position = found.start() if found else len(text)


def call_of(value: Any) -> tuple[str, str] | None:  # noqa: ANN401 - JSON
    """Return the name and the arguments of the call that a JSON value is; None if it is none."""
    if not isinstance(value, dict):
        return None
    if isinstance(inner := value.get("function"), dict):
        value = inner
    name = next((value[key] for key in (*NAME_KEYS, "function") if key in value), None)
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(name, str) or not isinstance(arguments := arguments or {}, dict):
        return None
    json.dumps(arguments, allow_nan=False)  # an infinity is no JSON: ValueError
    return name, write_json(arguments)


# ---- answer_reader ----


# ---- calls in any form ----

Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of the functions that may be called, by name."""


class CallReader:
    """Reads calls of known functions from a source.

    A reader begins where a call may begin, and returns whether there is one. Nothing is emitted before the
    name of a known function and the beginning of its arguments: a text that fails there is no call. All that
    follows is the call's.
    """

    def __init__(self, source: TextSource, emit: Callable[[Event], None], functions: Functions) -> None:
        """Read calls of `functions` from `source`; `emit` gets the events."""
        self._source = source
        self._emit = emit
        self._functions = functions

    def _begin(self, name: str) -> None:
        self._emit(CallStart(name))
        self._source.forget()

    def _add(self, text: str) -> None:
        self._emit(CallArguments(text))
        self._source.forget()

    def _end(self, *, complete: bool) -> None:
        self._emit(CallEnd(complete))


# ---- calls in tags ----

_BARE = re.compile(r"[^\s,:{}\[\]<]+")


class TaggedCallReader(CallReader):
    """Reads tagged arguments, and emits them as one object of JSON."""

    def read_arguments(self, name: str, keyed: ArgumentForm) -> Steps[bool]:
        """Read the arguments of `name`, which are written as `keyed` says."""
        source = self._source
        edge = keyed.none.strip() or keyed.first.strip()[: -len(keyed.opener)].strip()
        yield from source.skip_space()
        if edge and not (yield from source.literal([edge, *([edge[1:]] if edge[:1] == '"' else [])])):
            return False
        following = yield from source.skip_space()
        opened = yield from source.literal([keyed.opener])
        if not opened and following not in ("<", ""):
            return False
        self._begin(name)
        written = "{"
        while opened:
            self._add(written)
            if not (yield from self._read_pair(name, keyed)):
                self._end(complete=False)
                return True
            written = ", "
            yield from source.skip_space()
            opened = yield from source.literal([keyed.opener])
        if source.take_beginning([keyed.opener]):
            self._end(complete=False)
            return True
        self._add("{}" if written == "{" else "}")
        self._end(complete=bool((yield from source.skip_space())))
        return True

    def _read_pair(self, name: str, keyed: ArgumentForm) -> Steps[bool]:
        """Read a key and its value after the key's opener; return whether they are complete."""
        source, whole = self._source, self._functions[name]
        equals, closing = keyed.equals.strip(), keyed.closing.strip()
        key = yield from self._text_until(equals.split()[0] if equals else ">")
        if key is None:
            return False
        for part in equals.split()[1:]:
            yield from source.skip_space()
            yield from source.literal([part])
        if keyed.equals.endswith("\n"):
            yield from source.literal(["\n"])
        schema = _property(whole, key.strip())
        self._add(f"{write_json(key.strip())}: ")
        own_line = keyed.closing.startswith("\n")
        if is_text(schema, whole):
            self._add('"')
            complete = yield from self._stream_text(closing, own_line=own_line)
            self._add('"' if complete else "")
            return complete
        value = yield from self._text_until(closing)
        if value is None:
            return False
        self._add(typed_json(value.removesuffix("\n") if own_line else value, schema, whole))
        return True

    def read_marked(self, name: str, quote: str) -> Steps[None]:
        """Read an object that begins here, in which keys are bare and `quote` stands around texts."""
        source, depth = self._source, 0
        self._begin(name)
        while following := (yield from source.skip_space()):
            if (yield from source.literal([quote])):
                self._add('"')
                if not (yield from self._stream_text(quote, own_line=False)):
                    break
                self._add('"')
            elif source.take_beginning([quote]):
                break
            elif following == '"':  # a text of JSON
                self._add(source.take(1))
                if not (yield from self._copy_string()):
                    break
            elif following in "{[}],:":
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(following, 0)
                self._add(source.take(1) + (" " if following in ",:" else ""))
            else:
                word = (yield from source.word(_BARE)) or source.take(1)
                is_key = (yield from source.skip_space()) == ":"
                self._add(write_json(word) if is_key else literal_json(word))
            if depth == 0:
                self._end(complete=True)
                return
        self._end(complete=False)

    def _copy_string(self) -> Steps[bool]:
        """Emit the rest of a JSON string; return whether it ends."""
        while (char := (yield from self._source.peek())) and char != '"':
            self._add(self._source.take(1 + (char == "\\" and len((yield from self._source.peek(2))) > 1)))
        self._add(self._source.take(1))
        return bool(char)

    def _stream_text(self, closing: str, *, own_line: bool) -> Steps[bool]:
        """Emit text up to `closing` as the inside of a JSON string; return whether that came.

        `own_line`: a line end before it does not count.
        """
        source = self._source
        ends = [f"\n{closing}", closing] if own_line else [closing]
        while True:
            rest = source.rest
            at = rest.find(closing)
            n = at if at >= 0 else len(rest) - n_open(rest, ends)
            if at >= 0 and own_line:
                n -= rest[:at].endswith("\n")
            if n > 0:
                self._add(write_json(source.take(n))[1:-1])
            if at >= 0:
                source.take(at - n + len(closing))
                return True
            if source.ended:
                source.take(len(rest))  # the beginning of what ends it
                return False
            yield

    def _text_until(self, end: str) -> Steps[str | None]:
        """Return the text before `end` and move behind it; None if it does not come."""
        source, parts = self._source, [""]
        while True:
            rest = source.rest
            at = rest.find(end)
            parts.append(source.take(at if at >= 0 else len(rest) - n_open(rest, [end])))
            source.forget()
            if at >= 0:
                source.take(len(end))
                return "".join(parts)
            if source.ended:
                source.take(len(rest))
                return None
            yield


def _property(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = whole.get("properties", {}).get(key)
    return found if isinstance(found, Mapping) else {}


# ---- calls as Python writes them ----

_KEY = re.compile(r"\s*([A-Za-z_$@][\w$@.\-]*)\s*=(?!=)")  # also names that Python does not have


class PythonCallReader(CallReader):
    """Reads calls as Python writes them."""

    def read(self, name: str = "") -> Steps[bool]:
        """Read calls as Python writes them, separated by commas: of `name`, at its bracket, or any."""
        source, found = self._source, False
        while True:
            start = source.position
            yield from source.skip_space()
            name = name or (yield from source.word(_NAME))
            if name not in self._functions or not (yield from source.literal(["("])):
                source.back(start)
                return found
            found = True
            self._begin(name)
            yield from self._read_arguments(name)
            yield from source.skip_space()
            name = ""
            if not (yield from source.literal([","])):
                yield from source.literal(["]"])
                return True

    def _read_arguments(self, name: str) -> Steps[None]:
        source, n = self._source, 0
        places = [*self._functions[name].get("properties", {})]
        while True:
            text, end = yield from self._argument()
            if text.strip() and end:
                key = _KEY.match(text)
                place = places[n] if n < len(places) else f"argument_{n + 1}"
                named = key[1] if key else place
                value = literal_json(text[key.end() :] if key else text)
                self._add(f"{', ' if n else '{'}{write_json(named)}: {value}")
                n += 1
            if end != ",":
                if end:
                    self._add("}" if n else "{}")
                self._end(complete=bool(end))
                return
            source.forget()

    def _argument(self) -> Steps[tuple[str, str]]:
        """Return the text of an argument and the sign that ends it, "," or ")"; "" where the text ends."""
        source, scan = self._source, _PythonScan("\"'")
        parts: list[str] = []
        while True:
            rest = source.rest
            n = scan.advance(rest)
            parts.append(source.take(n))
            source.forget()
            if n < len(rest):
                return "".join(parts), source.take(1)
            if source.ended:
                return "".join(parts), ""
            yield


class _PythonScan(BracketScan):
    """Finds the comma or the bracket that ends an argument, a piece at a time."""

    def advance(self, text: str) -> int:
        for i, char in enumerate(text):
            if not self.quote and not self.depth and char in ",)":
                return i
            self.step(char)
        return len(text)


# ---- calls in JSON ----


@dataclass
class _Object:
    """The part of an object that was read."""

    name: str = ""
    arguments: str = ""
    """Arguments that came before the name."""
    emitted: bool = False
    """Whether a call was emitted."""


class JsonCallReader(CallReader):
    """Reads calls that are JSON objects."""

    def read_list(self) -> Steps[bool]:
        """Read the objects of a list, after its bracket."""
        found = False
        while (yield from self._source.skip_space()) == "{":
            if not (yield from self.read_object()):
                return found
            found = True
            yield from self._source.skip_space()
            yield from self._source.literal([","])
        yield from self._source.literal(["]"])
        return found

    def read_object(self) -> Steps[bool]:
        """Read an object that names a function and has an object of arguments."""
        source, read = self._source, _Object()
        source.take(1)
        if (yield from source.skip_space()) == "{":
            source.take(1)  # some double the braces
        while (following := (yield from source.skip_space())) in ('"', ","):
            if following == ",":
                source.take(1)
            elif not (yield from self._read_pair(read)):
                return read.emitted
        if not read.emitted and read.name and (following == "}" or read.arguments):
            self._begin(read.name)
            self._add(read.arguments or "{}")
            self._end(complete=True)
            read.emitted = True
        if following == "}":
            source.take(1)
        return read.emitted

    def _read_pair(self, read: _Object) -> Steps[bool]:
        """Read a key and its value; return whether the object may go on."""
        source = self._source
        key = yield from self._read_string()
        yield from source.skip_space()
        if key is None or not (yield from source.literal([":"])):
            return False
        value = yield from source.skip_space()
        if key == "function" and value == "{" and not read.emitted:
            read.emitted = yield from self.read_object()
            return read.emitted
        if key in (*NAME_KEYS, "function") and value == '"' and not read.emitted:
            read.name = (yield from self._read_string()) or ""
            return read.name in self._functions
        if key in ARGUMENT_KEYS and value == "{" and read.name and not read.emitted:
            yield from self.stream_object(read.name)
            read.emitted = True
            return True
        if key in self._functions and value == "{" and not (read.name or read.emitted):
            yield from self.stream_object(key)  # {NAME: {...}}
            read.emitted = True
            return True
        raw = yield from self._collect_value()
        if raw is not None and key in ARGUMENT_KEYS and not read.emitted:
            read.arguments = _object_text(raw)
            return bool(read.arguments)
        return raw is not None

    def stream_object(self, name: str) -> Steps[None]:
        """Emit a call whose arguments begin here as a JSON object."""
        self._begin(name)
        complete = yield from self._read_value(self._add)
        self._end(complete=complete)

    def _read_string(self) -> Steps[str | None]:
        raw = yield from self._collect_value()
        try:
            return None if raw is None else str(read_json(raw))
        except ValueError:
            return None

    def _collect_value(self) -> Steps[str | None]:
        """Read a JSON value and return its text; None if the text ends in the middle of it."""
        parts: list[str] = []
        complete = yield from self._read_value(parts.append)
        return "".join(parts) if complete else None

    def _read_value(self, take: Callable[[str], None]) -> Steps[bool]:
        """Read a JSON value; `take` gets its text as it comes. Return whether it is complete."""
        source, scan = self._source, _JsonScan()
        while True:
            rest = source.rest
            n = scan.advance(rest)
            if n:
                take(source.take(n))
            if scan.done or n < len(rest):
                return scan.done
            if source.ended:
                return scan.is_scalar
            yield


class _JsonScan(BracketScan):
    """Finds the end of a JSON value, a piece at a time."""

    _outside = frozenset('{}[],:+-.0123456789 \t\r\n"abcdefghijklmnopqrstuvwxyzEINT')

    def __init__(self) -> None:
        super().__init__('"')
        self.done = False
        self._begun = False

    @property
    def is_scalar(self) -> bool:
        return self._begun and not self.depth and not self.quote

    def advance(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        for i, char in enumerate(text):
            if not self.quote:
                self.done = self.is_scalar and char in ",}] \t\r\n"
                if self.done or char not in self._outside:
                    return i
            self._begun = True
            self.step(char)
            if not self.quote and self.depth <= 0 and char in '"}]':
                self.done = True
                return i + 1
        return len(text)


def _object_text(raw: str) -> str:
    """Return the text of an object that may be written as a string, or be null; "" if it is no object."""
    try:
        value = read_json(raw)
        if isinstance(value, str):
            raw = value
            value = read_json(value)
    except ValueError:
        return ""
    if value is None:
        return "{}"
    return raw if isinstance(value, dict) else ""


_NAME = re.compile(r"[\w.\-]+")
_MARK = re.compile(r"[<\[][^<>\[\]]*[>\]]?")
_MOST_GLUE = 100  # characters between a name and its arguments
_MOST_WORDS = 4  # before a name: its type, an id


class AnyCallReader:
    """Reads calls of known functions from a source, in whichever form they are written."""

    def __init__(
        self,
        source: TextSource,
        emit: Callable[[Event], None],
        functions: Functions,
        forms: Sequence[CallForm],
    ) -> None:
        """Read calls of `functions` from `source`, in `forms` among others; `emit` gets the events."""
        self._source = source
        self._functions = functions
        self._json = JsonCallReader(source, emit, functions)
        self._keyed = TaggedCallReader(source, emit, functions)
        self._python = PythonCallReader(source, emit, functions)
        self._keyed_forms = [form.keyed for form in forms if form.keyed and not form.keyed.quoted]
        self._edges = {mark for form in forms for mark in (*form.openers[:1], *form.closers)}
        self._reads_python = any(form.keyed and form.keyed.quoted for form in forms)

    def read(self) -> Steps[bool]:
        """Read one call, or a list of them."""
        source = self._source
        start = source.position
        following = yield from source.skip_space()
        if following == "`":
            yield from source.literal(["```json", "```"])
            following = yield from source.skip_space()
        if following == "[":
            source.take(1)
            if (yield from source.skip_space()) == "{":
                return (yield from self._json.read_list())
            if self._reads_python:
                return (yield from self._python.read())
        elif following == "{":
            return (yield from self._json.read_object())
        elif following and (yield from self._read_named()):
            return True
        source.back(start)
        return False

    # ---- a name, and what follows ----

    def _read_named(self) -> Steps[bool]:
        """Read a call that begins with its function's name, perhaps after other words and markers."""
        source = self._source
        for _ in range(_MOST_WORDS):
            if (yield from source.skip_space()) == "{":
                return (yield from self._json.read_object())
            word = yield from source.word(_NAME)
            for name in (word, word.removeprefix("functions.")):
                if name in self._functions:
                    return (yield from self._read_after_name(name))
            following = yield from source.peek()
            if following not in ("<", "[", "=", " ", ":") or not (word or following == "<"):
                return False
            if following in ("=", " ", ":"):
                source.take(1)
            elif (yield from source.word(_MARK)) in self._edges:
                return False
        return False

    def _read_after_name(self, name: str) -> Steps[bool]:
        """Read the arguments of `name`: an object, tagged values, or none."""
        source = self._source
        for keyed in self._keyed_forms:
            if keyed.quote:
                if (yield from source.peek()) == keyed.none:
                    yield from self._keyed.read_marked(name, keyed.quote)
                    return True
                continue
            start = source.position
            if (yield from self._keyed.read_arguments(name, keyed)):
                return True
            source.back(start)
        if self._reads_python and (yield from source.peek()) == "(":
            return (yield from self._python.read(name))
        glue = 0
        while glue < _MOST_GLUE and (following := (yield from source.peek())):
            if following == "{":
                yield from self._json.stream_object(name)
                return True
            source.take(1)
            glue += 1
        return False


@dataclass(frozen=True)
class AnswerForm:
    """The parts that an answer may have: calls, thoughts, text."""

    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of the arguments, by the functions' names; if empty, no calls are looked for."""
    form: CallForm | None = None
    """The model's own form of calls; None if it is not known."""
    thinking: tuple[str, str] | None = None
    """The markers that thoughts begin and end with; None if the model has none."""
    thinks_at_once: bool = False
    """Whether the prompt ends where a thought has begun."""
    forced: bool = False
    """Whether the answer can be nothing but calls."""

    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""

    @property
    def is_plain(self) -> bool:
        """Whether the answer is nothing but text."""
        return not self.functions and not self.thinking


PLAIN = AnswerForm()
"""Nothing but text."""


class AnswerReader:
    """Reads one answer. Text is emitted as soon as it cannot be a part of a call any more."""

    def __init__(self, expected: AnswerForm) -> None:
        """Begin to read an answer in the form that is expected."""
        self._expected = expected
        forms = readable_forms(expected.form) if expected.functions else ()
        self._source = TextSource()
        self._events: list[Event] = []
        self._bodies = AnyCallReader(self._source, self._emit, expected.functions, forms)
        self._openers = tuple(dict.fromkeys(opener for form in forms for opener in form.openers))
        self._closers = tuple(dict.fromkeys(closer for form in forms for closer in form.closers))
        own = expected.form
        self._is_bare = bool(own and own.is_bare and expected.functions)
        thinking = (marker for part in expected.thinking or () for marker in markers_in(part))
        self._markers = frozenset([*thinking, *(marker for form in forms for marker in form.markers)])
        self._emitted = 0  # the position up to which all is decided
        self._called = False
        self.n_calls = 0
        """Calls that have ended."""
        self._steps = self._read()

    def feed(self, text: str, marker: str = "") -> Iterator[Event]:
        """Add a token's text, and yield what is certain now; `marker`: the name of a control token."""
        self._source.feed(text)
        if marker in self._markers:
            self._source.feed(marker, hidden=True)
        yield from self._advance()

    def finish(self) -> Iterator[Event]:
        """Yield what was held back: the answer ends here."""
        self._source.ended = True
        yield from self._advance()

    def _advance(self) -> Iterator[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        yield from events

    def _emit(self, event: Event) -> None:
        self._called = self._called or isinstance(event, CallStart)
        self.n_calls += isinstance(event, CallEnd)
        self._events.append(event)

    def _decide(self, kind: type[PlainText] | None = None) -> None:
        start, end = self._source.visible(self._emitted), self._source.visible(self._source.position)
        self._emitted = self._source.position
        if kind and end > start:
            self._emit(kind(start, end))
        self._source.forget()

    # ---- the parts of an answer, in order ----

    def _read(self) -> Steps[None]:
        yield from self._read_thoughts()
        if not (yield from self._read_bare()):
            yield from self._read_text()
        if self._expected.forced and not self._called and len(self._expected.functions) == 1:
            self._emit(CallStart(next(iter(self._expected.functions))))
            self._emit(CallEnd(complete=False))

    def _read_thoughts(self) -> Steps[None]:
        """Read a thought, if the answer begins with one."""
        if self._expected.thinking is None:
            return
        opener, closer = self._expected.thinking
        yield from self._source.skip_space()
        if not (yield from self._source.literal([opener])) and not self._expected.thinks_at_once:
            self._source.back(self._emitted)
            return
        yield from self._source.skip_space()
        self._decide()
        yield from self._emit_until([closer], ThoughtText)
        yield from self._source.literal([closer])
        yield from self._source.skip_space()
        self._decide()

    def _emit_until(self, ends: Sequence[str], kind: type[PlainText]) -> Steps[str]:
        """Emit text up to the first of `ends` and the white space before it; return that, "" for none."""
        pattern = re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)")
        while True:
            rest = self._source.rest
            found = pattern.search(rest)
            waits = not self._source.ended or self._expected.forced
            stop = found.start() if found else len(rest) - (n_open(rest, ends) if waits else 0)
            self._source.take(len(rest[:stop].rstrip()))
            if self._source.position > self._emitted:
                self._decide(kind)
            if found:
                self._source.take(stop - len(rest[:stop].rstrip()))
                return found.group()
            if self._source.ended:
                return ""
            yield

    def _read_text(self) -> Steps[None]:
        """Read text and calls to the end."""
        while (yield from self._emit_until(self._openers, PlainText)):
            start = self._source.position
            if (yield from self._read_calls()):
                self._decide()
            elif self._expected.forced and self._source.ended:
                self._source.take(len(self._source.rest))  # the beginning of a call without a name
                self._decide()
            else:
                self._source.back(start)
                yield from self._source.literal(self._openers)
                self._decide(PlainText)
        if not self._called or self._source.rest.strip():
            self._source.take(len(self._source.rest))
            self._decide(None if self._expected.forced else PlainText)

    def _read_bare(self) -> Steps[bool]:
        """Read an answer that consists of calls without markers; False if it does not."""
        if not self._expected.functions:
            return False
        if (yield from self._source.skip_space()) in ("{", "[") and self._is_bare:
            if (yield from self._read_calls(marked=False)):
                self._decide()
                return False  # text may follow
            if self._expected.forced and self._source.ended:
                self._source.take(len(self._source.rest))
                self._decide()
                return True
        self._source.back(self._emitted)
        functions, n_seen = self._expected.functions, 0
        while n_seen > _DECIDING or may_be_calls(self._source.rest, functions):
            if self._source.ended:
                calls = calls_of(self._source.rest, functions)
                for event in (event for call in calls for event in call):
                    self._emit(event)
                return bool(calls)
            n_seen = self._source.n_left
            yield
        return False

    def _read_calls(self, *, marked: bool = True) -> Steps[bool]:
        """Read a call and those that follow without text between; False if there is none."""
        found = False
        while True:
            start = self._source.position
            if marked:
                yield from self._read_openers()
            if not (yield from self._bodies.read()):
                self._source.back(start)
                return found
            found = True
            self._decide()
            closed = yield from self._read_closers()
            self._decide()
            start = self._source.position
            following = yield from self._source.skip_space()
            goes_on = following in ("{", "[") and not closed
            marked = not goes_on
            if marked and not (yield from self._source.literal(self._openers)):
                self._source.back(start)
                return True
            self._source.back(start)
            yield from self._source.skip_space()

    def _read_openers(self) -> Steps[None]:
        while (yield from self._source.literal(self._openers)):
            yield from self._source.skip_space()

    def _read_closers(self) -> Steps[bool]:
        """Move over what closes a call; return whether that was a marker."""
        closers, closed = [*self._closers, *"}],;", "```"], False
        while True:
            start = self._source.position
            yield from self._source.skip_space()
            if not (found := (yield from self._source.literal(closers))):
                if not self._source.take_beginning(closers):
                    self._source.back(start)
                return closed
            closed = closed or found in self._closers
