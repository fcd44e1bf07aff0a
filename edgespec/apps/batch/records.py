"""Requests and answers of a batch, and lines of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """Answer to a request, as the server would send it."""

    status: int
    body: bytes
    """JSON: a completion, or {"error": ...}."""
    n_tokens: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens ended a text of it."""
        return b'"finish_reason":"length"' in self.body  # no text's own: there its quotes are escaped

    @classmethod
    def error(cls, status: int, body: dict[str, Any]) -> BatchAnswer:
        """Return an answer with an error; `body` as from `ApiError.body`."""
        return cls(status, msgspec.json.encode(body))


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input."""

    place: int
    """Place of its result in the output, from 0; blank lines do not count."""
    custom_id: str
    url: str = ""
    """Route of the server; "": a plain prompt, whose fields are in `body`."""
    body: dict[str, Any] | None = None
    refused: BatchAnswer | None = None
    """Error of a line that is no request."""


def output_line(request: BatchRequest, answer: BatchAnswer, key: str) -> bytes:
    """Return a result as a line in OpenAI's batch format, with its newline; `key` names the batch."""
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
    """Place and status of a line of the output."""

    place: int
    failed: bool


def read_output_line(line: bytes, key: str) -> OutputRecord | None:
    """Parse a line of `output_line`; None for a line that is not of this batch."""
    try:
        found = msgspec.json.decode(line, type=_OutputLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    prefix, _, place = found.id.rpartition("_")
    if prefix != f"batch_req_{key}" or not (place.isascii() and place.isdecimal()):
        return None
    return OutputRecord(int(place), found.response.status_code != 200)


class _AnswerMessage(msgspec.Struct):
    content: str | None = None
    message: str = ""


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _AnswerMessage | None = None


class _AnswerBody(msgspec.Struct):
    choices: list[_Choice] = []
    error: _AnswerMessage | None = None


class _AnswerResponse(msgspec.Struct):
    body: _AnswerBody


class _AnswerLine(msgspec.Struct):
    response: _AnswerResponse


def answer_text(line: bytes) -> bytes:
    """Return the answer of a line of `output_line` as text with a newline; if it failed, the reason."""
    body = msgspec.json.decode(line, type=_AnswerLine).response.body
    if body.error:
        return f"[failed: {body.error.message}]\n".encode()
    text = "".join(one.text or (one.message and one.message.content) or "" for one in body.choices)
    return text.strip("\n").encode(errors="replace") + b"\n"
