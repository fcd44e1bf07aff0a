"""An API of our own, which docs/write-a-dialect.md describes: text in, lines of JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request

from edgespec.apps.server.answer_events import AnswerEvent, EventWriter
from edgespec.apps.server.api_errors import ApiError, ErrorForm, checked
from edgespec.apps.server.request_reader import PreparedRequest, RequestReader
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.apps.server.streaming import Answerer


class LinesErrors(ErrorForm):
    names: Mapping[str, str] = {"max_tokens": "most", "messages": "the text"}

    def body(self, error: ApiError) -> dict[str, Any]:
        return {"sorry": error.line(self.names), "why": error.code or error.status}

    def last(self, body: bytes) -> bytes:
        return body + b"\n"


class LinesWriter(EventWriter):
    media_type = "application/x-ndjson"

    def write(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        if event.call:
            yield {"do": event.call.name, "with": event.call.arguments}
        elif event.kind == "end":
            yield {"end": event.reason, "tokens": self.usage()["completion_tokens"]}
        else:
            yield {event.kind: event.text}

    def encode(self, part: dict[str, Any]) -> str:
        return json.dumps(part) + "\n"

    def answer(self) -> dict[str, Any]:
        (text,) = self.texts
        return {"text": text.content, "do": [call.name for call in text.calls]}


async def text_of(request: Request) -> str:
    return (await request.body()).decode()


def add(app: FastAPI, reader: RequestReader, answerer: Answerer) -> None:
    def read(body: str) -> PreparedRequest:
        head, _, said = body.rpartition("\n\n")
        given = dict(line.split(": ", 1) for line in head.splitlines())
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "temperature": 0, "seed": 1}
        asked |= {"max_tokens": int(given["most"])} if "most" in given else {}
        asked |= {"stop": given["stop"]} if "stop" in given else {}
        asked |= {"parallel_tool_calls": False}
        if "do" in given:
            asked |= {
                "tools": [{"type": "function", "function": {"name": given["do"]}}],
                "tool_choice": "required",
            }
        return replace(reader.choices(checked(ChatRequest, asked)), streams="whole" not in given)

    def writer(_: str, request: PreparedRequest) -> LinesWriter:
        return LinesWriter(request, reader.model)

    router = APIRouter()  # the application's own takes JSON alone
    answerer.serve(router, "/lines", Annotated[str, Depends(text_of)], read, writer, LinesErrors())
    app.include_router(router)
