"""What /v1/messages refuses, and that each refusal has Anthropic's form, whoever refuses."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import anthropic
import httpx
import pytest
from anthropic.types.shared import ErrorResponse

from anthropic_events import ASKED, answer, events_of
from edgespec.apps.server.gate import Gate, GateLimits
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf


def test_a_prompt_that_is_too_long(client: anthropic.Anthropic):
    """Agents know the line, and shorten the conversation."""
    long = [{"role": "user", "content": "word " * 5000}]
    n = client.messages.count_tokens(model="edgespec", messages=long).input_tokens
    for stream in (False, True):
        with pytest.raises(
            anthropic.BadRequestError, match=rf"prompt is too long: {n} tokens > 4096 maximum"
        ):
            client.messages.create(**ASKED | {"messages": long}, stream=stream)


def test_a_server_with_its_own_limit_of_prompts(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    with serving(path, service={"max_prompt": 30}) as running, running.client() as client:
        error = answer(client, status=400, messages=[{"role": "user", "content": "word " * 40}])
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 30 maximum", error.message)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"model": "edgespec"}', 400, "invalid_request_error"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
    ],
)
def test_every_refusal_has_the_form(
    served: Served, method: str, path: str, content: bytes | None, status: int, kind: str
):
    with served.client(headers={"Content-Type": "application/json"}) as client:
        response = client.request(method, path, content=content)
    assert response.status_code == status
    found = ErrorResponse.model_validate(response.json())
    assert found.error.type == kind and found.request_id == response.headers["request-id"]


def test_failures_have_the_form_too(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_ctx=1 << 16)
    endless_fields = {
        "max_tokens": 60_000,
        "temperature": 0,
    }  # it never ends by itself
    long = ASKED | endless_fields
    with (
        serving(path, worker_options={"max_queue": 0}) as busy,
        busy.client() as client,
        client.stream("POST", "/v1/messages", json=long | {"stream": True}) as endless,
    ):
        text = endless.iter_text()  # kept: when it goes, the client leaves
        next(text)
        for stream in (True, False):
            assert answer(client, stream=stream, status=503).type == "overloaded_error"
    with serving(path, worker_options={"max_seconds": 0.2}) as short, short.client() as client:
        assert answer(client, status=504, **endless_fields).type == "timeout_error"
        cut = client.post("/v1/messages", json=long | {"stream": True}).text
    assert cut.rstrip().rpartition("\n\n")[2].startswith("event: error\n")
    *_, last = events_of(cut)
    assert last.error.type == "timeout_error" and "not complete within" in last.error.message


def test_the_gate_answers_in_the_form_and_takes_the_key_by_its_other_name(served: Served):
    async def ask(limits: GateLimits, body: bytes = b"{}", **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(Gate(served.app, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            given = {"content-type": "application/json"} | {
                name.replace("_", "-"): value for name, value in headers.items()
            }
            return await client.post("/v1/messages", content=body, headers=given)

    keyed = GateLimits(api_key="right")
    for limits, headers, status, kind in (
        (keyed, {}, 401, "authentication_error"),
        (keyed, {"x_api_key": "wrong"}, 401, "authentication_error"),
        (keyed, {"authorization": "Bearer wrong", "x_api_key": ""}, 401, "authentication_error"),
        (GateLimits(), {"origin": "http://elsewhere"}, 403, "permission_error"),
        (GateLimits(), {"host": "elsewhere"}, 403, "permission_error"),
        (GateLimits(max_body=1), {}, 413, "request_too_large"),
        (GateLimits(), {"content_type": "text/plain"}, 415, "invalid_request_error"),
        (keyed, {"x_api_key": "right"}, 400, "invalid_request_error"),
        (keyed, {"authorization": "Bearer right"}, 400, "invalid_request_error"),
        (keyed, {"authorization": "Bearer other", "x_api_key": "right"}, 400, "invalid_request_error"),
    ):
        response = asyncio.run(ask(limits, **headers))
        told = response.json()
        assert (response.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), told
        assert told["request_id"] == response.headers["request-id"]
        assert ("key is wrong" in told["error"]["message"]) is (status == 401 and bool(headers))
