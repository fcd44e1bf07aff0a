"""Answers in OpenAI's form, of several texts, one for each prompt or several to choose from; /infill's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from edgespec.apps.server.choice_writers import AnswerHead, AnswerText, ChatChoiceWriter, TextChoiceWriter
from edgespec.apps.server.request_reader import PreparedRequest, PreparedText
from edgespec.apps.server.request_schema import (
    ChatRequest,
    CompletionRequest,
    InfillAnswer,
    InfillPart,
    InfillRequest,
    InfillTimings,
    StopType,
)
from edgespec.apps.server.response_schema import ChatChunk, ChatCompletion, TextCompletion, Usage
from edgespec.apps.server.streaming import AnswerWriter
from edgespec.decoding.records import Result, StopReason, Token
from edgespec.llama.weights import Model

Chunk = ChatChunk | TextCompletion
Writing = ChatChoiceWriter | TextChoiceWriter


class ChoicesWriter:
    """Turns the tokens of a request's texts, each by its index, into an answer, whole or in chunks."""

    def __init__(self, prepared: PreparedRequest, writings: Sequence[Writing]) -> None:
        """Begin an answer of which each text has one of `writings`."""
        self._prepared = prepared
        self._writings = writings
        self._results: dict[int, Result] = {}
        self._logprobs = [0.0] * len(writings)

    @classmethod
    def of(
        cls,
        request: ChatRequest | CompletionRequest,
        prepared: PreparedRequest,
        model: Model,
        name: str,
        fingerprint: str,
    ) -> ChoicesWriter:
        """Begin the answer to `request` of the `model` that is served as `name`."""
        is_chat = isinstance(request, ChatRequest)
        head = AnswerHead.new("chatcmpl" if is_chat else "cmpl", name, fingerprint)
        keeps_tokens = bool(request.logprobs) if is_chat else request.logprobs is not None
        writings: list[Writing] = []
        for i, text in enumerate(prepared.texts):
            written = AnswerText(model, keeps_tokens=keeps_tokens)
            writings.append(
                ChatChoiceWriter(head, written, text.answer, i)
                if is_chat
                else TextChoiceWriter(head, written, i, echo=text.echo, prompt=text.tokens)
            )
        return cls(prepared, writings)

    @property
    def is_complete(self) -> bool:
        """Whether all texts have ended."""
        return len(self._results) == len(self._writings)

    @property
    def results(self) -> list[Result]:
        """The results of the texts that have ended."""
        return [self._results[i] for i in sorted(self._results)]

    def begin(self) -> Iterator[Chunk]:
        """Yield the chunks that come before any text."""
        for writing in self._writings:
            if chunk := writing.begin():
                yield chunk

    def add(self, index: int, tokens: Sequence[Token]) -> Iterator[Chunk]:
        """Yield the chunks that `tokens` of text number `index` complete."""
        self._logprobs[index] += sum(token.logprob or 0.0 for token in tokens)
        yield from self._writings[index].add(tokens)

    def finish(self, index: int, result: Result) -> Iterator[Chunk]:
        """Yield the last chunks of a text, which has ended."""
        yield from self._writings[index].finish(result)
        self._results[index] = result

    def usage(self) -> Chunk:
        """Return the chunk of stream_options.include_usage, once it is complete."""
        return self._writings[0].usage(self._usage())

    def whole(self) -> ChatCompletion | TextCompletion:
        """Return the answer of a request that does not stream, once it is complete."""
        choices: list[Any] = [self._writings[i].choice(self._results[i]) for i in self._chosen()]
        for index, choice in enumerate(choices):
            choice.index = index
        return self._writings[0].whole(choices, self._usage())

    def _usage(self) -> Usage:
        thoughts = [writing.n_thought for writing in self._writings if writing.n_thought is not None]
        return Usage.of(
            *self.results,
            n_prompts=self._prepared.n_prompts,
            n_thought=sum(thoughts) if thoughts else None,
            warnings=self._prepared.warnings,
        )

    def _chosen(self) -> list[int]:
        """Return the texts that are the answer: of each prompt the likeliest by token."""
        n_all, n_best = len(self._writings), self._prepared.n_best
        if n_best is None:
            return [*range(n_all)]
        n_each = n_all // self._prepared.n_prompts
        chosen: list[int] = []
        for start in range(0, n_all, n_each):
            chosen += sorted(range(start, start + n_each), key=self._mean_logprob, reverse=True)[:n_best]
        return chosen

    def _mean_logprob(self, index: int) -> float:
        return self._logprobs[index] / max(1, len(self._results[index].token_ids))


