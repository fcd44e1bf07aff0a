"""Turns the chunks of an answer in OpenAI's form into the lines of Ollama's API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.decoding.records import Result, Token
from edgespec.server.api_errors import ApiError
from edgespec.server.choice_writers import ChatChoiceWriter, finish_reason
from edgespec.server.ollama.model_facts import rfc3339
from edgespec.server.ollama.request_reader import with_ollama_names
from edgespec.server.ollama.response_schema import (
    ChatLine,
    GenerateLine,
    OllamaCall,
    OllamaFunction,
    OllamaMessage,
)
from edgespec.server.response_schema import ChatChunk, TokenLogprob, ToolCallDelta, Usage
from edgespec.server.streaming import AnswerWriter

Kind = Literal["chat", "generate"]

_NS = 10**9


@dataclass(frozen=True)
class ContextTokens:
    """The tokens of a conversation by /api/generate, which its next request may send back."""

    prompt: Sequence[int]
    end: int | None
    """The token that ends a turn."""

    def after(self, result: Result) -> list[int]:
        """Return the tokens of the prompt and the answer, which ends as the model ended it."""
        end = [self.end] if result.stop_reason == "eog" and self.end is not None else []
        return [*self.prompt, *result.token_ids, *end]


@dataclass
class LinePart:
    """The part of an answer that a line adds."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def __iadd__(self, other: LinePart) -> LinePart:
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs
        return self


class OllamaWriter(AnswerWriter):
    """Writes an answer in Ollama's form: lines, or one."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        kind: Kind,
        model: str,
        writing: ChatChoiceWriter,
        *,
        began: float,
        context: ContextTokens | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """Begin an answer for the model that the request called `model`.

        `began`: when the request came, by `time.perf_counter`. `context`: makes the last line's.
        `warnings`: what of the request is done only in part.
        """
        self._kind = kind
        self._model = model
        self._writing = writing
        self._began = began
        self._context = context
        self._warnings = warnings
        self._all = LinePart()
        self._call: _PartialCall | None = None  # the one that is being written

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the lines of `tokens`."""
        return "".join(map(self._line, self._parts(self._writing.add(tokens))))

    def finish(self, index: int, result: Result) -> str:
        """Return the last lines."""
        lines, rest = "", LinePart()
        for part in self._last_parts(result):
            if part.content or part.thinking or part.calls:
                lines += self._line(part)
            else:  # the last tokens' logprobs come with the figures
                rest += part
        return lines + self._line(rest, self._end(result))

    def collect(self, index: int, tokens: Sequence[Token]) -> None:
        """Add `tokens`."""
        for part in self._parts(self._writing.add(tokens)):
            self._all += part

    def whole(self, results: Sequence[Result]) -> str:
        """Return the answer."""
        for part in self._last_parts(results[0]):
            self._all += part
        return self._line(self._all, self._end(results[0]))

    def idle(self, *, is_waiting: bool) -> str:
        """Return a line that adds nothing."""
        return self._line(LinePart())

    def queued(self, place: int) -> str:
        """Return nothing: Ollama's clients know of no queue."""
        return ""

    def failed(self, error: ApiError) -> str:
        """Return the line of a stream that failed."""
        return json.dumps({"error": str(with_ollama_names(error))}) + "\n"

    # ---- from chunks ----

    def _last_parts(self, result: Result) -> Iterator[LinePart]:
        yield from self._parts(self._writing.finish(result))
        yield from self._end_call()

    def _parts(self, chunks: Iterable[ChatChunk]) -> Iterator[LinePart]:
        """Yield what `chunks` add; a call comes as one, when it is complete."""
        for chunk in chunks:
            for choice in chunk.choices:
                delta = choice.delta
                if delta.content or delta.tool_calls:
                    yield from self._begin(delta.tool_calls or ())
                thinking = getattr(delta, "reasoning_content", None) or ""
                logprobs = choice.logprobs.content if choice.logprobs else []
                if part := LinePart(delta.content or "", thinking, [], [*logprobs]):
                    yield part

    def _begin(self, deltas: Iterable[ToolCallDelta]) -> Iterator[LinePart]:
        """Yield the call that ends where text or another call begins, and add to the one under way."""
        deltas = [*deltas]
        if not deltas:
            yield from self._end_call()
        for delta in deltas:
            if self._call and self._call.index != delta.index:
                yield from self._end_call()
            if self._call is None:
                self._call = _PartialCall(delta.index)
            self._call.add(delta)

    def _end_call(self) -> Iterator[LinePart]:
        call, self._call = self._call, None
        if call is not None:
            yield call.part()

    # ---- lines ----

    def _line(self, part: LinePart, end: dict[str, Any] | None = None) -> str:
        fields: dict[str, Any] = {"model": self._model, "created_at": rfc3339(time.time())}
        fields |= {"done": end is not None, **(end or {})}
        if part.logprobs:
            fields["logprobs"] = part.logprobs
        line: ChatLine | GenerateLine
        if self._kind == "chat":
            line = ChatLine(**fields, message=OllamaMessage(role="assistant", content=part.content))
            said: OllamaMessage | GenerateLine = line.message
            if part.calls:
                line.message.tool_calls = part.calls
        else:
            said = line = GenerateLine(**fields, response=part.content)
        if part.thinking:
            said.thinking = part.thinking
        return line.model_dump_json(exclude_unset=True) + "\n"

    def _end(self, result: Result) -> dict[str, Any]:
        total_s, stats = time.perf_counter() - self._began, result.stats
        first_s = stats.total_s if stats.ttft_s is None else stats.ttft_s
        end: dict[str, Any] = {
            "done_reason": finish_reason(result),
            "total_duration": _ns(total_s),
            "load_duration": _ns(max(0.0, total_s - stats.total_s)),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": _ns(first_s),
            "eval_count": len(result.token_ids),
            "eval_duration": _ns(stats.total_s - first_s),
            "edgespec": Usage.of(result, warnings=self._warnings).edgespec,
        }
        if self._context is not None:
            end["context"] = self._context.after(result)
        return end


@dataclass
class _PartialCall:
    """A call whose parts come one after another."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, delta: ToolCallDelta) -> None:
        self.id = delta.id or self.id
        self.name = delta.function.name or self.name
        self.arguments += delta.function.arguments or ""

    def part(self) -> LinePart:
        """Return the call; one that was cut off has no object of arguments, and is text."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except ValueError:
            return LinePart(content=f'{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}')
        function = OllamaFunction(index=self.index, name=self.name, arguments=arguments)
        return LinePart(calls=[OllamaCall(id=self.id, function=function)])


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
