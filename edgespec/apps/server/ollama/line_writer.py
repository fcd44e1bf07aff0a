"""Turns the chunks of an answer in OpenAI's form into the lines of Ollama's API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.choice_writers import ChatChoiceWriter, finish_reason
from edgespec.apps.server.ollama.model_facts import rfc3339
from edgespec.apps.server.ollama.request_reader import with_ollama_names
from edgespec.apps.server.ollama.response_schema import (
    ChatLine,
    GenerateLine,
    OllamaCall,
    OllamaFunction,
    OllamaMessage,
)
from edgespec.apps.server.response_schema import AnswerToolCall, ChatChunk, TokenLogprob, Usage
from edgespec.apps.server.streaming import AnswerWriter
from edgespec.decoding.records import PromptProgress, Result, Token

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


class OllamaWriter(AnswerWriter[Token, Result]):
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

        `began`: when the request came, by `time.perf_counter`. `context`: the tokens for the last line's.
        `warnings`: lines on what is done only in part.
        """
        self._kind = kind
        self._model = model
        self._writing = writing
        self._began = began
        self._context = context
        self._warnings = warnings
        self._all = LinePart()
        self._n_calls = 0  # that were written

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

    def reading(self, progress: PromptProgress) -> str:
        """Return nothing: Ollama has no line for it, and none that clients skip."""
        return ""

    def failed(self, error: ApiError) -> str:
        """Return the line of a stream that failed."""
        return json.dumps({"error": str(with_ollama_names(error))}) + "\n"

    # ---- from chunks ----

    def _last_parts(self, result: Result) -> Iterator[LinePart]:
        yield from self._parts(self._writing.finish(result))
        yield from self._new_calls(self._writing.calls)

    def _parts(self, chunks: Iterable[ChatChunk]) -> Iterator[LinePart]:
        """Yield what `chunks` add; a call comes as one, where text or another call begins."""
        for chunk in chunks:
            for choice in chunk.choices:
                delta = choice.delta
                if delta.content or delta.tool_calls:
                    yield from self._new_calls(self._writing.calls[: -1 if delta.tool_calls else None])
                thinking = getattr(delta, "reasoning_content", None) or ""
                logprobs = choice.logprobs.content if choice.logprobs else []
                if part := LinePart(delta.content or "", thinking, [], [*logprobs]):
                    yield part

    def _new_calls(self, complete: Sequence[AnswerToolCall]) -> Iterator[LinePart]:
        """Yield the calls that were not yielded before."""
        for index in range(self._n_calls, len(complete)):
            self._n_calls += 1
            yield _call_part(index, complete[index])

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


def _call_part(index: int, call: AnswerToolCall) -> LinePart:
    """Return a call; one that was cut off has no object of arguments, and is text."""
    name, text = call.function.name, call.function.arguments
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return LinePart(content=f'{{"name": {json.dumps(name)}, "arguments": {text}')
    function = OllamaFunction(index=index, name=name, arguments=arguments)
    return LinePart(calls=[OllamaCall(id=call.id, function=function)])


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
