"""What the parts of a batch hand to each other: requests, answers, and a line of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one request, as the server would send it."""

    status: int
    """HTTP status: 200, or what went wrong."""
    body: bytes
    """JSON: a completion, or {"error": ...}."""
    n_tokens: int = 0
    """Tokens that were written."""

    @classmethod
    def error(cls, status: int, body: dict[str, Any]) -> BatchAnswer:
        """Return an answer that refuses a request; `body` as `Fault.body` returns it."""
        return cls(status, msgspec.json.encode(body))


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input. A line that is no request has its answer already."""

    place: int
    """From 0, blank lines not counted: the place of its result in the output."""
    custom_id: str
    """The name of this line alone."""
    url: str = ""
    """A route of the server; "" for a line without one, whose fields are in `body`."""
    body: dict[str, Any] | None = None
    refused: BatchAnswer | None = None
    """What is wrong with the line."""


def output_line(request: BatchRequest, answer: BatchAnswer, key: str) -> bytes:
    """Return the result of a request as a line in OpenAI's batch format, its newline included.

    `key` names the batch; `place_of` finds the request's place in the line again.
    """
    line = {
        "id": f"batch_req_{key}_{request.place}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": answer.status,
            "request_id": f"req_{key}_{request.place}",
            "body": msgspec.Raw(answer.body),
        },
        "error": None,
    }
    return msgspec.json.encode(line) + b"\n"


class _OutputStatus(msgspec.Struct):
    status_code: int


class _OutputLine(msgspec.Struct):
    id: str
    response: _OutputStatus


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """What a line of the output says of itself."""

    place: int
    failed: bool


def read_output_line(line: bytes, key: str) -> OutputRecord | None:
    """Return what `output_line` put into a line; None for a line that it did not write for this batch."""
    try:
        found = msgspec.json.decode(line, type=_OutputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    prefix, _, place = found.id.rpartition("_")
    if prefix != f"batch_req_{key}" or not (place.isascii() and place.isdecimal()):
        return None
    return OutputRecord(int(place), found.response.status_code != 200)
