"""Errors as answers: a status, the id of the field at fault, a code; each API has its own form.

A field's id is its name in OpenAI's API; other APIs have tables of names. No answer holds a path or a
traceback: a fault of the server is logged in one line, and the client gets a 500 without it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from edgespec.apps.server.request_worker import QueueFull, ShuttingDown, TimedOut
from edgespec.decoding.sampling import TABLE
from edgespec.errors import EdgespecError, MessageFn, OutOfMemory

CLIENT_GONE = 499
"""Status of an answer that nobody reads, as in nginx."""


class ApiError(Exception):
    """An answer that refuses a request. `str(error)` is the line for the client, in OpenAI's names."""

    def __init__(
        self,
        status: int,
        problem: str,
        *,
        field: str | None = None,
        value: object = "",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with `status` and `problem`, of `field` and its `value`; `code` is a name for programs.

        `field` is a path such as "tools.0.function.name", with which the line begins; `param` is a path that
        the line does not mention.
        """
        super().__init__(problem)
        self.status = status
        self.problem = problem
        self.field = field or param
        self.code = code
        self.headers = headers
        self._value = str(value)
        self._is_named = field is not None

    def __str__(self) -> str:
        return self.line({})

    def line(self, names: Mapping[str, str]) -> str:
        """Return the line for a client of an API that names fields so."""
        if not self._is_named:
            return self.problem
        subject = f"{spelled(self.field or '', names)} {self._value}".strip()
        return f"{subject}: {self.problem}"

    @property
    def param(self) -> str | None:
        """The field of the body at fault, in OpenAI's name."""
        return self.field and self.field.partition(".")[0]

    def body(self) -> dict[str, Any]:
        """The body that a client of OpenAI's API is sent."""
        return ErrorForm().body(self)

    def response(self, scope: MutableMapping[str, Any]) -> JSONResponse:
        """Return the answer to the request of an ASGI scope, whose state keeps the error for the log."""
        scope.setdefault("state", {})["refused"] = self
        body = form_of(scope["path"], scope["headers"]).body(self)
        told = {REQUEST_ID: body["request_id"]} if "request_id" in body else {}
        return JSONResponse(body, self.status, headers={**(self.headers or {}), **told})


class PromptTooLong(ApiError):  # noqa: N818 - what happened, as its reader says it
    """A prompt of more tokens than fit, or than the server takes."""

    def __init__(self, field: str, n_prompt: int, most: int, n_ctx: int) -> None:
        """Refuse `n_prompt` tokens in `field`: at most `most` are allowed, in a context of `n_ctx`."""
        limit = f"This model's maximum context length is {n_ctx} tokens"
        if most < n_ctx - 1:
            limit = f"This server takes prompts of at most {most} tokens"
            n_ctx = most
        super().__init__(400, limit, param=field, code="context_length_exceeded")
        self.n_prompt, self.most = n_prompt, n_ctx

    def line(self, names: Mapping[str, str]) -> str:
        """Return OpenAI's line, from which programs know that they must shorten the prompt."""
        name = spelled(self.field or "", names)
        resulted = f"However, your {name} resulted in {self.n_prompt} tokens."
        return f"{self.problem}. {resulted} Please reduce the length of the {name}."


def spelled(field: str, names: Mapping[str, str]) -> str:
    """Return a field's path in the names of another API, which may rename and drop its steps."""
    if field in names:
        return names[field]
    return ".".join(filter(None, (names.get(step, step) for step in field.split("."))))


# ---- the forms of APIs ----

IMAGES = "messages.images"
"""The id of a conversation's images."""


class ErrorForm:
    """The form of errors in OpenAI's API; those of other APIs derive from it."""

    names: Mapping[str, str] = {IMAGES: "messages"}
    """The API's names of OpenAI's fields, or of steps to them; "": it has no such step."""

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an answer."""
        param = error.field and spelled(error.field, self.names).partition(".")[0]
        kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        told = {"message": error.line(self.names), "type": kind, "param": param, "code": error.code}
        return {"error": told}

    def last(self, body: bytes) -> bytes:
        """Return the end of a stream that failed, from the body that a whole answer would have."""
        return b"data: " + body + b"\n\n"

    def failed(self, error: ApiError) -> str:
        """Return the end of a stream that failed."""
        return self.last(json.dumps(self.body(error)).encode()).decode()


class ResponsesErrors(ErrorForm):
    """OpenAI's form, with the names of its Responses API."""

    names: Mapping[str, str] = {
        "messages": "input",
        IMAGES: "input",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "function": "",
    }


class AnthropicErrors(ErrorForm):
    """The form of Anthropic's API."""

    names: Mapping[str, str] = {
        IMAGES: "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_budget": "thinking.budget_tokens",
        "reasoning_effort": "thinking",
        "function": "",
        "parameters": "input_schema",
    }

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the body; for a prompt that is too long, with the line that agents recognise."""
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        line = error.line(self.names)
        if isinstance(error, PromptTooLong):
            line = f"prompt is too long: {error.n_prompt} tokens > {error.most} maximum"
        told: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(error.status, other), "message": line}
        if error.code == NO_THREAD:
            told["details"] = {"error_code": NO_THREAD}
        return {"type": "error", "error": told, "request_id": new_request_id()}

    def last(self, body: bytes) -> bytes:
        """Return the event of an error."""
        return b"event: error\n" + super().last(body)


class OllamaErrors(ErrorForm):
    """The form of Ollama's API."""

    names: Mapping[str, str] = {
        IMAGES: "messages",
        "response_format": "format",
        "chat_template_kwargs": "think",
        "reasoning_effort": "think",
    }

    def body(self, error: ApiError) -> dict[str, Any]:
        """Return the body: a line."""
        return {"error": error.line(self.names)}

    def last(self, body: bytes) -> bytes:
        """Return the last line."""
        return body + b"\n"


class GenerateErrors(OllamaErrors):
    """Ollama's form of requests without messages."""

    names: Mapping[str, str] = {**OllamaErrors.names, "messages": "prompt", IMAGES: "images"}


FORMS: dict[str, ErrorForm] = {
    "/api/generate": GenerateErrors(),
    "/api/": OllamaErrors(),
    "/v1/messages": AnthropicErrors(),
    "/v1/responses": ResponsesErrors(),
}
"""The form of errors below a path; the first that fits counts, and OpenAI's elsewhere."""


def form_of(path: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> ErrorForm:
    """Return the form of errors of a request, by its path, or by Anthropic's header."""
    if path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in headers):
        path = "/v1/messages"
    return next((form for begin, form in FORMS.items() if path.startswith(begin)), ErrorForm())


def last_event(path: str, body: bytes) -> bytes:
    """Return the end of a stream of `path` that failed; `body`: the one that a whole answer would have."""
    return form_of(path).last(body)


def speaks_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request uses Anthropic's API."""
    return isinstance(form_of(scope["path"], scope["headers"]), AnthropicErrors)


NO_THREAD = "thread_unsupported_request"
"""Code at which Anthropic's clients continue without a thread."""

REQUEST_ID = "request-id"
"""Header of Anthropic's API with the id of a request."""


def new_request_id() -> str:
    """Return a new request id in the form of Anthropic's API."""
    return f"req_{secrets.token_hex(12)}"


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


# ---- what went wrong ----

_Body = TypeVar("_Body", bound=BaseModel)


def checked(kind: type[_Body], fields: Mapping[str, Any]) -> _Body:
    """Return the request to OpenAI's API that another API's was turned into. Raises ApiError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(), fields) from None


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
    place = max((place for place, _ in placed), key=len)
    found = [error for one, error in placed if one == place]
    error = next((one for one in found if not one["type"].endswith("_type")), found[0])
    if ours:
        problem = str(error["msg"]).removeprefix("Value error, ")
    elif error["type"].endswith("_type"):  # of the wrong kind: any that is allowed is told
        kinds = dict.fromkeys(_in_words(one).removeprefix("must be ") for one in found)
        problem = f"must be {' or '.join(kinds)}"
    else:
        problem = _in_words(error)
    if error["type"] == "union_tag_invalid":
        place = (*place, error["ctx"]["discriminator"].strip("'"))
    if not place:
        return ApiError(400, f"the body: {problem}")
    return ApiError(400, problem, field=".".join(str(step)[:80] for step in place))


def engine_error(error: Exception, log: MessageFn) -> ApiError:
    """Return the answer to an exception of the engine or the worker.

    A mistake in a field that the request set names the field's id. Anything else may hold a path, so it goes
    to `log`.
    """
    if isinstance(error, ApiError):
        return error
    for kind, (status, code, headers) in _KINDS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, headers=headers)
    line = " ".join(str(error).split())
    if isinstance(error, OutOfMemory):
        log(line)
        why = "there is not enough memory for a prompt and an answer of this length: ask for less"
        return ApiError(503, why, code="out_of_memory")
    if isinstance(error, EdgespecError) and (field := _FIELDS.get(error.field)):
        return field_error(error, field)
    log(f"{type(error).__name__}: {line}")
    return ApiError(500, "the server failed at this request; its log says why")


def field_error(error: EdgespecError, field: str) -> ApiError:
    """Return the 400 for a mistake in `field`."""
    value, problem = (" ".join(str(part).split()) for part in (error.value, error.problem))
    return ApiError(400, problem, field=field or None, value=value)


_KINDS: dict[type[Exception], tuple[int, str, dict[str, str]]] = {
    QueueFull: (503, "queue_full", {"Retry-After": "1"}),
    ShuttingDown: (503, "shutting_down", {}),
    # OpenAI's clients would try again by themselves, and it would take as long.
    TimedOut: (504, "timeout", {"X-Should-Retry": "false"}),
}
"""Status, code and headers of what the worker raises."""

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
    "none_required": "is not supported here: leave it out",
    "missing": "is missing",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "union_tag_not_found": 'must have a "{discriminator}"',
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    **dict.fromkeys(("string_type", "bytes_type"), "must be a string"),
    **{"list_type": "must be a list"},
}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_JSON = {"True": "true", "False": "false", "None": "null"}


def _place(error: Mapping[str, Any], body: object) -> Place:
    """Return where in `body` an error is, without pydantic's names of the types it tried."""
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
