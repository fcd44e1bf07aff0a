"""The page at `/`: chat with the served model. Plain files that load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import time
from importlib import resources
from pathlib import PurePath
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgespec.apps.server.page.markdown import blocks

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = sorted(
    file.name for file in resources.files(__package__).iterdir() if PurePath(file.name).suffix in _TYPES
)
_INDEX = "index.html"

_MARKDOWN = "/page/markdown"

PARTS = frozenset({*(f"/{name}" for name in _FILES if name != _INDEX), _MARKDOWN})
"""The paths that the page itself asks for, many times in a conversation."""

PATHS = PARTS - {_MARKDOWN} | {"/"}
"""The paths of the page's files. They hold no user's data, so they need no API key: the page asks for it."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no string ever becomes markup
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, which the ETag answers with 304
}


def add_page(app: Starlette) -> None:
    """Add the page's routes to `app`."""
    app.router.routes.extend(_route("/" if name == _INDEX else f"/{name}", name) for name in _FILES)
    app.router.routes.append(Route(_MARKDOWN, _answer_markdown, methods=["POST"], include_in_schema=False))


async def _answer_markdown(request: Request) -> Response:
    """Answer with the blocks of a text; ?open says that more is to come."""
    source = (await request.body()).decode(errors="replace")
    return JSONResponse(await run_in_threadpool(_timed_blocks, source, "open" in request.query_params))


def _timed_blocks(source: str, is_open: bool) -> dict[str, Any]:
    began = time.thread_time()
    found = blocks(source, is_open=is_open)
    return {
        "blocks": found,
        "ms": 1000 * (time.thread_time() - began),
    }  # the page asks less often for slow ones


def _route(path: str, name: str) -> Route:
    media_type = f"{_TYPES[PurePath(name).suffix]}; charset=utf-8"
    body = resources.files(__package__).joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}

    async def answer(request: Request) -> Response:
        known = (
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        )
        if etag in known:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return Route(path, answer, include_in_schema=False)
