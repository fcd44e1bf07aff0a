"""Checks a request before the routes see it: who sends it, and how large it is.

If the server has an API key, every request needs it, except those for its health and the page's files.
Without a key the danger is the browser: any web page can send requests to a server on this machine. Two
checks keep such pages out. The Host header must be a name of this machine, which it is not if a page's own
host name was made to resolve to 127.0.0.1. And the Origin header, with which a browser says which page sends
the request, must be the server's own, or one that the server was told to let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.page import PATHS
from edgespec.cli.local_run import PATH as RUN_PATH
from edgespec.errors import UsageError

HEALTH = frozenset({"/health", "/v1/health"})

_FREE = PATHS | HEALTH

X_API_KEY = "x-api-key"
"""Anthropic's header for the key, instead of `Authorization`."""

ALLOWED_PAGE = "is_allowed_page"
"""In a request's state: whether a page of another site sends it that the server lets in."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")

_AUDIO = "/v1/audio/"

_LINGER_S = 1.0
_LONGEST_LENGTH = 19  # digits of a Content-Length

MIB = 1 << 20


@dataclass(frozen=True)
class GateLimits:
    """The requests that a server accepts."""

    max_body: int = 32 * MIB
    """Bytes of a request's body."""
    max_audio: int = 100 * MIB
    """Bytes of a body with a recording."""
    api_key: str | None = None
    """The key that `Authorization: Bearer`, or Anthropic's `x-api-key`, must hold; None: no key is needed."""
    run_key: str | None = None
    """The key of `edgespec run` (local_run.py), used instead of `api_key`; None: it is refused."""
    loopback: bool = True
    """Whether Host must be a name of this machine (localhost, 127.0.0.1); checked only without a key."""
    origins: tuple[str, ...] = ()
    """Other sites (`read_origin`) whose pages may ask, and read the answers; a key is needed as without."""

    def allows(self, origin: str) -> bool:
        """Whether web pages of `origin`, another site, may send requests."""
        return origin in self.origins or "*" in self.origins


class Gate:
    """ASGI middleware: refuses what is outside `limits`, and passes the rest on with its body read.

    Browsers ask before a page of another site sends a request; they are answered if `limits` allow any site.
    """

    def __init__(self, app: ASGIApp, limits: GateLimits) -> None:
        self._app = app
        self._limits = limits
        self._checked: ASGIApp = self._check
        if limits.origins:
            self._checked = CORSMiddleware(
                self._check,
                allow_origins=limits.origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        await self._checked(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_sender(scope["path"], headers)
            if self._limits.allows(headers.get("origin", "")):
                scope.setdefault("state", {})[ALLOWED_PAGE] = True
            body = await self._read(scope["path"], headers, receive)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replay(body, receive), send)

    def _check_sender(self, path: str, headers: Headers) -> None:
        if path == RUN_PATH:
            if self._limits.run_key is None or not _has_key(headers, self._limits.run_key):
                raise ApiError(401, f"{path} is for `edgespec run` of this user", code="invalid_api_key")
        elif self._limits.api_key is None:
            self._check_page(headers)
        elif path not in _FREE and not _has_key(headers, self._limits.api_key):
            line = "this server needs its API key: send the header Authorization: Bearer KEY"
            given = headers.get("authorization", "")
            if given or X_API_KEY in headers:
                line = "the API key is wrong: it is not the one that this server was started with"
                if given and given.partition(" ")[0].lower() != "bearer":
                    line = "the header Authorization is not understood: send the API key as Bearer KEY"
            raise ApiError(401, line, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_page(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if self._limits.loopback and not (len(hosts) == 1 and _names_loopback(hosts[0])):
            names = "localhost, 127.0.0.1 and [::1]"
            raise ApiError(403, f"without an API key this server answers only to {names}", code="host")
        origins = [origin for origin in headers.getlist("origin") if not self._limits.allows(origin)]
        if any(_host_of(origin) != host.lower() for origin in origins for host in hosts):
            raise ApiError(403, "without an API key this server answers no other web page", code="origin")

    async def _read(self, path: str, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None if the client went away before it was complete."""
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            line = f"Content-Encoding {encoding[:40]!r}: send the body uncompressed"
            raise ApiError(415, line, code="content_encoding")
        most = self._limits.max_audio if path.startswith(_AUDIO) else self._limits.max_body
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > _LONGEST_LENGTH or int(announced) > most):
            raise too_large  # not one byte of it is read
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > most:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection.

    A client may lose the answer if the connection closes while it still sends. So the answer is sent at once,
    and its end a moment later; what the client sends until then is thrown away.
    """

    async def hold(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    response = error.response(scope)
    response.headers["connection"] = "close"
    await response(scope, receive, hold)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def read_origin(text: str) -> str:
    """Return an origin as browsers write it, or `*` for all. Raises UsageError for any other text."""
    origin = text.lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        problem = "must be SCHEME://HOST or SCHEME://HOST:PORT, such as http://localhost:3000, or *"
        raise UsageError(problem, field="cors", value=text)
    usual_port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0], "")
    return origin.removesuffix(usual_port)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    bearer = given.strip() if scheme.lower() == "bearer" else ""
    # In constant time, so that timing reveals nothing about the key.
    return any(
        hmac.compare_digest(one.encode(), key.encode()) for one in (bearer, headers.get(X_API_KEY)) if one
    )


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # such as http://[, which is no host's
        return origin


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive function that gives `body`, read from `receive`, and then what follows."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again
