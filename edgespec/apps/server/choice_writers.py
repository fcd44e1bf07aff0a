"""Turns the tokens of one generation into an answer of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from edgespec.apps.server.response_schema import (
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    MessageDelta,
    Origins,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm, AnswerReader
from edgespec.apps.server.tool_calls.text_source import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    PlainText,
    ThoughtText,
)
from edgespec.decoding.records import Origin, Result, Token
from edgespec.llama.weights import Model

LEAST = -9999.0
"""OpenAI's stand-in for the logarithm of 0, for which JSON has no number."""


@dataclass(frozen=True)
class AnswerHead:
    """The fields that every answer and chunk of a request has."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, kind: str, model: str, fingerprint: str) -> AnswerHead:
        """Return the head of a new answer; `kind` begins its id."""
        return cls(f"{kind}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)


class AnswerText:
    """The text written so far, with its tokens and the origin of each character."""

    def __init__(self, model: Model, *, keeps_tokens: bool) -> None:
        """Begin with no text; with `keeps_tokens`, keep the tokens for `take`."""
        self.model = model
        self.keeps_tokens = keeps_tokens
        self.n_characters = 0
        self._parts: list[str] = []
        self._n_read = 0  # characters that `part` has passed
        self._unread: list[str] = []  # those after them
        self._origins: list[Origin] = []
        self._starts: list[bool] = []  # whether a token's text begins with the character
        self._waiting: list[tuple[int, Token]] = []  # with the byte at which each begins
        self._n_bytes = self._n_shown = 0
        self._is_replaced = False  # a character that is not valid Unicode

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self._parts)

    def add(self, tokens: Sequence[Token]) -> str:
        """Add `tokens` and return the text that they add."""
        for token in tokens:
            self._origins += [token.origin] * len(token.text)
            self._starts += [i == 0 for i in range(len(token.text))]
            if self.keeps_tokens:
                self._waiting.append((self._n_bytes, token))
                self._n_bytes += len(self.model.piece(token.id))
        added = "".join(token.text for token in tokens)
        self._parts.append(added)
        self._unread.append(added)
        self.n_characters += len(added)
        self._n_shown += len(added.encode())
        self._is_replaced = self._is_replaced or "\ufffd" in added
        return added

    def part(self, start: int, end: int) -> str:
        """Return the characters from `start` to `end`, none of which was returned before."""
        unread, at = "".join(self._unread), self._n_read
        self._n_read, self._unread = end, [unread[end - at :]]
        return unread[start - at : end - at]

    def take(self) -> list[Token]:
        """Return the tokens that the text consists of and that were not taken before.

        A token waits while its text is held back, and is never returned if that text turns out to be part of
        a stop string. Once a character that is not valid Unicode was replaced, positions no longer match, and
        all tokens that have come are returned.
        """
        n_shown = self._n_bytes if self._is_replaced else self._n_shown
        taken = [token for start, token in self._waiting if start < n_shown]
        self._waiting = [(start, token) for start, token in self._waiting if start >= n_shown]
        return taken

    def origins(self, start: int, end: int) -> Origins:
        """Return where the characters from `start` to `end` come from, and how many tokens they are."""
        runs = groupby(self._origins[start:end])
        return Origins(
            origins=[(sum(1 for _ in run), origin) for origin, run in runs],
            n_tokens=sum(self._starts[start:end]),
        )


def finish_reason(result: Result) -> FinishReason:
    """Return why a text ended, in OpenAI's words."""
    return "length" if result.stop_reason in ("length", "context") else "stop"


