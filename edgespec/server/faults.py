"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} and a status.

Below /api/ they have the form of Ollama's: {"error": "message"}. No answer holds a path or a traceback: what
is not the client's mistake is logged in one line, and the client only gets a 500.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from edgespec.errors import EdgespecError, NodeLost
from edgespec.server.jobs import QueueFull, ShuttingDown, TimedOut
from edgespec.server.mistakes import first_mistake


class Fault(Exception):  # noqa: N818 - an answer like any other
    """An answer that refuses a request. `str(fault)` is the line for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer with `status`; `param` is the field at fault, `code` a name that programs can look for."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return what the client is sent."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """Return the whole answer to a request for `path`."""
        body = {"error": str(self)} if path.startswith(_OLLAMA) else self.body()
        return JSONResponse(body, self.status, headers=self.headers)


_OLLAMA = "/api/"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def invalid(errors: Sequence[Mapping[str, Any]], body: object = None) -> Fault:
    """Return the 400 for what pydantic found wrong with `body`: the first mistake, in one line."""
    if errors[0]["type"] == "json_invalid":
        return Fault(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}", code="invalid_json")
    mistake = first_mistake(errors, body)
    return Fault(400, mistake.message, param=mistake.field)


def from_engine(error: Exception, log: Callable[[str], None]) -> Fault:
    """Return the answer for what the engine or the worker raised.

    A mistake in a field that the request set is told with the request's name of it. Anything else may hold a
    path: it goes to `log`.
    """
    if isinstance(error, Fault):
        return error
    if isinstance(error, QueueFull):
        return Fault(503, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ShuttingDown):
        return Fault(503, str(error), code="shutting_down")
    if isinstance(error, TimedOut):
        # OpenAI's clients would try again by themselves, and it would take as long.
        return Fault(504, str(error), code="timeout", headers={"X-Should-Retry": "false"})
    line = " ".join(str(error).split())
    if isinstance(error, NodeLost):
        log(line)
        return Fault(503, line, code="node_lost", headers={"Retry-After": "3"})
    if isinstance(error, EdgespecError):
        if name := _FIELDS.get(error.field):
            told = " ".join(error.spelled(name).split())
            return Fault(400, told, param=name.partition(".")[0])
        if line.startswith("not enough memory"):
            log(line)
            why = "there is not enough memory for a prompt and an answer of this length: ask for less"
            return Fault(503, why, code="out_of_memory")
    log(f"{type(error).__name__}: {line}")
    return Fault(500, "the server failed at this request; its log says why")


_FIELDS = {
    "drafter": "speculative.drafter",
    "gamma": "speculative.gamma",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "penalty_last_n": "repeat_last_n",
    "repeat_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "n_predict": "max_tokens",
    "stop": "stop",
    "seed": "seed",
    **{
        name: name
        for name in (
            "response_format",
            "tools",
            "json_schema",
            "grammar",
            "guided_json",
            "guided_choice",
            "guided_regex",
            "guided_grammar",
            *(f"structured_outputs.{kind}" for kind in ("json", "choice", "regex", "grammar")),
        )
    },
}
"""What a request calls the fields that a client sets; the last ones are the names of its grammars."""
