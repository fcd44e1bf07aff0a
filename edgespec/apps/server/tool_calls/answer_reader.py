"""Splits an answer that comes in pieces into plain text, thoughts and calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgespec.apps.server.tool_calls.call_forms import CallForm, markers_in, readable_forms
from edgespec.apps.server.tool_calls.call_parser import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    CallParser,
    NoCallError,
    ReadCall,
    UnfinishedCallError,
    n_open,
)
from edgespec.decoding.records import Token
from edgespec.llama.weights import Model

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader that pauses by `yield` when it needs more text."""


@dataclass(frozen=True)
class PlainText:
    """Text outside calls and thoughts: the characters from `start` to `end` of all visible ones."""

    start: int
    end: int


@dataclass(frozen=True)
class ThoughtText(PlainText):
    """Text of the model's thoughts."""


ReadPart = PlainText | ReadCall


# ---- answers that consist only of calls, without tags, fenced, with doubled braces ----

_BEGINNINGS = ("{", "```json", "```\n{", "<tools>")
_FIRST_KEY = re.compile(r'(?:```(?:json)?|<tools>)?[\s{]*"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?')
_KEYS = frozenset([*NAME_KEYS, *ARGUMENT_KEYS, "type", "function", "id"])


# ---- the whole answer ----


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

_MAY_END = re.compile(r"[}\])>]")  # what a call ends with
_SOON = 200  # characters in which a call is told from text as they come


