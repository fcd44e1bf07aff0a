"""Web pages of other sites that the server lets in: what a browser asks before, sends, and may read."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from edgespec.apps.server import gate
from edgespec.apps.server.gate import Gate, GateLimits, read_origin
from server_app import Served, serving

PAGE = "https://chat.example"
KEYED = GateLimits(api_key="right-key", loopback=False, origins=(PAGE,))


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused client's connection closes soon."""
    monkeypatch.setattr(gate, "_LINGER_S", 0.01)


def ask(served: Served, limits: GateLimits, method: str, path: str, **options: Any) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(Gate(served.app, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asked())


def test_browsers_are_told_on_every_route_without_a_key(served: Served) -> None:
    wanted = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        "Access-Control-Request-Private-Network": "true",
    }
    for path in {getattr(route, "path", "/") for route in served.app.routes}:
        told = ask(served, KEYED, "OPTIONS", path, headers=wanted)
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, PAGE), path
        assert told.headers["access-control-allow-headers"] == wanted["Access-Control-Request-Headers"]
        assert told.headers["access-control-allow-private-network"] == "true"
        other = ask(served, KEYED, "OPTIONS", path, headers=wanted | {"Origin": "https://evil.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        nobody = ask(served, GateLimits(), "OPTIONS", path, headers=wanted)
        assert nobody.status_code in (401, 403) and "access-control-allow-origin" not in nobody.headers


@pytest.mark.parametrize("limits", [GateLimits(origins=(PAGE,)), GateLimits(origins=("*",))])
@pytest.mark.parametrize("path", ["/api/show", "/tokenize"])
def test_a_page_that_is_let_in_is_answered_also_without_a_key(
    served: Served, limits: GateLimits, path: str
) -> None:
    body = {"model": "edgespec"} | ({"content": "abc"} if path == "/tokenize" else {})
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    assert ask(served, GateLimits(), "POST", path, json=body, headers=headers).status_code == 403
    answer = ask(served, limits, "POST", path, json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert answer.headers["access-control-expose-headers"] == "*"


def test_refusals_can_be_read_and_the_other_checks_stay(served: Served) -> None:
    limits = GateLimits(origins=(PAGE,), max_body=5)
    for path in ("/v1/completions", "/api/chat"):
        for given, changed, status in (
            (KEYED, {}, 401),
            (limits, {"host": "evil.example"}, 403),
            (limits, {}, 413),
            (limits, {"origin": "https://evil.example"}, 403),
        ):
            answer = ask(served, given, "POST", path, json={"a": 1}, headers={"origin": PAGE} | changed)
            assert (answer.status_code, "error" in answer.json()) == (status, True)
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (None if "origin" in changed else PAGE)


def test_origins_are_read_as_browsers_write_them() -> None:
    for given, origin in (
        ("HTTPS://Chat.Example:443", PAGE),
        ("http://localhost:80", "http://localhost"),
        ("http://[::1]:80", "http://[::1]"),
        ("https://chat.example:80", "https://chat.example:80"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("*", "*"),
    ):
        assert read_origin(given) == origin


ASK = """async ([url, key, body]) => {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${key}` };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  return [answer.status, await answer.text()];
}"""


def test_a_browser_lets_the_page_read_answers_and_refusals(browser: Any, served: Served, tiny_path) -> None:
    limits = GateLimits(api_key="right-key", loopback=False, origins=(served.url,))
    with serving(tiny_path, gate=limits) as other:
        asked = {"model": "edgespec", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        page = browser.new_context().new_page()
        page.goto(f"{served.url}/health")
        for path, limit, last in (
            ("/v1/chat/completions", {"max_tokens": 4}, "[DONE]"),
            ("/api/chat", {"options": {"num_predict": 4}}, "}"),
        ):
            status, text = page.evaluate(ASK, [f"{other.url}{path}", "right-key", asked | limit])
            assert (status, text.rstrip().endswith(last)) == (200, True), text
            status, text = page.evaluate(ASK, [f"{other.url}{path}", "wrong-key", asked])
            assert (status, "API key is wrong" in text) == (401, True)
        page.goto(served.url.replace("127.0.0.1", "localhost") + "/health")
        with pytest.raises(Exception, match="Failed to fetch"):
            page.evaluate(ASK, [f"{other.url}/v1/chat/completions", "right-key", asked])
        page.context.close()
