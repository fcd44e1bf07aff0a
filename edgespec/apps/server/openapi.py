"""What FastAPI cannot know of the routes that it describes: their refusals, and that an answer may stream."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'The answer; with "stream": true its chunks as server-sent events, then [DONE].',
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
"""The description of an answer that may come as a stream."""


def error_responses(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of what any route may answer instead, in the form of `answer`."""
    return {"4XX": {"model": answer}, "5XX": {"model": answer}}
