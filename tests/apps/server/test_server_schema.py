"""A property-based run of schemathesis against our OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from server_app import Served, serving
from speech_app import speech_service
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.proof

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of a small context, so that answers are short."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("schema") / "short.gguf", seed=1, n_ctx=256)
    with speech_service(path) as speech, serving(path, speech=speech.service) as running:
        yield running


@pytest.fixture(scope="module")
def description(served: Served) -> Any:
    found = schemathesis.openapi.from_url(f"{served.url}/openapi.json")

    @found.hook
    def map_body(context: Any, body: Any) -> Any:
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            body["model"] = "edgespec"  # else all of it would be 404
            if isinstance(body.get("options"), dict):
                body["options"] = {"num_predict": 4}
            limits = ("max_tokens", "max_completion_tokens")
            for name in ("max_output_tokens",) if context.operation.path == "/v1/responses" else limits:
                if name not in body or (isinstance(body[name], int) and body[name] > 4):
                    body[name] = 4
        return body

    return found


OPERATIONS = [
    ("GET", "/health", "positive", 3),
    ("GET", "/metrics", "positive", 3),
    ("GET", "/v1/models", "positive", 3),
    ("GET", "/v1/models/{name}", "positive", 10),
    ("POST", "/v1/chat/completions", "positive", 10),
    ("POST", "/v1/chat/completions", "negative", 12),
    ("POST", "/v1/responses", "positive", 10),
    ("POST", "/v1/responses", "negative", 12),
    ("POST", "/v1/responses/input_tokens", "positive", 5),
    ("GET", "/v1/responses/{response_id}", "positive", 3),
    ("POST", "/v1/completions", "positive", 10),
    ("POST", "/v1/completions", "negative", 12),
    ("POST", "/infill", "negative", 8),
    ("POST", "/tokenize", "positive", 10),
    ("POST", "/tokenize", "negative", 8),
    ("POST", "/detokenize", "positive", 10),
    ("POST", "/detokenize", "negative", 8),
    ("POST", "/v1/audio/transcriptions", "positive", 10),
    ("POST", "/v1/audio/transcriptions", "negative", 8),
    ("POST", "/v1/audio/translations", "positive", 5),
    ("GET", "/api/tags", "positive", 3),
    ("GET", "/api/ps", "positive", 3),
    ("GET", "/api/version", "positive", 3),
    ("GET", "/props", "positive", 3),
    ("GET", "/lora-adapters", "positive", 3),
    ("POST", "/api/pull", "positive", 5),
    ("POST", "/api/pull", "negative", 10),
    ("POST", "/api/show", "positive", 5),
    ("POST", "/api/show", "negative", 10),
    ("POST", "/api/chat", "positive", 10),
    ("POST", "/api/chat", "negative", 12),
    ("POST", "/api/generate", "positive", 10),
    ("POST", "/api/generate", "negative", 12),
    ("POST", "/v1/messages", "positive", 10),
    ("POST", "/v1/messages", "negative", 12),
    ("POST", "/v1/messages/count_tokens", "positive", 5),
]


@pytest.mark.parametrize(("method", "path", "mode", "n"), OPERATIONS)
def test_answers_are_as_described(
    served: Served, description: Any, method: str, path: str, mode: str, n: int
):
    operation = description[path][method]

    @given(operation.as_strategy(generation_mode=GenerationMode(mode)))
    @settings(max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def answers(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    answers()
    assert [line for line in served.log if "no effect" not in line] == [], (
        "nothing failed that is not the client's mistake"
    )


def test_the_description_names_every_route_and_no_status_that_is_never_sent(served: Served):
    with served.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert {*paths} == {path for _, path, _, _ in OPERATIONS} | {"/v1/health"}
    statuses = {status for path in paths.values() for route in path.values() for status in route["responses"]}
    assert "422" not in statuses
