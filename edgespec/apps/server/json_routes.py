"""Reads strict JSON from requests, and answers every failure in its API's form, without a traceback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError, engine_error, speaks_anthropic, validation_error
from edgespec.apps.server.gate import ALLOWED_PAGE
from edgespec.apps.server.request_fields import ignoring, listed
from edgespec.apps.server.streaming import with_warnings
from edgespec.apps.server.tool_calls.argument_values import refuse_constant
from edgespec.errors import MessageFn

_MOST_TOLD = 256  # fields that have no effect: a line for each would let clients fill the log


def route_class(log: MessageFn, *, any_type: bool = False, form: bool = False) -> type[APIRoute]:
    """Return the class of routes that report their failures to `log`.

    `any_type`: the body is read as JSON whatever its Content-Type says. `form`: it is a form with a file.
    """
    told: set[str] = set()

    def tell(path: str, names: Iterable[str]) -> None:
        new = [name for name in names if name not in told]
        if new and len(told) < _MOST_TOLD:
            told.update(new)
            log(f"{path}: {listed(new)}")

    class Route(APIRoute):
        """A route whose body is strict JSON, and whose failures are one line on stderr."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handler(request: Request) -> Response:
                scope = request.scope
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if form:
                    _check_form(request, kind)
                elif request.method == "POST" and kind != "application/json":
                    if not any_type:
                        raise ApiError(
                            415, "the body must be JSON: send it with Content-Type: application/json"
                        )
                    scope = _said_to_be_json(request)
                strict = _StrictRequest(scope, request.receive)
                try:
                    with ignoring() as names:
                        answer = await handle(strict)
                    if names:
                        tell(request.url.path, names)
                        answer = with_warnings(answer, [listed(names)])
                    return answer
                except (ApiError, HTTPException, RequestValidationError):
                    raise
                except RecursionError:  # Python could parse it, but it is too deep to validate
                    raise ApiError(400, "the request is too deeply nested") from None
                except Exception as error:  # noqa: BLE001 - no traceback leaves the server
                    raise engine_error(error, log) from None

            return handler

    return Route


def models_in_form(request: Request, entries: Sequence[Mapping[str, Any]]) -> JSONResponse:
    """Return the list of models, `entries` in OpenAI's form, in the form of the API that asks."""
    if not speaks_anthropic(request.scope):
        return JSONResponse({"object": "list", "data": entries})
    data = [_in_anthropic_form(entry) for entry in entries]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JSONResponse({"data": data, "has_more": False, "first_id": None, "last_id": None, **ends})


def model_in_form(request: Request, entry: Mapping[str, Any]) -> JSONResponse:
    """Return a model, `entry` in OpenAI's form, in the form of the API that asks."""
    return JSONResponse(_in_anthropic_form(entry) if speaks_anthropic(request.scope) else entry)


def _in_anthropic_form(entry: Mapping[str, Any]) -> dict[str, Any]:
    name, made = entry["id"], datetime.fromtimestamp(entry["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": made}


def absent(line: str) -> Callable[[], Any]:
    """Return a handler that refuses a route which other servers have and this one lacks; `line` says why."""

    async def refuse() -> Response:
        raise ApiError(501, line)

    return refuse


NO_VECTORS = (
    "this server writes text and makes no vectors: a server of an embedding model does, "
    "`edgespec serve MODEL --embeddings`"
)
"""The answer to a request for vectors where text is written."""


def refuse_routes(app: FastAPI, paths: Iterable[str], line: str) -> None:
    """Have `app` refuse a POST of these paths with `line`."""
    for path in paths:
        app.add_api_route(path, absent(line), methods=["POST"], include_in_schema=False)


def _said_to_be_json(request: Request) -> MutableMapping[str, Any]:
    """Return the scope of a request with JSON's Content-Type. Raises ApiError for one of another web page.

    Without JSON's Content-Type a browser lets any page send it. The gate refuses pages by their Origin; this
    is for a browser that names the page only by its newer header.
    """
    _refuse_other_pages(request)
    others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
    return {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}


def _check_form(request: Request, kind: str) -> None:
    _refuse_other_pages(request)
    if kind != "multipart/form-data":
        raise ApiError(415, "the body must be a form with the file: send it as multipart/form-data")


def _refuse_other_pages(request: Request) -> None:
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and not request.scope.get("state", {}).get(ALLOWED_PAGE):
        raise ApiError(403, "this server answers no other web page", code="origin")


class _StrictRequest(Request):
    async def json(self) -> Any:  # noqa: ANN401 - JSON
        return strict_json(await self.body())


def strict_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the value of `data`. Raises JSONDecodeError if it is not JSON, or if reading loses a part."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return found

    def number(text: str) -> float:
        if math.isinf(value := float(text)):
            raise ValueError(f"the number {text[:20]} is too large")
        return value

    try:
        found = json.loads(
            data.decode(), object_pairs_hook=unique, parse_float=number, parse_constant=refuse_constant
        )
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        reason = "a string holds half a surrogate pair, which is no Unicode"
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "it is too deeply nested"
    except ValueError as error:
        reason = str(error).partition(";")[0]  # the rest explains Python's limit on digits
    else:
        return found
    raise json.JSONDecodeError(reason, "", 0)


def add_error_handlers(app: FastAPI) -> None:
    """Have `app` answer everything that goes wrong in the form of the API that was asked."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(RequestValidationError)
    async def mistake(request: Request, error: RequestValidationError) -> JSONResponse:
        body = dict(error.body) if isinstance(error.body, Mapping) else error.body  # of a form, too
        return validation_error(error.errors(), body).response(request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        lines = {
            404: f"there is no {request.url.path[:80]} here",
            405: f"{request.method[:20]} is not for {request.url.path[:80]}",
        }
        line = lines.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, line, headers=error.headers).response(request.scope)


class HeadAsGet:
    """ASGI middleware: a route that answers GET answers HEAD, whose body the HTTP server leaves out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as a GET, up to its answer."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def as_head(message: Message) -> None:
            scope["method"] = "HEAD"
            await send(message)

        scope["method"] = "GET"  # in place: servers and metrics look at it afterwards
        try:
            await self._app(scope, receive, as_head)
        finally:
            scope["method"] = "HEAD"