class OpenAIWriter(AnswerWriter[Token, Result]):
    """Writes an answer of several texts as JSON, or its chunks as server-sent events."""

    def __init__(self, writing: ChoicesWriter, *, usage: bool) -> None:
        """Write what `writing` makes; with `usage` a stream ends with a chunk of it."""
        self._writing = writing
        self._usage = usage

    def begin(self) -> str:
        """Return the events that come before any text."""
        return _events(self._writing.begin())

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the events that `tokens` of text number `index` complete."""
        return _events(self._writing.add(index, tokens))

    def finish(self, index: int, result: Result) -> str:
        """Return the last chunks of a text, and what ends the answer with its last one."""
        last = _events(self._writing.finish(index, result))
        if not self._writing.is_complete:
            return last
        return last + (_events([self._writing.usage()]) if self._usage else "") + "data: [DONE]\n\n"

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole answer to a request that does not stream, all its texts in it, as JSON text."""
        for i, result in enumerate(results):
            self.finish(i, result)
        return self._writing.whole().model_dump_json(exclude_unset=True)


def _events(chunks: Iterable[BaseModel]) -> str:
    return "".join(f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n" for chunk in chunks)


# ---- llama-server's /infill ----


class InfillWriter(AnswerWriter[Token, Result]):
    """Turns the tokens of a text into llama-server's answer."""

    def __init__(
        self, request: InfillRequest, model: str, written: AnswerText, prepared: PreparedText
    ) -> None:
        """Begin the answer to `request` by `model`."""
        self._request, self._model, self._written = request, model, written
        self._prepared = prepared
        self._reads_only = request.n_predict == 0
        self._n = 0

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the event of `tokens`, if they have text."""
        text = "" if self._reads_only else self._written.add(tokens)
        self._n += len(tokens)
        if not text:
            return ""
        n_prompt = len(self._prepared.tokens)
        part = InfillPart(content=text, tokens_predicted=self._n, tokens_evaluated=n_prompt)
        return f"data: {part.model_dump_json()}\n\n"

    def finish(self, index: int, result: Result) -> str:
        """Return the event that ends a stream: the empty text, the reason of the end, and the statistics."""
        return f"data: {self._end(result, streamed=True)}\n\n"

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole answer to a request that does not stream, as JSON text."""
        return self._end(results[0], streamed=False)

    def _end(self, result: Result, *, streamed: bool) -> str:
        n = 0 if self._reads_only else len(result.token_ids)
        stats = result.stats
        decoding_s = max(0.0, stats.total_s - (stats.ttft_s or stats.total_s))
        stops = self._request.stop or []
        word = stops if isinstance(stops, str) else stops[0] if len(stops) == 1 else ""
        answer = InfillAnswer(
            content="" if streamed else self._written.text,
            model=self._model,
            tokens_predicted=n,
            tokens_evaluated=result.prompt_tokens,
            tokens_cached=result.prompt_tokens + n,
            has_new_line="\n" in self._written.text,
            truncated=self._prepared.is_cut,
            stop_type=_stop_type(result.stop_reason, has_stops=bool(stops)),
            stopping_word=word if result.stop_reason == "stop" else "",
            timings=InfillTimings(
                cache_n=result.n_cached,
                prompt_n=result.prompt_tokens - result.n_cached,
                prompt_ms=1e3 * stats.prefill_s,
                prompt_per_token_ms=_each_ms(stats.prompt_tokens_per_s),
                prompt_per_second=stats.prompt_tokens_per_s,
                predicted_n=n,
                predicted_ms=1e3 * decoding_s,
                predicted_per_token_ms=_each_ms(stats.generation_tokens_per_s),
                predicted_per_second=stats.generation_tokens_per_s,
            ),
            edgespec=Usage.of(result, warnings=self._request.warnings).edgespec,
        )
        whole = answer.model_dump()
        if not answer.edgespec.warnings:
            del whole["edgespec"]["warnings"]
        wanted = self._request.response_fields
        return json.dumps(_picked(whole, wanted) if wanted else whole, ensure_ascii=False)


def _each_ms(rate: float | None) -> float | None:
    return 1e3 / rate if rate else None


def _stop_type(reason: StopReason, *, has_stops: bool) -> StopType:
    if reason == "eog":
        return "eos"
    return "word" if reason == "stop" and has_stops else "limit"


def _picked(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        value: Any = answer
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
