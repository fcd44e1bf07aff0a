"""Turns the tokens of one generation into the parts of an answer, which each API writes in its own form."""

from __future__ import annotations

import io
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from edgespec.apps.server.response_schema import FinishReason
from edgespec.apps.server.tool_calls.answer_reader import (
    PLAIN,
    AnswerForm,
    AnswerReader,
    ReadPart,
    ThoughtText,
)
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.decoding.records import Origin, Result, Token
from edgespec.llama.weights import Model

LEAST = -9999.0
"""OpenAI's stand-in for the logarithm of 0, for which JSON has no number."""


class AnswerText:
    """The text written so far, with its tokens and the origin of each character."""

    def __init__(self, model: Model, *, keeps_tokens: bool) -> None:
        """Begin with no text; with `keeps_tokens`, keep the tokens for `take`."""
        self.model = model
        self.keeps_tokens = keeps_tokens
        self.length = 0
        """Characters of the text."""
        self._text = io.StringIO()
        self._origins: list[Origin] = []
        self._starts: list[bool] = []  # whether a token's text begins with the character
        self._waiting: deque[tuple[int, Token]] = deque()  # with the byte at which each begins
        self._n_bytes = self._n_shown = 0  # of the tokens, and of the text
        self._is_exact = True  # whether the positions of tokens and of text are the same

    @property
    def text(self) -> str:
        """All of it."""
        return self._text.getvalue()

    def add(self, tokens: Sequence[Token]) -> str:
        """Add `tokens` and return the text that they add."""
        for token in tokens:
            self._origins += [token.origin] * len(token.text)
            self._starts += [i == 0 for i in range(len(token.text))]
            if self.keeps_tokens:
                self._waiting.append((self._n_bytes, token))
                self._n_bytes += len(self.model.piece(token.id))
        added = "".join(token.text for token in tokens)
        self._text.write(added)
        self.length += len(added)
        if self.keeps_tokens:
            self._n_shown += len(added.encode())
            self._is_exact = self._is_exact and "\ufffd" not in added
        return added

    def between(self, start: int, end: int) -> str:
        """Return the characters from `start` to `end`."""
        self._text.seek(start)
        found = self._text.read(end - start)
        self._text.seek(0, io.SEEK_END)
        return found

    def take(self) -> list[Token]:
        """Return the tokens that the text consists of and that were not taken before.

        A token waits while its text is held back, and is never returned if that text turns out to be part of
        a stop string. Once a character that is not valid Unicode was replaced, positions no longer match, and
        all tokens that have come are returned.
        """
        n_shown = self._n_shown if self._is_exact else self._n_bytes
        taken = []
        while self._waiting and self._waiting[0][0] < n_shown:
            taken.append(self._waiting.popleft()[1])
        return taken

    def origins(self, start: int, end: int) -> dict[str, Any]:
        """Return where the characters from `start` to `end` come from, as `Origins` has it."""
        runs = groupby(self._origins[start:end])
        return {
            "origins": [(sum(1 for _ in run), origin) for origin, run in runs],
            "n_tokens": self.n_tokens(start, end),
        }

    def n_tokens(self, start: int, end: int) -> int:
        """Return how many tokens begin in the characters from `start` to `end`."""
        return sum(self._starts[start:end])


def finish_reason(result: Result) -> FinishReason:
    """Return why a text ended, in OpenAI's words."""
    return "length" if result.stop_reason in ("length", "context") else "stop"


@dataclass(slots=True)
class AnswerCall:
    """A call that the model asks for."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON text of an object; of a call that was cut off its beginning."""
    complete: bool = True
    """Whether it was not cut off."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What some tokens add to an answer; `end` says why it ended."""

    kind: Literal["text", "thought", "call", "end"]
    text: str = ""
    """Of a text or a thought."""
    start: int = 0
    """Where a text or a thought begins in all that was written."""
    call: AnswerCall | None = None
    tokens: Sequence[Token] = ()
    """Those that have come with it, if they are kept."""
    reason: FinishReason | None = None


