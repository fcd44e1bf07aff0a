"""Answers requests with an engine of this process, as the server would answer them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from edgespec.apps.batch.lines import CHAT, PLAIN, TEXT, BatchAnswer, BatchRequest
from edgespec.apps.server.api_errors import ApiError, engine_error, validation_error
from edgespec.apps.server.names import ALIAS
from edgespec.apps.server.openai_writer import ChatWriter, CompletionWriter, OpenAIWriter
from edgespec.apps.server.request_fields import ignoring, listed
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader, Service
from edgespec.apps.server.request_schema import ChatRequest, CompletionRequest
from edgespec.decoding.records import Result
from edgespec.engine.stream import Stream
from edgespec.errors import MessageFn, silent

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


_KINDS: Mapping[str, type[ChatRequest | CompletionRequest]] = {CHAT: ChatRequest, TEXT: CompletionRequest}
_MOST_TOLD = 16  # fields without effect


@dataclass(frozen=True, kw_only=True)
class PromptDefaults:
    """Default options of plain prompts; None: the server's."""

    system: str | None = None
    n_predict: int | None = None
    temp: float | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a request."""
        named = {"max_tokens": self.n_predict, "temperature": self.temp, "seed": self.seed}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, eq=False)
class _OpenRequest:
    """A request under way, with one or more texts, each named by its index."""

    request: BatchRequest
    prepared: PreparedRequest
    writer: OpenAIWriter
    prefilled: set[int] = field(default_factory=set)
    """Prompts that are prefilled: their other texts share the prefix."""
    results: dict[int, Result] = field(default_factory=dict)
    """Of the texts that have ended."""

    def prompt(self, index: int) -> int:
        """Return which prompt a text answers."""
        return index * self.prepared.n_prompts // len(self.prepared.texts)

    def may_begin(self, index: int) -> bool:
        """Whether its prompt is prefilled, or it is the text that will prefill it."""
        n_each = len(self.prepared.texts) // self.prepared.n_prompts
        return index % n_each == 0 or self.prompt(index) in self.prefilled


class LocalWriter:
    """Answers the requests of a batch with one engine; for use by one thread."""

    def __init__(
        self,
        engine: Engine,
        service: Service,
        fingerprint: str,
        *,
        defaults: PromptDefaults | None = None,
        log: MessageFn = silent,
    ) -> None:
        """Answer with `engine`; `log` takes a line for each failure that is not a request's fault."""
        self._engine = engine
        self._service = service
        self._fingerprint = fingerprint
        self._defaults = defaults or PromptDefaults()
        self._log = log
        self._reader = RequestReader(engine, service)
        self._told: set[str] = set()
        self._open: list[_OpenRequest] = []
        self._running: dict[Stream, tuple[_OpenRequest, int]] = {}
        self._waiting: deque[tuple[_OpenRequest, int]] = deque()
        self._ended: list[tuple[BatchRequest, BatchAnswer]] = []
        self.n_tokens = 0

    @property
    def n_free(self) -> int:
        """Requests that may begin now: none while a text waits for room."""
        return 0 if self._waiting else self._engine.parallel - len(self._running)

    @property
    def n_running(self) -> int:
        """Requests that `finished` has yet to return."""
        return len(self._open) + len(self._ended)

    def begin(self, request: BatchRequest) -> None:
        """Begin a request, or queue it until there is room for its tokens."""
        try:
            opened = self._prepare(request)
        except Exception as error:  # noqa: BLE001 - an error of only this request
            self._ended.append((request, self._error(error)))
            return
        self._open.append(opened)
        self._waiting += [(opened, index) for index in range(len(opened.prepared.texts))]
        self._admit()

    def finished(self) -> list[tuple[BatchRequest, BatchAnswer]]:
        """Run one pass, and return complete answers."""
        if self._running:
            self._engine.step()
        for stream in [*self._running]:
            if stream in self._running:  # not ended by another text of its request
                self._receive(stream)
        self._admit()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the requests that are under way; their answers are lost."""
        for stream in self._running:
            stream.close()
        for under_way in (self._running, self._open, self._waiting):
            under_way.clear()

    def _prepare(self, request: BatchRequest) -> _OpenRequest:
        """Check a request and turn it into tokens. Raises ApiError."""
        url, body = request.url, request.body or {}
        if url == PLAIN:
            url, body = self._plain_request(body)
        try:
            asked = self._read(url, body)
            prepared = self._reader.choices(asked)
            model, name = self._engine.target, self._service.name
            writer: OpenAIWriter
            if isinstance(asked, ChatRequest):
                writer = ChatWriter(asked, prepared, model, name, self._fingerprint)
            else:
                writer = CompletionWriter(asked, prepared, model, name, self._fingerprint)
            return _OpenRequest(request, prepared, writer)
        except ValidationError as error:
            raise validation_error(error.errors(), body) from None
        except RecursionError:
            raise ApiError(400, "the request is too deeply nested") from None

    def _read(self, url: str, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
        """Read a request, ignoring unknown fields; the log names each once."""
        with ignoring() as names:
            asked = _KINDS[url].model_validate(body)
        new = [name for name in names if name not in self._told]
        if new and len(self._told) < _MOST_TOLD:
            self._told.update(new)
            self._log(f"{url}: {listed(new)}")
        return asked

    def _plain_request(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return url and body of a plain prompt: a chat where the model has a template. Raises ApiError."""
        body = {"model": ALIAS} | self._defaults.fields() | fields
        if "messages" in body:
            return CHAT, body
        prompt, system = body["prompt"], body.pop("system", self._defaults.system)
        if not isinstance(prompt, str) or not prompt:
            raise ApiError(400, "prompt: must be a string that is not empty", param="prompt")
        if self._engine.target.chat_template is None:
            if system is not None:
                raise ApiError(400, "system: this model has no chat template to put it into", param="system")
            return TEXT, body
        messages = [{"role": "user", "content": body.pop("prompt")}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return CHAT, body | {"messages": messages}

    def _admit(self) -> None:
        """Begin queued texts while there is room."""
        while self._waiting:
            opened, index = self._waiting[0]
            if not opened.may_begin(index):
                return
            tokens, options = opened.prepared.texts[index].tokens, opened.prepared.texts[index].options
            try:
                if not self._engine.has_room(tokens, options.n_predict, options.lora):
                    return  # others are running, which leave room
                self._running[self._engine.stream(tokens, options)] = opened, index
                self._waiting.popleft()
            except Exception as error:  # noqa: BLE001 - an error of only this request
                self._end(opened, self._error(error))

    def _receive(self, stream: Stream) -> None:
        """Read the new tokens of a text; end its request if it is complete."""
        opened, index = self._running[stream]
        try:
            tokens = stream.made()
            self.n_tokens += len(tokens)
            if tokens or stream.finished:
                opened.prefilled.add(opened.prompt(index))
            opened.writer.drain(opened.writer.parts(index, tokens))
            if not stream.finished:
                return
            stream.made()  # raises what ended the stream, if it failed
            opened.results[index] = stream.result
            del self._running[stream]
            if len(opened.results) == len(opened.prepared.texts):
                results = [opened.results[i] for i in range(len(opened.results))]
                self._end(opened, BatchAnswer(200, opened.writer.whole(results).encode()))
        except Exception as error:  # noqa: BLE001 - an error of only this request
            self._end(opened, self._error(error))

    def _end(self, opened: _OpenRequest, answer: BatchAnswer) -> None:
        for stream in [stream for stream, (of, _) in self._running.items() if of is opened]:
            stream.close()
            del self._running[stream]
        self._waiting = deque(one for one in self._waiting if one[0] is not opened)
        self._open.remove(opened)
        self._ended.append((opened.request, answer))

    def _error(self, error: Exception) -> BatchAnswer:
        error = engine_error(error, self._log)
        return BatchAnswer.error(error.status, error.body())
