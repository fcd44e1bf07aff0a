"""The OpenAPI description: what FastAPI derives from the routes, and what it cannot know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from edgespec.apps.server.response_schema import ChatChunk

_PLACE = "#/components/schemas/{model}"


_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 500, 503, 504)


def error_responses(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of what any route may answer instead, in the form of `answer`."""
    return {code: {"model": answer} for code in _REFUSALS}


def stream_responses(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of an answer that may be a stream of `chunk` events."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _PLACE.format(model=chunk.__name__)},
    }
    # An error that comes when the stream has begun is an event, too.
    error = data | {"contentSchema": {"$ref": _PLACE.format(model="ErrorAnswer")}}
    event = {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data, error]}},
        "required": ["data"],
    }
    return {
        200: {
            "description": 'The answer; with "stream": true its chunks as server-sent events, then [DONE].',
            "content": {"text/event-stream": {"schema": event}},
        }
    }


def openapi_description(description: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's `description` with the chunks of streams, and without its answer 422 to mistakes.

    This server answers 400, as OpenAI's API does.
    """
    for path in description["paths"].values():
        for route in path.values():
            route["responses"].pop("422", None)
    schemas = description["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, chunks = models_json_schema([(ChatChunk, "serialization")], ref_template=_PLACE)
    for name, schema in chunks["$defs"].items():
        schemas.setdefault(name, schema)
    return description
