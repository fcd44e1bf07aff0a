"""What a request has to pass before the routes: real sockets against a small app behind the gate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from edgespec.apps.server import gate, http_server
from edgespec.apps.server.gate import Gate, GateLimits, is_loopback
from edgespec.apps.server.metrics import Metrics
from edgespec.errors import EdgespecError
from server_app import serving
from speech_app import speech_service


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    """A refused client's connection closes soon: each refusal waits for it here."""
    monkeypatch.setattr(gate, "_LINGER_S", 0.1)


class App:
    """Tells the size of a body; knows what it was asked."""

    def __init__(self):
        self.asked = []
        routes = [Route("/size", self.size, methods=["POST"]), Route("/health", self.health)]
        self.app = Starlette(routes=routes)

    async def size(self, request: Request):
        self.asked.append("/size")
        return PlainTextResponse(str(len(await request.body())))

    async def health(self, _request):
        return PlainTextResponse("ok")


@contextlib.contextmanager
def running(limits):
    """Serve `App` behind the gate as `edgespec serve` would; yields its port, the app and its metrics."""
    inner, metrics = App(), Metrics()
    config = uvicorn.Config(
        http_server.noting_requests(Gate(inner.app, limits), lambda _line: None, metrics.count_request),
        http="h11",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1,
    )
    ready = threading.Event()
    server = http_server.HttpServer(config, ready.set)
    bound = http_server.bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        assert ready.wait(60)
        yield port, inner, metrics
    finally:
        server.should_exit = True
        thread.join(60)


def exchange(port, *parts):
    """Send `parts` and return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                answer += data
        return answer


def post(body=b"", *, path="/size", host="localhost", close=True, **headers):
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *(["Connection: close"] if close else [])]
    fields = {
        "Content-Length": len(body),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refused(answer, status, *words):
    """A whole answer with this status, in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]


# ---- who may ask ----


def test_a_server_of_loopback_answers_its_own_names_alone():
    with running(GateLimits()) as (port, app, metrics):
        for host in ("localhost", f"localhost:{port}", "127.0.0.1:9", "[::1]:8080", "LOCALHOST", "127.1.2.3"):
            assert exchange(port, post(b"abc", host=host)).endswith(b"\r\n\r\n3"), host
        asked = len(app.asked)
        for host in (
            "evil.example",
            "localhost.evil.example",
            "0.0.0.0",
            "[::1",
            "",
            "192.168.1.2",
            "a@b:c:d",
        ):
            refused(exchange(port, post(b"abc", host=host)), 403, "localhost")
        two = post(b"abc").replace(b"Host: localhost", b"Host: localhost\r\nHost: evil.example")
        assert b" 200 " not in exchange(port, two).splitlines()[0]
        assert len(app.asked) == asked
    assert b'edgespec_requests_total{method="POST",route="other",status="403"} 7.0' in metrics.render()


def test_other_web_pages_are_refused_and_the_servers_own_is_not():
    with running(GateLimits()) as (port, app, _):
        own = f"http://localhost:{port}"
        assert exchange(port, post(b"abc", host=f"localhost:{port}", Origin=own)).endswith(b"3")
        for origin in (
            "http://evil.example",
            "null",
            f"http://localhost:{port + 1}",
            "https://localhost",
            "",
        ):
            answer = exchange(port, post(b"abc", host=f"localhost:{port}", Origin=origin))
            refused(answer, 403, "web page")
        assert app.asked == ["/size"]


def test_with_a_key_everything_but_health_and_the_page_needs_it():
    with running(GateLimits(api_key="right-key", loopback=False)) as (port, app, _):
        for given in (None, "Bearer", "Bearer wrong", "Bearer right-key2", "Basic right-key", "right-key"):
            answer = exchange(port, post(b"abc", host="any.example", Authorization=given))
            words = (
                "needs its API key" if given is None else "Bearer KEY" if "earer" not in given else "wrong"
            )
            refused(answer, 401, "API key", words)
            assert b"www-authenticate: Bearer" in answer
        assert app.asked == []
        answer = exchange(port, post(b"abc", host="any.example", authorization="bearer right-key"))
        assert answer.endswith(b"3")
        get = b"GET /health HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n"
        assert exchange(port, get).endswith(b"ok")
        page = exchange(port, get.replace(b"/health", b"/page.js"))
        assert page.startswith(b"HTTP/1.1 404"), "let through; this app has no page"
        assert exchange(port, get.replace(b"/health", b"/v1/health")).startswith(b"HTTP/1.1 404"), "as that"
        ollama = exchange(port, get.replace(b"/health", b"/api/tags"))
        assert set(json.loads(ollama.partition(b"\r\n\r\n")[2])) == {"error"}, "in the form of the API asked"
        refused(exchange(port, get.replace(b"/health", b"/metrics")), 401)
        refused(exchange(port, get.replace(b"/health", b"/health/../size")), 401)


def test_addresses_of_this_machine_alone():
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.8.9.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
    assert not is_loopback("192.168.0.1")
    assert not is_loopback("fe80::1%eth0")


# ---- how much ----