class ChatChoiceWriter:
    """An answer of a chat completion: `add` tokens as they come, then `finish`; then `choice` has it all."""

    def __init__(self, head: AnswerHead, written: AnswerText, expected: AnswerForm, index: int = 0) -> None:
        """Begin the answer number `index`, of the form that is expected."""
        self._head = head
        self._index = index
        self._written = written
        self._reader = None if expected.is_plain else AnswerReader(expected)
        self._short_ids = expected.short_ids
        self._said: list[str] = []
        self._thought: list[str] = []
        self.n_thought = 0 if expected.thinking else None
        """Tokens of the thoughts; None for a model that does not think."""
        self.calls: list[AnswerToolCall] = []
        """The calls that have begun; all but the last are complete."""
        self._cut = False  # whether the last call is not complete
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> ChatChunk:
        """Return the first chunk: who speaks."""
        return self._chunk(MessageDelta(role="assistant", content=""))

    def add(self, tokens: Sequence[Token]) -> Iterator[ChatChunk]:
        """Yield the chunks of a stream that `tokens` complete: text, thoughts or calls."""
        start = self._written.n_characters
        text = self._written.add(tokens)
        if self._reader:
            yield from self._write(feed(self._reader, self._written.model, tokens))
        elif text:
            yield from self._write([PlainText(start, start + len(text))])

    def finish(self, result: Result) -> Iterator[ChatChunk]:
        """Yield the last chunks, except that of the usage."""
        if self._reader:
            yield from self._write([*self._reader.finish()])
        yield self._chunk(MessageDelta(), self._finish_reason(result))

    def usage(self, usage: Usage) -> ChatChunk:
        """Return the last chunk of a stream: tokens used, as stream_options.include_usage asks."""
        return ChatChunk(**self._begun("chat.completion.chunk"), choices=[], usage=usage)

    def whole(self, choices: list[ChatChoice], usage: Usage) -> ChatCompletion:
        """Return the answer of a request that does not stream."""
        return ChatCompletion(**self._begun("chat.completion"), choices=choices, usage=usage)

    def choice(self, result: Result) -> ChatChoice:
        """Return the whole answer: its message, and why it ended."""
        content = "".join(self._said)
        message = AnswerMessage(
            role="assistant", content=content or (None if self.calls else ""), refusal=None
        )
        if self._thought:
            message.reasoning_content = "".join(self._thought)
        if self.calls:
            message.tool_calls = self.calls
        logprobs = ChatLogprobs(content=self._logprobs) if self._written.keeps_tokens else None
        reason = self._finish_reason(result)
        return ChatChoice(index=self._index, message=message, logprobs=logprobs, finish_reason=reason)

    def _write(self, events: Sequence[Event]) -> Iterator[ChatChunk]:
        for event in _joined(events):
            if isinstance(event, PlainText):
                yield self._write_text(event)
            elif isinstance(event, CallEnd):
                self._cut = not event.complete
            else:
                yield self._chunk(MessageDelta(tool_calls=[self._write_call(event)]))

    def _write_text(self, part: PlainText) -> ChatChunk:
        text = self._written.part(part.start, part.end)
        if isinstance(part, ThoughtText):
            self._thought.append(text)
            chunk = self._chunk(MessageDelta(reasoning_content=text))
        else:
            self._said.append(text)
            chunk = self._chunk(MessageDelta(content=text))
        chunk.edgespec = self._written.origins(part.start, part.end)
        if isinstance(part, ThoughtText) and self.n_thought is not None:
            self.n_thought += chunk.edgespec.n_tokens
        return chunk

    def _write_call(self, event: CallStart | CallArguments) -> ToolCallDelta:
        if isinstance(event, CallArguments):
            self.calls[-1].function.arguments += event.text
            return ToolCallDelta(index=len(self.calls) - 1, function=FunctionDelta(arguments=event.text))
        call_id = secrets.token_hex(16)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        function = FunctionCall(name=event.name, arguments="")
        self.calls.append(AnswerToolCall(id=call_id, type="function", function=function))
        self._cut = True
        return ToolCallDelta(
            index=len(self.calls) - 1,
            id=call_id,
            type="function",
            function=FunctionDelta(name=event.name, arguments=""),
        )

    def _finish_reason(self, result: Result) -> FinishReason:
        ended = finish_reason(result)
        return "tool_calls" if self.calls and not (self._cut and ended == "length") else ended

    def _chunk(self, delta: MessageDelta, reason: FinishReason | None = None) -> ChatChunk:
        choice = ChatChunkChoice(index=self._index, delta=delta, finish_reason=reason)
        if self._written.keeps_tokens and (taken := self._written.take()):
            choice.logprobs = ChatLogprobs(content=[_logprob(self._written.model, token) for token in taken])
            self._logprobs += choice.logprobs.content
        return ChatChunk(**self._begun("chat.completion.chunk"), choices=[choice])

    def _begun(self, kind: str) -> dict[str, Any]:
        return vars(self._head) | {"object": kind}


def feed(reader: AnswerReader, model: Model, tokens: Iterable[Token]) -> list[Event]:
    """The parts that `reader` finds in `tokens`; names of control tokens, never shown, are markers."""
    events: list[Event] = []
    for token in tokens:
        is_marker = model.is_control(token.id)
        marker = model.piece(token.id, special=True).decode(errors="replace") if is_marker else ""
        events += reader.feed(token.text, marker)
    return events


