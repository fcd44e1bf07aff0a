"""Splits an answer that comes in pieces into plain text, thoughts and calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.apps.server.tool_calls.any_call import AnyCallReader
from edgespec.apps.server.tool_calls.call_forms import CallForm, markers_in, readable_forms
from edgespec.apps.server.tool_calls.text_source import (
    CallEnd,
    CallStart,
    Event,
    PlainText,
    Steps,
    TextSource,
    ThoughtText,
    n_open,
)
from edgespec.apps.server.tool_calls.untagged_calls import calls_of, may_be_calls


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
        """Emit all up to the cursor as text of this kind, or drop it."""
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
        functions = self._expected.functions
        while may_be_calls(self._source.rest, functions):
            if self._source.ended:
                calls = calls_of(self._source.rest, functions)
                for event in (event for call in calls for event in call):
                    self._emit(event)
                return bool(calls)
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