def test_a_body_may_be_as_large_as_allowed_and_no_larger():
    with running(GateLimits(max_body=100_000)) as (port, app, _):
        assert exchange(port, post(b"x" * 100_000)).endswith(b"\r\n\r\n100000")
        refused(exchange(port, post(b"x" * 100_001)), 413, "100000 bytes")
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        chunked = post(Content_Length=None, Transfer_Encoding="chunked")
        assert exchange(port, chunked, chunk * 6, b"0\r\n\r\n").endswith(str(6 * 0x4000).encode())
        refused(exchange(port, chunked, chunk * 7, b"0\r\n\r\n"), 413)
        assert len(app.asked) == 2


def test_a_huge_body_is_refused_before_it_is_read():
    """The client announces a terabyte and has sent nothing of it when the answer is there."""
    with running(GateLimits(max_body=1000)) as (port, app, _):
        refused(exchange(port, post(Content_Length=10**12, close=False)), 413)
        refused(exchange(port, post(Content_Length=10**12, close=False), b"x" * 3_000_000), 413)
        assert app.asked == []


def test_a_packed_body_is_refused():
    with running(GateLimits()) as (port, app, _metrics):
        for encoding in ("gzip", "br", "gzip, gzip"):
            refused(exchange(port, post(b"x", Content_Encoding=encoding)), 415, encoding, "uncompressed")
        assert exchange(port, post(b"x", Content_Encoding="identity")).endswith(b"\r\n\r\n1")
        assert app.asked == ["/size"]


def test_endless_headers_and_what_is_no_http_are_refused():
    with running(GateLimits()) as (port, app, _):
        endless = b"POST /size HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000
        assert exchange(port, endless)[:13] in (b"HTTP/1.1 400 ", b""), "an answer, where it is still read"
        for wrong in (b"\x16\x03\x01\x02\r\n\r\n", post(b"abc").replace(b"Length: 3", b"Length: -3")):
            assert exchange(port, wrong).startswith(b"HTTP/1.1 400 ")
        assert app.asked == []


# ---- the address ----


def test_an_address_that_cannot_be_had_is_one_line():
    with http_server.bind("localhost", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(EdgespecError, match=f"port {port}: .*in use"):
            http_server.bind("localhost", port)
    with http_server.bind("localhost", port):
        pass
    for host in ("no.such.host.invalid", "192.0.2.1", "a" * 300):
        with pytest.raises(EdgespecError, match=f"host {host}"):
            http_server.bind(host, 0)


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_beginning():
    seen = []

    async def accept():
        async def look(_reader, writer):
            connection = writer.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = http_server.bind("127.0.0.1", 0)
        async with await asyncio.start_server(look, sock=bound):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(accept())
    assert seen == [1]


ODD = [
    b"",
    b" ",
    b"[",
    b"http://[",
    b"http://[::1",
    b"//",
    b"null",
    b"\xff",
    b"\x80\x81",
    b"\xb2",
    b"-1",
    b"1e5",
]
ODD += [
    b"9" * 5000,
    b"a" * 9000,
    b"localhost:99999999999",
    b"[::1%25]",
    b"Bearer",
    b"Bearer \xff",
    b"Basic \xff",
]
ODD += [
    b"application/json; charset=\xff",
    b"gzip, \xff",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
]
ODD += [b"multipart/form-data; boundary=a; charset=" + one for one in (b"\xff", b"none", b"utf-16", b"idna")]
HEADERS = b"host origin content-type content-length authorization x-api-key content-encoding sec-fetch-site"
FORM = b'--a\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n--a--\r\n'


@pytest.mark.parametrize("limits", [{}, {"api_key": "k"}, {"origins": ("http://a",)}, {"loopback": False}])
def test_no_header_is_a_failure_of_the_server(tiny_path, limits):
    async def status(app, path, header, value):
        headers = {b"host": b"localhost", b"content-type": b"application/json", header: value}
        if header == b"content-type" and b"k" in limits.get("api_key", "").encode():
            headers[b"authorization"] = b"Bearer k"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
        }
        scope |= {"headers": [*headers.items()], "state": {}, "client": ("127.0.0.1", 1), "scheme": "http"}
        scope |= {"http_version": "1.1", "server": ("127.0.0.1", 80), "root_path": ""}
        parts = [{"type": "http.request", "body": FORM if "audio" in path else b"{}"}]
        sent = []

        async def receive():
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"]

    async def ask(app):
        for path in ("/v1/chat/completions", "/v1/responses", "/api/chat", "/v1/audio/transcriptions"):
            for header in HEADERS.split():
                for value in ODD:
                    found = await status(app, path, header, value)
                    assert found < 500, (path, header, value)

    with speech_service(tiny_path) as speech, serving(tiny_path, speech=speech.service) as served:
        asyncio.run(ask(Gate(served.app, GateLimits(**limits))))
        assert served.log == []


def test_headers_with_odd_bytes_are_answered_over_http():
    with running(GateLimits()) as (port, _, _):
        for name in ("Host", "Origin", "Content-Length", "Content-Type", "Authorization"):
            for value in ODD:
                head = f"POST /size HTTP/1.1\r\nConnection: close\r\n{name}: ".encode() + value + b"\r\n"
                head += b"" if name == "Host" else b"Host: localhost\r\n"
                answer = exchange(port, head + b"\r\n")
                assert answer[9:12] in (b"200", b"400", b"403", b"413"), (name, value, answer)
