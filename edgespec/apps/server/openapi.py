"""The OpenAPI description: what FastAPI derives from the routes, and what it cannot know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from edgespec.apps.server.api_errors import RouteFields
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


def fields_of_routes(description: dict[str, Any]) -> RouteFields:
    """Return the names of the fields of every route that takes a body."""
    schemas = description["components"]["schemas"]
    found: dict[str, list[str]] = {}
    for path, route in description["paths"].items():
        content = route.get("post", {}).get("requestBody", {}).get("content", {})
        for taken in content.values():
            named = schemas[taken["schema"]["$ref"].rpartition("/")[2]]["properties"]
            inner = {name: part.get("properties", {}) for name, part in named.items()}
            found[path] = [*named, *(f"{name}.{part}" for name, parts in inner.items() for part in parts)]
    return found


def request_names(description: dict[str, Any]) -> frozenset[str]:
    """Return the names of all fields of all requests, and of their parts."""
    posts = [route["post"] for route in description["paths"].values() if "post" in route]
    taken = [post.get("requestBody", {}) for post in posts]
    return schema_names(taken, description["components"]["schemas"])


def schema_names(schema: Any, definitions: Mapping[str, Any]) -> frozenset[str]:  # noqa: ANN401 - JSON
    """Return the names of properties in a JSON schema, and in those of `definitions` that it refers to."""
    found: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            if isinstance(named := part.get("properties"), dict):
                found.update(named)
            name = part.get("$ref", "").rpartition("/")[2]
            if name in definitions and name not in followed:
                followed.add(name)
                waiting.append(definitions[name])
    return frozenset(found)


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
