"""Writes answers in OpenAI's form, of one text for each prompt or several to choose from; and /infill's."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edgespec.apps.server.answer_events import LEAST, AnswerEvent, EventWriter
from edgespec.apps.server.request_reader import PreparedRequest
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest, InfillRequest
from edgespec.decoding.records import StopReason, Token
from edgespec.llama.weights import Model


class OpenAIWriter(EventWriter):
    """Writes an answer of several texts, its choices, or its chunks as server-sent events."""

    id_kind: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        request: PreparedRequest,
        model: Model,
        name: str,
        fingerprint: str,
    ) -> None:
        """Begin the answer to `body` of the `model` that is served as `name`."""
        is_chat = isinstance(body, ChatRequest)
        super().__init__(
            request, model, keeps_tokens=bool(body.logprobs) if is_chat else body.logprobs is not None
        )
        self._head = {
            "id": f"{self.id_kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": fingerprint,
        }
        self._tells_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._logprobs = [0.0] * len(self.texts)
        self._offsets = [0] * len(self.texts)  # of the next token's text in each

    @abstractmethod
    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice of the first chunk of a text; None: there is none."""

    @abstractmethod
    def choices(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the choices of the chunks that an event makes."""

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a text in an answer that does not stream."""

    def begin(self) -> str:
        """Return the events that come before any text."""
        begun = ((i, self.first(i)) for i in range(len(self.texts)))
        return "".join(self.encode(self._chunk(i, choice)) for i, choice in begun if choice)

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of `tokens` of text number `index`."""
        self._logprobs[index] += sum(token.logprob or 0.0 for token in tokens)
        yield from super().parts(index, tokens)

    def write(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an event; after the last one also those that end the answer."""
        for choice in self.choices(event):
            chunk = self._chunk(event.index, choice)
            if event.kind in ("text", "thought"):
                end = event.start + len(event.text)
                chunk["edgespec"] = self.texts[event.index].written.origins(event.start, end)
            yield chunk
        if event.kind == "end" and len(self.results) == len(self.texts):
            if self._tells_usage:
                head = {**self._head, "object": self.chunk_kind, "choices": []}
                yield {**head, "usage": self.usage()}
            yield {}

    def encode(self, part: dict[str, Any]) -> str:
        """Return a chunk as a server-sent event; for an empty one, the event that ends the stream."""
        return super().encode(part) if part else "data: [DONE]\n\n"

    def answer(self) -> dict[str, Any]:
        """Return the whole answer, with the texts that were chosen."""
        choices = [{"index": i, **self.choice(chosen)} for i, chosen in enumerate(self._chosen())]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": [{"index": index, **choice}]}

    def _chosen(self) -> list[int]:
        """Return the texts that are the answer: for each prompt those likeliest per token."""
        n_all, n_best = len(self.texts), self.request.n_best
        if n_best is None:
            return [*range(n_all)]
        n_each = n_all // self.request.n_prompts
        means = [total / max(1, len(self.results[i].token_ids)) for i, total in enumerate(self._logprobs)]
        chosen: list[int] = []
        for start in range(0, n_all, n_each):
            chosen += sorted(range(start, start + n_each), key=means.__getitem__, reverse=True)[:n_best]
        return chosen


class ChatWriter(OpenAIWriter):
    """Writes a chat completion."""

    id_kind, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        """Return who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def choices(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the deltas of an event: of a call first its name."""
        delta: dict[str, Any] = {}
        if event.kind in ("text", "thought"):
            delta["content" if event.kind == "text" else "reasoning_content"] = event.text
        elif call := event.call:
            function = {"name": call.name, "arguments": ""}
            begun = {"index": call.index, "id": call.id, "type": "function", "function": function}
            delta["tool_calls"] = [begun]
        choice: dict[str, Any] = {"delta": delta}
        if event.tokens:
            choice["logprobs"] = {"content": self.logprobs(event.tokens)}
        yield choice | {"finish_reason": event.reason}
        if call := event.call:
            added = {"index": call.index, "function": {"arguments": call.arguments}}
            yield {"delta": {"tool_calls": [added]}, "finish_reason": None}

    def choice(self, index: int) -> dict[str, Any]:
        """Return the message, and why it ended."""
        text = self.texts[index]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = text.content or (None if text.calls else "")
        if thoughts := text.thoughts:
            message["reasoning_content"] = thoughts
        message["refusal"] = None
        if text.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in text.calls
            ]
        logprobs = {"content": self.logprobs(text.tokens)} if self.keeps_tokens else None
        reason = text.finish_reason(self.results[index])
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}


