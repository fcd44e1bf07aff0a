"""Answers in OpenAI's form, of several texts, one for each prompt or several to choose from; /infill's."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edgespec.apps.server.choice_writers import (
    LEAST,
    AnswerPart,
    AnswerText,
    ChoiceWriter,
    finish_reason,
    token_logprob,
)
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
from edgespec.apps.server.response_schema import Usage
from edgespec.apps.server.streaming import AnswerWriter
from edgespec.decoding.records import Result, StopReason, Token
from edgespec.llama.weights import Model

# ---- one of the texts ----


class ChoiceForm(ABC):
    """Writes one text as a choice of an answer or of its chunks, which are dicts."""

    def __init__(self, writing: ChoiceWriter) -> None:
        """Write what comes of `writing`."""
        self.writing = writing

    @abstractmethod
    def begin(self) -> dict[str, Any] | None:
        """The choice of the first chunk; None: there is none."""

    @abstractmethod
    def part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks that add `part`."""

    @abstractmethod
    def whole(self, result: Result) -> dict[str, Any]:
        """Return the choice of an answer that does not stream."""


class ChatForm(ChoiceForm):
    """Writes the choices of a chat completion."""

    def begin(self) -> dict[str, Any]:
        """Return who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Yield the deltas of `part`: of a call first its name."""
        delta: dict[str, Any] = {}
        if part.kind in ("text", "thought"):
            delta["content" if part.kind == "text" else "reasoning_content"] = part.text
        elif call := part.call:
            function = {"name": call.name, "arguments": ""}
            begun = {"index": call.index, "id": call.id, "type": "function", "function": function}
            delta["tool_calls"] = [begun]
        choice: dict[str, Any] = {"delta": delta}
        if part.tokens:
            choice["logprobs"] = {"content": self._logprobs(part.tokens)}
        yield choice | {"finish_reason": part.reason}
        if call := part.call:
            added = {"index": call.index, "function": {"arguments": call.arguments}}
            yield {"delta": {"tool_calls": [added]}, "finish_reason": None}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the message, and why it ended."""
        writing = self.writing
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = writing.content or (None if writing.calls else "")
        if thoughts := writing.thoughts:
            message["reasoning_content"] = thoughts
        message["refusal"] = None
        if writing.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in writing.calls
            ]
        keeps = writing.written.keeps_tokens
        logprobs = {"content": self._logprobs(writing.tokens)} if keeps else None
        reason = writing.finish_reason(result)
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Iterable[Token]) -> list[dict[str, Any]]:
        return [token_logprob(self.writing.written.model, token) for token in tokens]


class TextForm(ChoiceForm):
    """Writes the choices of a text completion."""

    def __init__(self, writing: ChoiceWriter, *, echo: str | None, prompt: Sequence[int]) -> None:
        """Write a text with `echo`, the text of the tokens `prompt`, before it, if it is not None."""
        super().__init__(writing)
        self._echo, self._prompt = echo, prompt
        self._offset = 0  # of the next token's text

    def begin(self) -> dict[str, Any] | None:
        """Return the prompt, if it is sent back."""
        return {"text": self._echo, "logprobs": None, "finish_reason": None} if self._echo else None

    def part(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Yield the text that is added."""
        logprobs = None
        if part.tokens:
            logprobs, self._offset = _older_form(self.writing.written.model, part.tokens, self._offset)
        yield {"text": part.text, "logprobs": logprobs, "finish_reason": part.reason}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole text, and why it ended."""
        written, logprobs = self.writing.written, None
        if written.keeps_tokens:
            tokens = self.writing.tokens if self._echo is None else self._with_prompt(result)
            logprobs, _ = _older_form(written.model, tokens)
            if self._echo is not None:
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        text = (self._echo or "") + written.text
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason(result)}

    def _with_prompt(self, result: Result) -> list[Token]:
        """Return the tokens of prompt and text, and the one that ended it, which has no text.

        Programs that score texts leave out the last token of an answer of one.
        """
        prompt = [
            Token(token, "", "target", said.logprob if said else None, said.top if said else ())
            for token, said in zip(self._prompt, (None, *result.prompt_logprobs), strict=True)
        ]
        end = [result.end_token] if result.end_token and result.stop_reason == "eog" else []
        return [*prompt, *self.writing.tokens, *end]


def _older_form(model: Model, tokens: Iterable[Token], offset: int = 0) -> tuple[dict[str, Any], int]:
    """Return the `TextLogprobs` of tokens, whose text begins at `offset`, and where it ends."""
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        text = _name(model.piece(token.id, special=True))
        likeliest = {_name(model.piece(i, special=True)): max(value, LEAST) for i, value in token.top}
        made["tokens"].append(text)
        made["token_logprobs"].append(max(token.logprob or 0.0, LEAST))
        made["top_logprobs"].append(likeliest)
        made["text_offset"].append(offset)
        offset += len(text)
    return made, offset


def _name(piece: bytes) -> str:
    """Return a unique name of a token: its text, or its bytes if it is part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


# ---- the answer ----