def first_call(expected: AnswerForm, model: Model) -> Callable[[], Callable[[Token], bool]]:
    """Return the condition that ends a text after its first call, for `Options.until`."""

    def begin() -> Callable[[Token], bool]:
        reader = AnswerReader(expected)

        def is_last(token: Token) -> bool:
            feed(reader, model, [token])
            return reader.n_calls > 0

        return is_last

    return begin


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Yield `events` with those that continue each other as one."""
    last: Event | None = None
    for event in events:
        if isinstance(event, PlainText) and type(event) is type(last) and event.start == last.end:
            last = type(event)(last.start, event.end)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            last = CallArguments(last.text + event.text)
        else:
            if last:
                yield last
            last = event
    if last:
        yield last


class TextChoiceWriter:
    """One text of a text completion, used like ChatChoiceWriter."""

    n_thought = None

    def __init__(
        self,
        head: AnswerHead,
        written: AnswerText,
        index: int = 0,
        *,
        echo: str | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """Begin the text number `index`, with `echo`, the text of the tokens `prompt`, if it is not None."""
        self._echo = echo
        self._prompt = prompt
        self._head = head
        self._index = index
        self._written = written
        self._tokens: list[Token] = []
        self._offset = 0  # of the next token's text

    def begin(self) -> TextCompletion | None:
        """Return the first chunk: the prompt, if it is sent back."""
        return self._chunk(self._echo) if self._echo else None

    def add(self, tokens: Sequence[Token]) -> Iterator[TextCompletion]:
        """Yield the chunk of a stream with the text of `tokens`, if they complete any."""
        start = self._written.n_characters
        if text := self._written.add(tokens):
            chunk = self._chunk(text)
            chunk.edgespec = self._written.origins(start, start + len(text))
            yield chunk

    def finish(self, result: Result) -> Iterator[TextCompletion]:
        """Yield the last chunks, except that of the usage."""
        yield self._chunk("", finish_reason(result))

    def usage(self, usage: Usage) -> TextCompletion:
        """Return the last chunk of a stream: tokens used, as stream_options.include_usage asks."""
        return self._made([], usage)

    def whole(self, choices: list[TextChoice], usage: Usage) -> TextCompletion:
        """Return the answer of a request that does not stream."""
        return self._made(choices, usage)

    def choice(self, result: Result) -> TextChoice:
        """Return the whole text, and why it ended."""
        logprobs = None
        if self._written.keeps_tokens:
            tokens = self._tokens if self._echo is None else self._with_prompt(result)
            logprobs, _ = _older_form(self._written.model, tokens)
            if self._echo is not None:
                logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None
        reason = finish_reason(result)
        text = (self._echo or "") + self._written.text
        return TextChoice(index=self._index, text=text, logprobs=logprobs, finish_reason=reason)

    def _chunk(self, text: str, reason: FinishReason | None = None) -> TextCompletion:
        choice = TextChoice(index=self._index, text=text, logprobs=None, finish_reason=reason)
        if self._written.keeps_tokens and (taken := self._written.take()):
            choice.logprobs, self._offset = _older_form(self._written.model, taken, self._offset)
            self._tokens += taken
        return self._made([choice])

    def _with_prompt(self, result: Result) -> list[Token]:
        """Return the tokens of prompt and text, and the one that ended it, which has no text.

        Programs that score texts leave out the last token of an answer of one.
        """
        prompt = [
            Token(token, "", "target", said.logprob if said else None, said.top if said else ())
            for token, said in zip(self._prompt, (None, *result.prompt_logprobs), strict=True)
        ]
        end = [result.end_token] if result.end_token and result.stop_reason == "eog" else []
        return [*prompt, *self._tokens, *end]

    def _made(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        made = TextCompletion(**vars(self._head), object="text_completion", choices=choices)
        if usage:
            made.usage = usage
        return made


def _older_form(model: Model, tokens: Iterable[Token], offset: int = 0) -> tuple[TextLogprobs, int]:
    """Return the logprobs of `tokens`, whose text begins at `offset`, and where it ends."""
    made = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        text = _name(model.piece(token.id, special=True))
        made.tokens.append(text)
        made.token_logprobs.append(max(token.logprob or 0.0, LEAST))
        made.top_logprobs.append(
            {_name(model.piece(i, special=True)): max(value, LEAST) for i, value in token.top}
        )
        made.text_offset.append(offset)
        offset += len(text)
    return made, offset


def _logprob(model: Model, token: Token) -> TokenLogprob:
    likeliest = [_top(model, i, value) for i, value in token.top]
    own = _top(model, token.id, token.logprob or 0.0)
    return TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=likeliest)


def _top(model: Model, token: int, logprob: float) -> TopLogprob:
    piece = model.piece(token, special=True)
    return TopLogprob(token=piece.decode(errors="replace"), logprob=max(logprob, LEAST), bytes=[*piece])


def _name(piece: bytes) -> str:
    """Return a unique name of a token: its text, or its bytes if it is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