class CompletionWriter(OpenAIWriter):
    """Writes a text completion."""

    id_kind, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the prompt, if it is sent back."""
        echo = self.request.texts[index].echo
        return {"text": echo, "logprobs": None, "finish_reason": None} if echo else None

    def choices(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield the text that is added."""
        logprobs = None
        if event.tokens:
            logprobs, self._offsets[event.index] = self._older_form(event.tokens, self._offsets[event.index])
        yield {"text": event.text, "logprobs": logprobs, "finish_reason": event.reason}

    def choice(self, index: int) -> dict[str, Any]:
        """Return the whole text, and why it ended."""
        text, echo, result, logprobs = (
            self.texts[index],
            self.request.texts[index].echo,
            self.results[index],
            None,
        )
        if self.keeps_tokens:
            logprobs, _ = self._older_form(text.tokens if echo is None else self._with_prompt(index))
            if echo is not None:
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        said = (echo or "") + text.written.text
        return {"text": said, "logprobs": logprobs, "finish_reason": text.finish_reason(result)}

    def _with_prompt(self, index: int) -> list[Token]:
        """Return the tokens of prompt and text, and the one that ended it, which has no text.

        Programs that score texts ask for one token and leave it out.
        """
        result = self.results[index]
        prompt = [
            Token(token, "", "target", said.logprob if said else None, said.top if said else ())
            for token, said in zip(
                self.request.texts[index].tokens, (None, *result.prompt_logprobs), strict=True
            )
        ]
        end = [result.end_token] if result.end_token and result.stop_reason == "eog" else []
        return [*prompt, *self.texts[index].tokens, *end]

    def _older_form(self, tokens: Iterable[Token], offset: int = 0) -> tuple[dict[str, Any], int]:
        """Return the logprobs of tokens in the form of text completions, and where their text ends."""
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text = self._name(token.id)
            made["tokens"].append(text)
            made["token_logprobs"].append(max(token.logprob or 0.0, LEAST))
            made["top_logprobs"].append({self._name(i): max(value, LEAST) for i, value in token.top})
            made["text_offset"].append(offset)
            offset += len(text)
        return made, offset

    def _name(self, token: int) -> str:
        """Return a unique name of a token: its text, or its bytes if it is part of a character."""
        piece = self.model.piece(token, special=True)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class InfillWriter(EventWriter):
    """Writes llama-server's answer to a text for a gap."""

    def __init__(self, body: InfillRequest, request: PreparedRequest, model: Model, name: str) -> None:
        """Begin the answer to `body` by the model that is served as `name`."""
        super().__init__(request, model)
        self._body, self._name = body, name
        self._reads_only = body.n_predict == 0
        self._n = 0

    def parts(self, index: int, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
        """Yield the texts of `tokens`, if any is wanted."""
        self._n += len(tokens)
        if not self._reads_only:
            yield from super().parts(index, tokens)

    def write(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Yield a text, or the end: the empty text, its reason, and the statistics."""
        if event.kind == "end":
            yield self._end("")
            return
        n_prompt = len(self.request.texts[0].tokens)
        told = {"index": 0, "content": event.text, "tokens": [], "stop": False, "id_slot": 0}
        yield {**told, "tokens_predicted": self._n, "tokens_evaluated": n_prompt}

    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._end(self.texts[0].content)

    def _end(self, content: str) -> dict[str, Any]:
        result, text = self.results[0], self.texts[0].content
        n = 0 if self._reads_only else len(result.token_ids)
        stats = result.stats
        stops = self._body.stop or []
        word = stops if isinstance(stops, str) else stops[0] if len(stops) == 1 else ""
        answer = {
            "index": 0,
            "content": content,
            "tokens": [],
            "stop": True,
            "id_slot": 0,
            "model": self._name,
            "tokens_predicted": n,
            "tokens_evaluated": result.prompt_tokens,
            "tokens_cached": result.prompt_tokens + n,
            "has_new_line": "\n" in text,
            "truncated": self.request.texts[0].is_cut,
            "stop_type": _stop_type(result.stop_reason, has_stops=bool(stops)),
            "stopping_word": word if result.stop_reason == "stop" else "",
            "timings": {
                "cache_n": result.n_cached,
                "prompt_n": result.prompt_tokens - result.n_cached,
                "prompt_ms": 1e3 * stats.prefill_s,
                "prompt_per_token_ms": _each_ms(stats.prompt_tokens_per_s),
                "prompt_per_second": stats.prompt_tokens_per_s,
                "predicted_n": n,
                "predicted_ms": 1e3 * max(0.0, stats.total_s - (stats.ttft_s or stats.total_s)),
                "predicted_per_token_ms": _each_ms(stats.generation_tokens_per_s),
                "predicted_per_second": stats.generation_tokens_per_s,
            },
            "edgespec": self.usage()["edgespec"],
        }
        wanted = self._body.response_fields
        return _picked(answer, wanted) if wanted else answer


def _each_ms(rate: float | None) -> float | None:
    return 1e3 / rate if rate else None


def _stop_type(reason: StopReason, *, has_stops: bool) -> str:
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
