"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} and a status.

Below /api/ they have the form of Ollama's: {"error": "message"}; below /v1/messages that of Anthropic's. No
answer holds a path or a traceback: what is not the client's mistake is logged in one line, and the client
gets a 500 without it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from edgespec.apps.server.request_worker import QueueFull, ShuttingDown, TimedOut
from edgespec.decoding.sampling import TABLE
from edgespec.errors import EdgespecError
from edgespec.platform.messages import MessageFn

CLIENT_GONE = 499
"""Status of an answer that nobody reads, as in nginx."""


class ApiError(Exception):
    """An answer that refuses a request. `str(error)` is the line for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with `status`; `param` is the field at fault, `code` a name for programs."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The body that the client is sent."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: MutableMapping[str, Any]) -> JSONResponse:
        """Return the answer to the request of an ASGI scope, whose state keeps the error for the log."""
        scope.setdefault("state", {})["refused"] = self
        if speaks_anthropic(scope):
            request_id = new_request_id()
            headers = {**(self.headers or {}), REQUEST_ID: request_id}
            return JSONResponse(self.anthropic_body(request_id), self.status, headers=headers)
        body = {"error": str(self)} if scope["path"].startswith(_OLLAMA) else self.body()
        return JSONResponse(body, self.status, headers=self.headers)

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The body in the form of Anthropic's API."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        error: dict[str, Any] = {"type": kind, "message": str(self)}
        if self.code == NO_THREAD:
            error["details"] = {"error_code": NO_THREAD}
        return {"type": "error", "error": error, "request_id": request_id}


def last_event(path: str, body: bytes) -> bytes:
    """Return the end of a stream of `path` that failed; `body`: of a whole answer that failed so."""
    if path.startswith(_OLLAMA):
        return body + b"\n"
    return (b"event: error\n" if path.startswith(_ANTHROPIC) else b"") + b"data: " + body + b"\n\n"


NO_THREAD = "thread_unsupported_request"
"""Code at which Anthropic's clients go on without a thread."""

REQUEST_ID = "request-id"
"""Header of Anthropic's API with the id of a request."""


def new_request_id() -> str:
    """Return an id of a request as Anthropic's API has them."""
    return f"req_{secrets.token_hex(12)}"


def speaks_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request is of Anthropic's API, by its path, or by its header where OpenAI's has the path."""
    path = scope["path"]
    if path.startswith("/v1/models"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return bool(path.startswith(_ANTHROPIC))


_Body = TypeVar("_Body", bound=BaseModel)


def with_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return `error` with the field at fault called as in another API, by `names`."""
    old = error.param or ""
    if names.get(old, old) == old:
        return error
    line, param = respelled(str(error), old, names[old]), names[old].partition(".")[0]
    return ApiError(error.status, line, param=param, code=error.code, headers=error.headers)


def respelled(line: str, old: str, new: str) -> str:
    """Return `line` with the field `old` called `new`."""
    return re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, line)


@contextmanager
def renaming(rename: Callable[[ApiError], ApiError]) -> Iterator[None]:
    """Have errors name the fields of another API, by `rename`."""
    try:
        yield
    except ApiError as error:
        raise rename(error) from None


def checked(kind: type[_Body], fields: Mapping[str, Any]) -> _Body:
    """Return the request of OpenAI's API that another API's was turned into. Raises ApiError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(), fields) from None


_OLLAMA = "/api/"
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


Place = tuple[str | int, ...]
"""The steps to a part of a body."""


def validation_error(errors: Sequence[Mapping[str, Any]], body: object = None) -> ApiError:
    """Return the 400 for what pydantic found wrong with `body`: the first mistake, in one line."""
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}", code="invalid_json")
    ours = [error for error in errors if error["type"] == "value_error"]
    placed = [(_place(error, body), error) for error in ours or errors]
    # Of a field that takes several kinds of values, the kind that fits best is meant.
    top = placed[0][0][:1]
    placed = [(place, error) for place, error in placed if place[:1] == top]
    place, error = max(placed, key=lambda found: len(found[0]))
    field = str(place[0]) if place else None
    if ours:
        message = str(error["msg"]).removeprefix("Value error, ")
        is_whole = message.startswith(f"{field} is not supported here")
        return ApiError(400, message if is_whole else f"{_dotted(place)}: {message}", param=field)
    if error["type"] == "union_tag_invalid":
        place = (*place, error["ctx"]["discriminator"].strip("'"))
    return ApiError(400, f"{_dotted(place)}: {_in_words(error)}", param=field)


def engine_error(error: Exception, log: MessageFn) -> ApiError:
    """Return the answer for what the engine or the worker raised.

    A mistake in a field that the request set is told with the request's name of it. Anything else may hold a
    path: it goes to `log`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(503, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, TimedOut):
        # OpenAI's clients would try again by themselves, and it would take as long.
        return ApiError(504, str(error), code="timeout", headers={"X-Should-Retry": "false"})
    line = " ".join(str(error).split())
    if isinstance(error, EdgespecError):
        if name := _FIELDS.get(error.field):
            told = " ".join(error.spelled(name).split())
            return ApiError(400, told, param=name.partition(".")[0])
        if line.startswith("not enough memory"):
            log(line)
            why = "there is not enough memory for a prompt and an answer of this length: ask for less"
            return ApiError(503, why, code="out_of_memory")
    log(f"{type(error).__name__}: {line}")
    return ApiError(500, "the server failed at this request; its log says why")


_FIELDS = {
    **{name: option.request_name(name) for name, option in TABLE.items() if option.request != "-"},
    **{
        name: name
        for name in (
            "response_format",
            "tools",
            "json_schema",
            "grammar",
            *(f"structured_outputs.{kind}" for kind in ("json", "choice", "regex", "grammar")),
        )
    },
}
"""The request's names of the engine's fields; the last ones are the names of its grammars."""


# ---- mistakes in a request ----

_WORDS = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "is not supported here: leave it out",
    "missing": "is missing",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "union_tag_not_found": 'must have a "{discriminator}"',
}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_JSON = {"True": "true", "False": "false", "None": "null"}


def _place(error: Mapping[str, Any], body: object) -> Place:
    """Return where in `body` an error is, without pydantic's names of the kinds of values it tried."""
    place: list[str | int] = []
    value = body
    steps = [step for step in error["loc"] if step != "body"]
    if body is None:
        return tuple(steps[1:] if steps[:1] == ["query"] else steps)
    for i, step in enumerate(steps):
        is_last = i == len(steps) - 1
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif not (is_last and isinstance(value, dict) and error["type"] == "missing"):
            continue
        place.append(step)
    return tuple(place)


def _dotted(place: Place) -> str:
    return ".".join(str(step)[:80] for step in place) or "the body"


def _in_words(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, in words of JSON."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind].format(**{name: str(value).strip("'") for name, value in context.items()})
    if kind in ("literal_error", "union_tag_invalid"):
        expected = str(context.get("expected") or context.get("expected_tags"))
        return f"must be {re.sub(r'True|False|None', lambda word: _JSON[word[0]], expected)}"
    if kind in ("too_long", "string_too_long"):
        return f"has at most {context['max_length']} parts"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    for name, words in _BOUNDS.items():
        if name in context:
            return f"must be {words} {context[name]}"
    return "has a value that is not allowed here"
