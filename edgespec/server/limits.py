"""What a request has to pass before the routes see it: who may ask, and how much and how slowly it may send.

With an API key every request needs it, but for /health and the page's files. Without one the browser is the
danger: any web page may send requests to a server on loopback. So then a request must name the server by a
name of loopback (a page that rebinds its own name to 127.0.0.1 does not), and one that comes from a page, by
its Origin, must come from the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.faults import Fault
from edgespec.server.page import PATHS

_FREE = PATHS | {"/health"}

_LINGER_S = 1.0

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one server lets through."""

    max_body: int = 4 * MIB
    """Bytes of a request's body."""
    body_s: float = 30.0
    """Seconds in which the whole body must have come."""
    api_key: str | None = None
    """What `Authorization: Bearer` must hold; None: nobody is asked."""
    loopback: bool = True
    """Whether only names of loopback may stand in Host; looked at where there is no key."""


class Gate:
    """ASGI middleware that answers what `limits` refuse, and hands on the rest with its body read."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_sender(scope["path"], headers)
            body = await self._read(headers, receive)
        except Fault as fault:
            await _refuse(fault, scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_sender(self, path: str, headers: Headers) -> None:
        if self._limits.api_key is None:
            self._check_page(headers)
        elif path not in _FREE and not _has_key(headers, self._limits.api_key):
            raise Fault(
                401,
                "this server needs its API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_page(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if self._limits.loopback and not (len(hosts) == 1 and _names_loopback(hosts[0])):
            names = "localhost, 127.0.0.1 and [::1]"
            raise Fault(403, f"without an API key this server answers only to {names}", code="host")
        origins = headers.getlist("origin")
        if any(urlsplit(origin).netloc.lower() != host.lower() for origin in origins for host in hosts):
            raise Fault(403, "without an API key this server answers no other web page", code="origin")

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None where the client went away before it was complete."""
        most = self._limits.max_body
        too_large = Fault(413, f"the body is larger than {most} bytes", code="body_too_large")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise too_large  # not one byte of it is read
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Fault(408, f"the body was not complete within {self._limits.body_s:g} s") from None


async def _refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection.

    To close it while the client still sends would take the answer from it too: the answer goes out whole, and
    only its end waits a moment while what comes is thrown away.
    """

    async def hold(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    response = fault.response()
    response.headers["connection"] = "close"
    await response(scope, receive, hold)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # In constant time: how long it takes tells nothing about the key.
    same = hmac.compare_digest(given.strip().encode(), key.encode())
    return same and scheme.lower() == "bearer"


def _names_loopback(host: str) -> bool:
    """Return whether a Host header, of any port, names this machine alone."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives the whole body first, then what else comes: that the client went away."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