class AnswerReader:
    """Reads one answer. Text is emitted as soon as it cannot be part of a call, a call when it is complete.

    Some of the text may be hidden: markers that are control tokens, which the visible text lacks.
    """

    def __init__(self, expected: AnswerForm) -> None:
        """Begin to read an answer in the form that is expected."""
        self._expected = expected
        forms = readable_forms(expected.form) if expected.functions else ()
        self._parser = CallParser(expected.functions, forms)
        self._openers = tuple(dict.fromkeys(opener for form in forms for opener in form.openers))
        self._closers = tuple(dict.fromkeys(closer for form in forms for closer in form.closers))
        self._opening = re.compile(rf"(?:\s*(?:{_any_of(self._openers)}))*\s*")
        self._closing = re.compile(rf"\s*(?:({_any_of(self._closers)})|[}}\],;]|```|</tools>)")
        self._is_bare = bool(expected.form and expected.form.is_bare)
        self._reads_python = any(form.keyed and form.keyed.quoted for form in forms)
        thinking = (marker for part in expected.thinking or () for marker in markers_in(part))
        self._markers = frozenset([*thinking, *(marker for form in forms for marker in form.markers)])
        self._text = ""  # what is not decided yet
        self._position = 0  # of its first character, counted in all text
        self._hidden: list[tuple[int, int]] = []
        self._n_hidden = 0  # characters hidden before it
        self._ended = False
        self._parts: list[ReadPart] = []
        self.n_calls = 0
        """Calls that have been read."""
        self._steps = self._read()

    def feed(self, text: str, marker: str = "") -> list[ReadPart]:
        """Add a token's text; return the parts now certain. `marker`: the name of a control token."""
        self._text += text
        if marker in self._markers:
            end = self._position + len(self._text)
            self._hidden.append((end, end + len(marker)))
            self._text += marker
        return self._advance()

    def finish(self) -> list[ReadPart]:
        """Return what was held back: the answer ends here."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[ReadPart]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, call: ReadCall) -> None:
        self.n_calls += 1
        self._parts.append(call)

    def _drop(self, n: int, kind: type[PlainText] | None = None) -> None:
        """Drop the first `n` characters, which are decided; emit the visible ones as text of this `kind`."""
        start, end = self._visible(0), self._visible(n)
        self._text, self._position = self._text[n:], self._position + n
        while self._hidden and self._hidden[0][1] <= self._position:
            begun, ended = self._hidden.pop(0)
            self._n_hidden += ended - begun
        if kind and end > start:
            self._parts.append(kind(start, end))

    def _visible(self, n: int) -> int:
        """Return the position in the visible text after the next `n` characters."""
        position = self._position + n
        hidden = sum(min(end, position) - start for start, end in self._hidden if start < position)
        return position - self._n_hidden - hidden

    # ---- the parts of an answer, in order ----

    def _read(self) -> Steps[None]:
        yield from self._read_thoughts()
        if self._expected.functions:
            yield from self._read_bare()
        while opener := (yield from self._emit_until(self._openers, PlainText)):
            if not (yield from self._read_calls()):
                self._drop(len(opener), PlainText)
        if self._text.strip() or not self.n_calls:
            self._drop(len(self._text), None if self._expected.forced else PlainText)
        if self._expected.forced and not self.n_calls and len(self._expected.functions) == 1:
            self._emit(ReadCall(next(iter(self._expected.functions)), "", complete=False))

    def _more(self, *, may_end: bool = False) -> Steps[None]:
        """Wait for more text; `may_end`: if there is much already, until it has what may end a call."""
        n = len(self._text)
        yield
        while may_end and not self._ended and n > _SOON and not _MAY_END.search(self._text, n):
            yield

    def _shown(self, literals: Iterable[str] = ()) -> Steps[str]:
        """Return the text without leading white space, once it is more than the beginning of a literal."""
        while True:
            rest = self._text.lstrip()
            is_begun = not rest or any(one.startswith(rest) and one != rest for one in literals)
            if self._ended or not is_begun:
                return rest
            yield

    def _read_thoughts(self) -> Steps[None]:
        """Read a thought, if the answer begins with one."""
        if self._expected.thinking is None:
            return
        opener, closer = self._expected.thinking
        rest = yield from self._shown([opener])
        if rest.startswith(opener):
            self._drop(len(self._text) - len(rest) + len(opener))
        elif not self._expected.thinks_at_once:
            return
        rest = yield from self._shown()
        self._drop(len(self._text) - len(rest))
        self._drop(len((yield from self._emit_until([closer], ThoughtText))))
        rest = yield from self._shown()
        self._drop(len(self._text) - len(rest))

    def _emit_until(self, ends: Sequence[str], kind: type[PlainText]) -> Steps[str]:
        """Emit text up to the first of `ends` and the white space before it; return these, "" for none."""
        pattern = re.compile(_any_of(ends))
        while True:
            found = pattern.search(self._text)
            waits = not self._ended or self._expected.forced
            stop = found.start() if found else len(self._text) - (n_open(self._text, ends) if waits else 0)
            self._drop(n := len(self._text[:stop].rstrip()), kind)
            if found:
                return self._text[: found.end() - n]
            if self._ended:
                return ""
            yield

    def _read_bare(self) -> Steps[None]:
        """Read calls without markers at the beginning of an answer."""
        rest = yield from self._shown(_BEGINNINGS)
        if self._is_bare and rest[:1] in ("{", "["):
            if not (yield from self._read_calls(marked=False)) and self._expected.forced and self._ended:
                self._drop(len(self._text))
        elif rest.startswith(_BEGINNINGS):
            yield from self._read_only_calls()

    def _read_only_calls(self) -> Steps[None]:
        """Read an answer that is nothing but calls; any other is text."""
        while not (first := _FIRST_KEY.match(self._text.lstrip())) or self._is_call_key(*first.groups()):
            calls, at = list[ReadCall](), 0
            try:
                while self._text[at:].strip():
                    call, at = self._parser.parse(self._text, at)
                    calls.append(call)
                    while found := self._closing.match(self._text, at):
                        at = found.end()
            except NoCallError:
                return
            except UnfinishedCallError:
                calls = []
            if self._ended:
                for call in calls:
                    self._emit(call)
                self._drop(len(self._text) if calls else 0)
                return
            yield from self._more(may_end=True)

    def _is_call_key(self, key: str, value: str | None) -> bool:
        return key in _KEYS and (key not in NAME_KEYS or value is None or value in self._expected.functions)

    def _read_calls(self, *, marked: bool = True) -> Steps[bool]:
        """Read a call and those that follow without text between; False if there is none."""
        found = False
        while True:
            opening = self._opening.match(self._text) if marked else None
            try:
                call, end = self._parser.parse(self._text, opening.end() if opening else 0)
            except NoCallError:
                return found
            except UnfinishedCallError as cut:
                if not self._ended:
                    yield from self._more(may_end=True)
                    continue
                if cut.call:
                    self._emit(cut.call)
                if cut.call or self._expected.forced:  # the beginning of a call without a name is no text
                    self._drop(len(self._text))
                return found or cut.call is not None
            self._emit(call)
            self._drop(end)
            found = True
            closed = yield from self._read_closers()
            rest = yield from self._shown(self._openers)
            goes_on = "," in closed and self._reads_python
            marked = not ((rest[:1] in ("{", "[") and not closed.strip(",")) or goes_on)
            if marked and not rest.startswith(self._openers):
                return True

    def _read_closers(self) -> Steps[str]:
        """Skip the text that closes a call; return the markers in it, and "," for commas."""
        closed, literals = "", (*self._closers, "```")
        while True:
            while found := self._closing.match(self._text):
                closed += found[1] or ("," if found[0].endswith(",") else "")
                self._drop(found.end())
            rest = self._text.strip()
            if not any(one.startswith(rest) for one in literals):
                return closed
            if self._ended:
                self._drop(len(self._text) if rest else 0)
                return closed
            yield


def _any_of(literals: Iterable[str]) -> str:
    """Return a pattern that matches the longest of `literals` possible, or nothing if there are none."""
    return "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)"


def feed(reader: AnswerReader, model: Model, tokens: Iterable[Token]) -> list[ReadPart]:
    """Return what `reader` finds in `tokens`; names of control tokens, never shown, are markers."""
    parts: list[ReadPart] = []
    for token in tokens:
        is_marker = model.is_control(token.id)
        marker = model.piece(token.id, special=True).decode(errors="replace") if is_marker else ""
        parts += reader.feed(token.text, marker)
    return parts


def first_call(expected: AnswerForm, model: Model) -> Callable[[], Callable[[Token], bool]]:
    """Return the condition that ends a text after its first call, for `Options.until`."""

    def begin() -> Callable[[Token], bool]:
        reader = AnswerReader(expected)

        def is_last(token: Token) -> bool:
            feed(reader, model, [token])
            return reader.n_calls > 0

        return is_last

    return begin
