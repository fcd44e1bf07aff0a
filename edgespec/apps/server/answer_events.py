"""An answer as neutral events: texts, thoughts, calls, ends. Each API's writer gives them its own form."""

from __future__ import annotations

import io
import json
import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from edgespec.apps.server.request_reader import PreparedRequest
from edgespec.apps.server.response_schema import FinishReason, Usage, usage_of
from edgespec.apps.server.streaming import AnswerWriter
from edgespec.apps.server.tool_calls.answer_reader import (
    AnswerForm,
    AnswerReader,
    ReadPart,
    ThoughtText,
    feed,
)
from edgespec.apps.server.tool_calls.call_parser import ReadCall
from edgespec.decoding.records import Origin, Result, Token
from edgespec.llama.weights import Model

LEAST = -9999.0
"""OpenAI's stand-in for the logarithm of 0, for which JSON has no number."""


@dataclass(frozen=True)
class AnswerCall(ReadCall):
    """A call that the model asks for, by its place in the answer and its id."""

    index: int = 0
    id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What some tokens add to text number `index` of an answer, or its end."""

    kind: Literal["text", "thought", "call", "end"]
    index: int = 0
    text: str = ""
    """Of a text or a thought."""
    start: int = 0
    """Where it begins in all that was written."""
    call: AnswerCall | None = None
    tokens: Sequence[Token] = ()
    """Those that have come with it, if they are kept."""
    reason: FinishReason | None = None
    """Why the text ended."""


class AnswerText:
    """The text written so far, with its tokens and the origin of each character."""

    def __init__(self, model: Model, *, keeps_tokens: bool) -> None:
        """Begin with no text; with `keeps_tokens`, keep the tokens for `new_tokens`."""
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
        """The whole text."""
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

    def new_tokens(self) -> list[Token]:
        """Return the tokens of the text that were not returned before.

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
        """Return where the characters from `start` to `end` come from: runs of characters, and tokens."""
        runs = groupby(self._origins[start:end])
        return {
            "origins": [(sum(1 for _ in run), origin) for origin, run in runs],
            "n_tokens": self.n_tokens(start, end),
        }

    def n_tokens(self, start: int, end: int) -> int:
        """Return how many tokens begin in the characters from `start` to `end`."""
        return sum(self._starts[start:end])


class AnswerEvents:
    """The events of a text: `add` tokens as they come, then `finish`."""

    def __init__(self, written: AnswerText, expected: AnswerForm, index: int = 0) -> None:
        """Begin text number `index` of an answer, in the form that is expected."""
        self.written = written
        self.calls: list[AnswerCall] = []
        """The calls so far; all but the last are complete."""
        self.n_thought = 0 if expected.thinking else None
        """Tokens of the thoughts; None for a model that does not think."""
        self.tokens: list[Token] = []
        """The tokens of all events, if they are kept."""
        self._index = index
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

    def add(self, tokens: Sequence[Token]) -> Iterator[AnswerEvent]:
        """Yield the events that `tokens` complete."""
        start = self.written.length
        text = self.written.add(tokens)
        if self._reader:
            yield from self._read(feed(self._reader, self.written.model, tokens))
        elif text:
            yield self._event("text", text, start)

    def finish(self, result: Result) -> Iterator[AnswerEvent]:
        """Yield the last events."""
        if self._reader:
            yield from self._read(self._reader.finish())
        yield self._event("end", reason=self.finish_reason(result))

    def finish_reason(self, result: Result) -> FinishReason:
        """Return why it ended, in OpenAI's words."""
        is_cut = result.stop_reason in ("length", "context")
        if self.calls and (self.calls[-1].complete or not is_cut):
            return "tool_calls"
        return "length" if is_cut else "stop"

    def _read(self, parts: Iterable[ReadPart]) -> Iterator[AnswerEvent]:
        for part in _joined(parts):
            if isinstance(part, ReadCall):
                call_id = secrets.token_hex(16)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
                call = AnswerCall(part.name, part.arguments, part.complete, len(self.calls), call_id)
                self.calls.append(call)
                yield self._event("call", call=call)
            else:
                text = self.written.between(part.start, part.end)
                yield self._event("thought" if isinstance(part, ThoughtText) else "text", text, part.start)

    def _event(
        self,
        kind: Literal["text", "thought", "call", "end"],
        text: str = "",
        start: int = 0,
        call: AnswerCall | None = None,
        reason: FinishReason | None = None,
    ) -> AnswerEvent:
        if kind in self._said:
            self._said[kind].append(text)
        if kind == "thought" and self.n_thought is not None:
            self.n_thought += self.written.n_tokens(start, start + len(text))
        tokens = self.written.new_tokens() if self.written.keeps_tokens else ()
        self.tokens += tokens
        return AnswerEvent(kind, self._index, text, start, call, tokens, reason)


def _joined(parts: Iterable[ReadPart]) -> Iterator[ReadPart]:
    """Yield `parts`, joining texts that continue each other."""
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


class EventWriter(AnswerWriter[Token, Result]):
    """Writes the events of a request's texts in the form of an API; each API has a subclass.

    `write` makes objects of the API of an event, `encode` lines of a stream of them; `answer` makes the whole
    answer once all events were written.
    """

    def __init__(self, request: PreparedRequest, model: Model, *, keeps_tokens: bool = False) -> None:
        """Begin the answer of `model` to `request`; with `keeps_tokens`, events have their tokens."""
        self.request, self.model, self.keeps_tokens = request, model, keeps_tokens
        self.texts = [
            AnswerEvents(AnswerText(model, keeps_tokens=keeps_tokens), text.answer, i)
            for i, text in enumerate(request.texts)
        ]
        """What was written so far of each text."""
        self.results: dict[int, Result] = {}
        """The texts that have ended, by their number."""

    @abstractmethod
    def write(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the parts of a stream for `event`."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
        """Yield the parts of a stream for the `tokens` of text number `index`."""
        for event in self.texts[index].add(tokens):
            yield from self.write(event)

    def last_parts(self, index: int, result: Result) -> Iterator[dict[str, Any]]:
        """Yield what ends a text."""
        self.results[index] = result
        for event in self.texts[index].finish(result):
            yield from self.write(event)

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole answer to a request that does not stream, as JSON text."""
        for i, result in enumerate(results):
            self.drain(self.last_parts(i, result))
        return json.dumps(self.answer(), ensure_ascii=False)

    def usage(self) -> Usage:
        """Return the figures of all texts."""
        thoughts = [text.n_thought for text in self.texts if text.n_thought is not None]
        return usage_of(
            [self.results[i] for i in sorted(self.results)],
            n_prompts=self.request.n_prompts,
            n_thought=sum(thoughts) if thoughts else None,
            warnings=self.request.warnings,
        )

    def logprobs(self, tokens: Iterable[Token]) -> list[dict[str, Any]]:
        """Return the logprobs of tokens, in the form of `TokenLogprob`."""
        return [
            {
                **self._top(token.id, token.logprob or 0.0),
                "top_logprobs": [self._top(*one) for one in token.top],
            }
            for token in tokens
        ]

    def _top(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.model.piece(token, special=True)
        return {"token": piece.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": [*piece]}
