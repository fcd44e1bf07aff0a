"""Stored responses, whichever model wrote them, so that a client can continue one by its id.

They are stored where requests come in: a request gets the conversation that it continues before its model
reads it, an answer is stored on its way out. A stream that fails, here or in a model's process, ends as
OpenAI's do.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.gate import replay
from edgespec.apps.server.json_routes import strict_json
from edgespec.apps.server.names import ALIAS
from edgespec.apps.server.responses_schema import CONVERSATION
from edgespec.apps.server.streaming import WholeEvents

MOST_BYTES = 64 << 20
"""Bytes of JSON to keep; the least recently used responses are deleted first."""

PATH = "/v1/responses"

_ENDED = ("completed", "incomplete")


def new_id(kind: str) -> str:
    """Return the id of a new response, whose kind is "resp", or of an item."""
    return f"{kind}_{secrets.token_hex(24)}"


class ResponseStore:
    """The last responses, in memory only. For the event loop's thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Keep up to `most_bytes`."""
        self._most = most_bytes
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._n_bytes = 0

    def add(self, identity: str, answer: bytes, items: bytes) -> None:
        """Store the JSON of a response and of all its input and output items; drop the oldest if full."""
        self._kept[identity] = answer, items
        self._n_bytes += len(answer) + len(items)
        while self._n_bytes > self._most:
            self._n_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))

    def get(self, identity: str, param: str = "response_id") -> tuple[bytes, bytes]:
        """Return a response and its items. Raises a 404 that names the field `param` if it is not stored."""
        if identity not in self._kept:
            kind = "previous response" if param == "previous_response_id" else "response"
            line = f"{kind.capitalize()} with id {identity[:80]!r} not found: this server keeps responses in "
            line += "memory, the last ones, unless store is false"
            raise ApiError(404, line, param=param, code=f"{kind.replace(' ', '_')}_not_found")
        self._kept.move_to_end(identity)
        return self._kept[identity]

    def show(self, identity: str, *, streams: bool) -> Response:
        """Answer GET /v1/responses/{identity}."""
        if streams:
            raise ApiError(400, "a stored response comes as a whole: leave it out", field="stream")
        return Response(self.get(identity)[0], media_type="application/json")


class KeepingResponses:
    """ASGI middleware: adds stored conversations to requests for responses, and stores the answers."""

    def __init__(self, app: ASGIApp, store: ResponseStore) -> None:
        self._app, self._store = app, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the conversation that it continues, and store its answer."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
            fields = _object(body)
            before = b"[]"
            if isinstance(previous := fields.get("previous_response_id"), str):
                _, before = self._store.get(previous, "previous_response_id")
                body = b'%s,"%s":%s}' % (_json(fields)[:-1], CONVERSATION.encode(), before)
        except ClientDisconnect:
            return
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        answer = _PassingAnswer(self._store, _joined(before, _given(fields.get("input"))), fields, send)
        await self._app(scope, replay(body, receive), answer.send)


def _object(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; {} for one that is no object, which its model refuses."""
    with suppress(json.JSONDecodeError):
        if isinstance(found := strict_json(body), dict):
            return found
    return {}


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _given(given: object) -> bytes:
    """Return the items of an input, as a JSON list."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return _json(given if isinstance(given, list) else [])


def _joined(*lists: bytes) -> bytes:
    return b"[%s]" % b",".join(filter(None, (one[1:-1] for one in lists)))


class _Event(msgspec.Struct):
    """The fields that are read from an event, or from a whole answer."""

    type: str = ""
    sequence_number: int = -1
    response: msgspec.Raw = msgspec.Raw()
    error: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    """The fields that are read from a response."""

    id: str
    output: msgspec.Raw
    store: bool
    status: str


class _PassingAnswer:
    """An answer on its way to the client: whole, or a stream of events."""

    def __init__(self, store: ResponseStore, items: bytes, fields: dict[str, Any], send: Send) -> None:
        self._store, self._items, self._fields, self._send = store, items, fields, send
        self._whole = b""
        self._events: WholeEvents | None = None
        self._is_kept = False  # whether it may be
        self._number = -1  # of the last event
        self._response = b""  # as the last event told it

    async def send(self, message: Message) -> None:
        """Send a part; a response is stored before its client gets its end."""
        if message["type"] == "http.response.start":
            self._is_kept = message["status"] == 200
            kinds = {name.lower(): value for name, value in message["headers"]}
            if kinds.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._events = WholeEvents()
        elif self._is_kept and self._events:
            parts = self._events.feed(message.get("body", b""))
            body = b"".join(map(self._passed, parts))
            message = {**message, "body": body if message.get("more_body") else body + self._events.rest}
        elif self._is_kept:
            self._whole += message.get("body", b"")
            if not message.get("more_body"):
                self._store_answer(self._whole)
        await self._send(message)

    def _passed(self, event: bytes) -> bytes:
        """Return an event of the stream as it is passed on."""
        _, _, data = event.partition(b"data: ")
        try:
            told = msgspec.json.decode(data, type=_Event)
        except msgspec.DecodeError:  # a comment
            return event
        if told.error is not None and not told.type.startswith("response."):
            return self._failed(told.error)
        self._number = told.sequence_number
        if told.response:
            self._response = bytes(told.response)
            if told.type.removeprefix("response.") in _ENDED:
                self._store_answer(self._response)
        return event

    def _failed(self, error: dict[str, Any]) -> bytes:
        """Return the last event of a stream that failed."""
        code = "invalid_prompt" if error.get("type") == "invalid_request_error" else "server_error"
        if error.get("code") == "queue_full":
            code = "rate_limit_exceeded"
        begun: dict[str, Any] = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
        begun |= {"model": self._fields.get("model") or ALIAS, "output": [], "parallel_tool_calls": True}
        begun |= {"tool_choice": "auto", "tools": []}
        if self._response:
            begun |= msgspec.json.decode(self._response)
        begun |= {"status": "failed", "error": {"code": code, "message": error.get("message")}}
        told = {"type": "response.failed", "sequence_number": self._number + 1, "response": begun}
        return b"event: response.failed\ndata: " + _json(told) + b"\n\n"

    def _store_answer(self, answer: bytes) -> None:
        try:
            found = msgspec.json.decode(answer, type=_Answer)
        except msgspec.DecodeError:  # another route's answer
            return
        if found.store and found.status in _ENDED:
            self._store.add(found.id, answer, _joined(self._items, bytes(found.output)))
