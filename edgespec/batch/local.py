"""Answers requests with an engine of this process, as the server would answer them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from edgespec.batch.lines import CHAT, PLAIN, TEXT
from edgespec.batch.records import Answer, Request
from edgespec.engine import Engine
from edgespec.platform.messages import MessageFn, silent
from edgespec.server.faults import Fault, from_engine, invalid
from edgespec.server.requests import ALIAS, PreparedRequest, RequestReader, Service
from edgespec.server.schema import ChatRequest, CompletionRequest
from edgespec.server.writing import ChatWriting, Head, TextWriting, Written
from edgespec.stream import Stream


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a line without url gets where it says nothing else; None: the server's defaults."""

    system: str | None = None
    n_predict: int | None = None
    temp: float | None = None
    seed: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return them as fields of a request."""
        named = {"max_tokens": self.n_predict, "temperature": self.temp, "seed": self.seed}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: Request
    prepared: PreparedRequest
    writing: ChatWriting | TextWriting


@dataclass(frozen=True, eq=False)
class _Running(_Waiting):
    text: Stream


class LocalWriter:
    """A `Writer` over one engine. For one thread."""

    def __init__(
        self,
        engine: Engine,
        service: Service,
        fingerprint: str,
        *,
        defaults: Defaults | None = None,
        log: MessageFn = silent,
    ) -> None:
        """Answer with `engine`; `log` takes a line for each failure that is not the request's fault."""
        self._engine = engine
        self._service = service
        self._fingerprint = fingerprint
        self._defaults = defaults or Defaults()
        self._log = log
        self._reader = RequestReader(engine.target, service)
        self._running: list[_Running] = []
        self._waiting: _Waiting | None = None
        self._refused: list[tuple[Request, Answer]] = []
        self.n_tokens = 0

    @property
    def n_free(self) -> int:
        """How many requests may begin now: none while one waits for room."""
        return 0 if self._waiting else self._engine.parallel - len(self._running)

    @property
    def n_running(self) -> int:
        """How many have begun, and have not been returned by `finished`."""
        return len(self._running) + len(self._refused) + (self._waiting is not None)

    def begin(self, request: Request) -> None:
        """Begin a request, or have it wait until there is room for its tokens."""
        try:
            waiting = self._prepare(request)
            if not self._admit(waiting):
                self._waiting = waiting
        except Exception as error:  # noqa: BLE001 - an error of this request alone
            self._refused.append((request, self._error(error)))

    def finished(self) -> list[tuple[Request, Answer]]:
        """Run one pass, and return the answers that are complete."""
        ended, self._refused = self._refused, []
        if self._running:
            self._engine.step()
        for running in [*self._running]:
            if answer := self._take(running):
                self._running.remove(running)
                ended.append((running.request, answer))
        if waiting := self._waiting:
            try:
                if self._admit(waiting):
                    self._waiting = None
            except Exception as error:  # noqa: BLE001 - an error of this request alone
                self._waiting = None
                ended.append((waiting.request, self._error(error)))
        return ended

    def close(self) -> None:
        """End all texts under way."""
        for running in self._running:
            running.text.close()
        self._running, self._waiting = [], None

    def _prepare(self, request: Request) -> _Waiting:
        """Check a request and turn it into tokens. Raises Fault."""
        url, body = request.url, request.body or {}
        if url == PLAIN:
            url, body = self._of_plain(body)
        try:
            if url == CHAT:
                chat = ChatRequest.model_validate(body)
                prepared = self._reader.chat(chat)
                written = Written(self._engine.target, keeps_tokens=bool(chat.logprobs))
                head = Head.new("chatcmpl", self._service.name, self._fingerprint)
                return _Waiting(request, prepared, ChatWriting(head, written, prepared.functions))
            text = CompletionRequest.model_validate(body)
            prepared = self._reader.text(text)
        except ValidationError as error:
            raise invalid(error.errors()) from None
        except RecursionError:
            raise Fault(400, "the request is too deeply nested") from None
        written = Written(self._engine.target, keeps_tokens=text.logprobs is not None)
        head = Head.new("cmpl", self._service.name, self._fingerprint)
        return _Waiting(request, prepared, TextWriting(head, written))

    def _of_plain(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the request that a line without url means: a chat where the model has a template.

        Raises Fault.
        """
        body = {"model": ALIAS} | self._defaults.fields() | fields
        if "messages" in body:
            return CHAT, body
        prompt, system = body["prompt"], body.pop("system", self._defaults.system)
        if not isinstance(prompt, str) or not prompt:
            raise Fault(400, "prompt: must be a string that is not empty", param="prompt")
        if self._engine.target.chat_template is None:
            if system is not None:
                raise Fault(400, "system: this model has no chat template to put it into", param="system")
            return TEXT, body
        messages = [{"role": "user", "content": body.pop("prompt")}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return CHAT, body | {"messages": messages}

    def _admit(self, waiting: _Waiting) -> bool:
        """Begin a text if there is room for it, and return whether. Raises Fault if there never will be."""
        tokens, options = waiting.prepared.tokens, waiting.prepared.options
        if self._engine.has_room(len(tokens), options.n_predict):
            text = self._engine.stream(tokens, options)
            self._running.append(_Running(waiting.request, waiting.prepared, waiting.writing, text))
            return True
        if self._running:
            return False
        raise Fault(
            400,
            f"the prompt's {len(tokens)} tokens and its answer do not fit into the cache: "
            "shorten the prompt, lower max_tokens, or begin with a larger --ctx",
            code="context_length_exceeded",
        )

    def _take(self, running: _Running) -> Answer | None:
        """Take the new tokens of a text; return its answer if that is complete."""
        text, writing = running.text, running.writing
        try:
            tokens = text.made()
            self.n_tokens += len(tokens)
            for _ in writing.add(tokens):
                pass
            if not text.finished:
                return None
            text.made()  # raises what ended the text, if it failed: only when no tokens are left
            result = text.result
            for _ in writing.finish(result):
                pass
            body = writing.whole(result).model_dump_json(exclude_unset=True).encode()
        except Exception as error:  # noqa: BLE001 - an error of this request alone
            text.close()
            return self._error(error)
        return Answer(200, body, len(result.token_ids))

    def _error(self, error: Exception) -> Answer:
        fault = from_engine(error, self._log)
        return Answer.error(fault.status, fault.body())