class ChoiceWriter:
    """An answer to a request, or one of several: `add` tokens as they come, then `finish`."""

    def __init__(self, written: AnswerText, expected: AnswerForm = PLAIN) -> None:
        """Begin an answer of the form that is expected."""
        self.written = written
        self.calls: list[AnswerCall] = []
        """The calls so far; all but the last are complete."""
        self.n_thought = 0 if expected.thinking else None
        """Tokens of the thoughts; None for a model that does not think."""
        self.tokens: list[Token] = []
        """The tokens of all parts, if they are kept."""
        self._reader = None if expected.is_plain else AnswerReader(expected)
        self._short_ids = expected.short_ids
        self._said: dict[str, list[str]] = {"text": [], "thought": []}

    @property
    def content(self) -> str:
        """The text outside thoughts and calls."""
        return "".join(self._said["text"])

    @property
    def thoughts(self) -> str:
        """The text of the thoughts."""
        return "".join(self._said["thought"])

    def add(self, tokens: Sequence[Token]) -> Iterator[AnswerPart]:
        """Yield the parts that `tokens` complete."""
        start = self.written.length
        text = self.written.add(tokens)
        if self._reader:
            yield from self._parts(feed(self._reader, self.written.model, tokens))
        elif text:
            yield self._part("text", text, start)

    def finish(self, result: Result) -> Iterator[AnswerPart]:
        """Yield the last parts."""
        if self._reader:
            yield from self._parts(self._reader.finish())
        yield self._part("end", reason=self.finish_reason(result))

    def finish_reason(self, result: Result) -> FinishReason:
        """Return why it ended."""
        ended = finish_reason(result)
        cut = ended == "length" and self.calls and not self.calls[-1].complete
        return "tool_calls" if self.calls and not cut else ended

    def _parts(self, read: Iterable[ReadPart]) -> Iterator[AnswerPart]:
        for part in _joined(read):
            if isinstance(part, ReadCall):
                call_id = secrets.token_hex(16)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
                self.calls.append(
                    AnswerCall(len(self.calls), call_id, part.name, part.arguments, part.complete)
                )
                yield self._part("call", call=self.calls[-1])
            else:
                text = self.written.between(part.start, part.end)
                yield self._part("thought" if isinstance(part, ThoughtText) else "text", text, part.start)

    def _part(
        self,
        kind: Literal["text", "thought", "call", "end"],
        text: str = "",
        start: int = 0,
        call: AnswerCall | None = None,
        reason: FinishReason | None = None,
    ) -> AnswerPart:
        if kind in self._said:
            self._said[kind].append(text)
        if kind == "thought" and self.n_thought is not None:
            self.n_thought += self.written.n_tokens(start, start + len(text))
        tokens = self.written.take() if self.written.keeps_tokens else ()
        self.tokens += tokens
        return AnswerPart(kind, text, start, call, tokens, reason)


def feed(reader: AnswerReader, model: Model, tokens: Iterable[Token]) -> list[ReadPart]:
    """The parts that `reader` finds in `tokens`; names of control tokens, never shown, are markers."""
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


def _joined(parts: Iterable[ReadPart]) -> Iterator[ReadPart]:
    """Yield `parts` with texts that continue each other as one."""
    last: ReadPart | None = None
    for part in parts:
        if last and not isinstance(last, ReadCall) and type(part) is type(last) and part.start == last.end:
            last = type(part)(last.start, part.end)
            continue
        if last:
            yield last
        last = part
    if last:
        yield last


def token_logprob(model: Model, token: Token) -> dict[str, Any]:
    """Return the logprobs of a token, as `TokenLogprob` has them."""
    likeliest = [_top(model, i, value) for i, value in token.top]
    return {**_top(model, token.id, token.logprob or 0.0), "top_logprobs": likeliest}


def _top(model: Model, token: int, logprob: float) -> dict[str, Any]:
    piece = model.piece(token, special=True)
    return {"token": piece.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": [*piece]}
