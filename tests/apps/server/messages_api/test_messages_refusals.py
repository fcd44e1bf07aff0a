"""What /v1/messages refuses, and that each refusal has Anthropic's form, whoever refuses."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import pytest
from anthropic.types.shared import ErrorResponse

from anthropic_events import ASKED
from edgespec.apps.server.gate import Gate, GateLimits
from server_app import Served


def test_a_prompt_that_is_too_long(client: anthropic.Anthropic):
    """Agents know the line, and shorten the conversation."""
    long = [{"role": "user", "content": "word " * 5000}]
    n = client.messages.count_tokens(model="edgespec", messages=long).input_tokens
    for stream in (False, True):
        with pytest.raises(
            anthropic.BadRequestError, match=rf"prompt is too long: {n} tokens > 4096 maximum"
        ):
            client.messages.create(**ASKED | {"messages": long}, stream=stream)


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
