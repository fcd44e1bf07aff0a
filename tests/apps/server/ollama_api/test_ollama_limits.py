"""Who may ask Ollama's API and how much, what waits, what fails; and its page in docs/."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from edgespec.apps.server.gate import Gate, GateLimits
from edgespec.apps.server.http_server import noting_requests
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.ollama_api import OllamaChatRequest, OllamaGenerateRequest
from edgespec.errors import silent
from server_app import Served

PAGE = Path(__file__).parents[4] / "docs" / "server.md"
ADDRESS = "http://127.0.0.1:11434"


def test_the_gate_holds_for_these_routes_and_answers_in_their_form(served: Served):
    async def ask(limits: GateLimits, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(Gate(served.app, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            return await client.post("/api/show", content=b'{"model": "edgespec"}', headers=headers)

    for headers, status, words in (
        ({}, 200, ""),
        ({"content-type": "application/x-www-form-urlencoded"}, 200, ""),
        ({"origin": "http://localhost:8080", "content-type": "text/plain"}, 200, ""),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403, "no other web page"),
        ({"origin": "null", "content-type": "application/x-www-form-urlencoded"}, 403, "no other web page"),
        ({"sec-fetch-site": "cross-site", "content-type": "text/plain"}, 403, "no other web page"),
        ({"sec-fetch-site": "same-site"}, 403, "no other web page"),
        ({"host": "evil.example"}, 403, "localhost"),
    ):
        answer = asyncio.run(ask(GateLimits(), **headers))
        assert answer.status_code == status, headers
        if status != 200:
            assert set(answer.json()) == {"error"} and words in answer.json()["error"]
    keyed = GateLimits(api_key="right-key", loopback=False)
    answer = asyncio.run(ask(keyed))
    assert (answer.status_code, "API key" in answer.json()["error"]) == (401, True)
    assert asyncio.run(ask(keyed, authorization="Bearer right-key")).status_code == 200
    assert asyncio.run(ask(GateLimits(max_body=5))).json() == {"error": "the body is larger than 5 bytes"}


def test_these_routes_are_counted_as_the_others(served: Served):
    metrics = Metrics()

    async def ask() -> None:
        gate = Gate(served.app, GateLimits())
        transport = httpx.ASGITransport(noting_requests(gate, silent, metrics.count_request))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.get("/api/version")
            await client.post("/api/show", content=b'{"model": "edgespec"}')

    asyncio.run(ask())
    counted = metrics.render().decode()
    for route in ('method="GET",route="/api/version"', 'method="POST",route="/api/show"'):
        assert f'edgespec_requests_total{{{route},status="200"}} 1.0' in counted


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_as_in_ollamas_documentation(served: Served):
    """No Content-Type is given there: curl says that it is a form."""

    def curl(*arguments: str) -> str:
        done = subprocess.run(
            ["curl", "-sS", *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    body = '{"model": "edgespec", "prompt": "Why is the sky blue?", "options": {"num_predict": 3}}'
    lines = [json.loads(line) for line in curl(f"{served.url}/api/generate", "-d", body).splitlines()]
    assert lines[-1]["done"] and lines[-1]["eval_count"] == 3
    head = curl("-I", served.url)
    assert head.startswith("HTTP/1.1 200"), "clients look whether the server lives"
    for path in ("/api/tags", "/api/version", "/api/ps"):
        assert curl("-I", f"{served.url}{path}").startswith("HTTP/1.1 200")
    assert "error" in json.loads(
        curl("-X", "DELETE", f"{served.url}/api/delete", "-d", '{"model": "edgespec"}')
    )
    assert "error" in json.loads(curl(f"{served.url}/api/nothing"))
    assert "not valid JSON" in json.loads(curl(f"{served.url}/api/chat", "-d", "model=edgespec"))["error"]


# ---- docs/server.md ----


def section() -> str:
    return PAGE.read_text(encoding="utf-8").partition("\n### Ollama's API\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(), re.M | re.S)


def test_the_examples_of_the_page(served: Served, capsys: pytest.CaptureFixture[str]):
    (python,) = blocks("python")
    exec(compile(python.replace(ADDRESS, served.url), PAGE.name, "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()
    (bash,) = blocks("bash")
    start, _, ask = bash.replace(ADDRESS, served.url).partition("\n")
    assert start == "edgespec serve --port 11434"
    answer = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert json.loads(answer.splitlines()[-1])["done"] is True


def test_the_page_names_every_field():
    text = section()
    fields = {*OllamaChatRequest.model_fields, *OllamaGenerateRequest.model_fields} - {"model", "stream"}
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []
    links = re.findall(r"\]\(([^)#]+\.md)\)", text)
    assert links and [link for link in links if not (PAGE.parent / link).exists()] == []