class OpenAIWriter(AnswerWriter[Token, Result, tuple[int, AnswerPart]]):
    """Writes an answer of several texts as JSON, or its chunks as server-sent events."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        prepared: PreparedRequest,
        model: Model,
        name: str,
        fingerprint: str,
    ) -> None:
        """Begin the answer to `request` of the `model` that is served as `name`."""
        is_chat = isinstance(request, ChatRequest)
        kind = "chatcmpl" if is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": fingerprint,
        }
        self._kind, self._chunk_kind = "text_completion", "text_completion"
        if is_chat:
            self._kind, self._chunk_kind = "chat.completion", "chat.completion.chunk"
        self._prepared = prepared
        self._tells_usage = bool(request.stream_options and request.stream_options.include_usage)
        keeps_tokens = bool(request.logprobs) if is_chat else request.logprobs is not None
        self._forms: list[ChoiceForm] = []
        for text in prepared.texts:
            writing = ChoiceWriter(AnswerText(model, keeps_tokens=keeps_tokens), text.answer)
            form = ChatForm(writing) if is_chat else TextForm(writing, echo=text.echo, prompt=text.tokens)
            self._forms.append(form)
        self._results: dict[int, Result] = {}
        self._logprobs = [0.0] * len(self._forms)

    def begin(self) -> str:
        """Return the events that come before any text."""
        begun = ((i, form.begin()) for i, form in enumerate(self._forms))
        return "".join(self._chunk([{"index": i, **choice}]) for i, choice in begun if choice)

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[tuple[int, AnswerPart]]:
        """Yield what `tokens` of text number `index` complete."""
        self._logprobs[index] += sum(token.logprob or 0.0 for token in tokens)
        for part in self._forms[index].writing.add(tokens):
            yield index, part

    def last_parts(self, index: int, result: Result) -> Iterator[tuple[int, AnswerPart]]:
        """Yield what ends a text."""
        for part in self._forms[index].writing.finish(result):
            yield index, part
        self._results[index] = result

    def encode(self, part: tuple[int, AnswerPart]) -> str:
        """Return the chunks of a part."""
        index, added = part
        told = {}
        if added.kind in ("text", "thought"):
            written = self._forms[index].writing.written
            told["edgespec"] = written.origins(added.start, added.start + len(added.text))
        choices = self._forms[index].part(added)
        return "".join(self._chunk([{"index": index, **choice}], **told) for choice in choices)

    def finish(self, index: int, end: Result) -> str:
        """Return the last chunks of a text, and what ends the answer with its last one."""
        last = super().finish(index, end)
        if len(self._results) < len(self._forms):
            return last
        usage = self._chunk([], usage=self._usage()) if self._tells_usage else ""
        return f"{last}{usage}data: [DONE]\n\n"

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole answer to a request that does not stream, all its texts in it, as JSON text."""
        for i, result in enumerate(results):
            self.drain(self.last_parts(i, result))
        choices = [
            {"index": i, **self._forms[chosen].whole(self._results[chosen])}
            for i, chosen in enumerate(self._chosen())
        ]
        answer = {**self._head, "object": self._kind, "choices": choices, "usage": self._usage()}
        return json.dumps(answer, ensure_ascii=False)

    def _chunk(self, choices: list[dict[str, Any]], **more: object) -> str:
        chunk = {**self._head, "object": self._chunk_kind, "choices": choices, **more}
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    def _usage(self) -> dict[str, Any]:
        told = [form.writing.n_thought for form in self._forms]
        thoughts = [n for n in told if n is not None]
        usage = Usage.of(
            *(self._results[i] for i in sorted(self._results)),
            n_prompts=self._prepared.n_prompts,
            n_thought=sum(thoughts) if thoughts else None,
            warnings=self._prepared.warnings,
        )
        return usage.model_dump(exclude_unset=True)

    def _chosen(self) -> list[int]:
        """Return the texts that are the answer: of each prompt the likeliest by token."""
        n_all, n_best = len(self._forms), self._prepared.n_best
        if n_best is None:
            return [*range(n_all)]
        n_each = n_all // self._prepared.n_prompts
        chosen: list[int] = []
        for start in range(0, n_all, n_each):
            chosen += sorted(range(start, start + n_each), key=self._mean_logprob, reverse=True)[:n_best]
        return chosen

    def _mean_logprob(self, index: int) -> float:
        return self._logprobs[index] / max(1, len(self._results[index].token_ids))


# ---- llama-server's /infill ----


class InfillWriter(AnswerWriter[Token, Result, str]):
    """Turns the tokens of a text into llama-server's answer."""

    def __init__(
        self, request: InfillRequest, model: str, written: AnswerText, prepared: PreparedText
    ) -> None:
        """Begin the answer to `request` by `model`."""
        self._request, self._model, self._written = request, model, written
        self._prepared = prepared
        self._reads_only = request.n_predict == 0
        self._n = 0

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[str]:
        """Yield the text of `tokens`, if they have any."""
        self._n += len(tokens)
        if not self._reads_only and (text := self._written.add(tokens)):
            yield text

    def last_parts(self, index: int, result: Result) -> Iterator[str]:
        """Yield nothing: all text has come."""
        yield from ()

    def encode(self, part: str) -> str:
        """Return the event of a text."""
        n_prompt = len(self._prepared.tokens)
        told = InfillPart(content=part, tokens_predicted=self._n, tokens_evaluated=n_prompt)
        return f"data: {told.model_dump_json()}\n\n"

    def finish(self, index: int, end: Result) -> str:
        """Return the event that ends a stream: the empty text, the reason of the end, and the statistics."""
        return f"data: {self._end(end, streamed=True)}\n\n"

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
