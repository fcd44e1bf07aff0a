"""One mistake in each API: the same status, each API's name of the field, each API's form of an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
LIST = {"type": "array"}
NO_SCHEMA = {"type": 3}


def asked(text: str = "hello", **fields: Any) -> dict[str, dict[str, Any]]:
    messages = {"messages": [{"role": "user", "content": text}]} | fields
    return {CHAT: messages, RESPONSES: {"input": text} | fields, MESSAGES: {"max_tokens": 4} | messages} | {
        OLLAMA: messages
    }


def with_tool(name: str, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    function = {"name": name, "parameters": schema}
    tool = {"type": "function", "function": function}
    tools = {CHAT: tool, RESPONSES: {"type": "function", **function}, OLLAMA: tool}
    tools[MESSAGES] = {"name": name, "input_schema": schema}
    return {path: body | {"tools": [tools[path]]} for path, body in asked().items()}


def with_schema(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    named = {"type": "json_schema", "name": "a", "schema": schema}
    fields: dict[str, dict[str, Any]] = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        RESPONSES: {"text": {"format": named}},
        MESSAGES: {"output_config": {"format": named}},
        OLLAMA: {"format": schema},
    }
    return {path: body | fields[path] for path, body in asked().items()}


def sampled(**options: Any) -> dict[str, dict[str, Any]]:
    return asked(**options) | {OLLAMA: asked()[OLLAMA] | {"options": options}}


SAME = dict.fromkeys((CHAT, RESPONSES, MESSAGES, OLLAMA))
FORMATS = dict(zip(SAME, ("response_format", "text.format", "output_config.format", "format"), strict=True))
SCHEMAS = {CHAT: "tools.0.function.parameters", RESPONSES: "tools.0.parameters"} | {
    MESSAGES: "tools.0.input_schema",
    OLLAMA: "tools.0.function.parameters",
}
NAMES = dict.fromkeys(SAME, "tools.0.name") | dict.fromkeys((CHAT, OLLAMA), "tools.0.function.name")
MISTAKES: dict[str, tuple[dict[str, dict[str, Any]], int, dict[str, str]]] = {
    "model": (asked(model="nobody"), 404, dict.fromkeys(SAME, "model 'nobody' not found")),
    "temperature": (
        sampled(temperature=-1),
        400,
        dict.fromkeys(SAME, "temperature: must") | {OLLAMA: "options.temperature -1: must"},
    ),
    "schema": (with_schema(NO_SCHEMA), 400, {path: f"{name}: " for path, name in FORMATS.items()}),
    "tool": (with_tool("a b", {}), 400, {path: f"{name}: must match" for path, name in NAMES.items()}),
    "arguments": (with_tool("f", LIST), 400, {path: f"{name}: must be" for path, name in SCHEMAS.items()}),
    "length": (
        asked("word " * 5000),
        400,
        dict.fromkeys(SAME, "This model's maximum context length is ") | {MESSAGES: "prompt is too long"},
    ),
}


@pytest.fixture(scope="module")
def served(tiny_path: Path) -> Iterator[Served]:
    with serving(tiny_path) as running:
        yield running


@pytest.mark.parametrize("path", SAME)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_each_api(served: Served, mistake: str, path: str):
    bodies, status, lines = MISTAKES[mistake]
    for stream in (False, True):
        with served.client() as client:
            answer = client.post(path, json={"model": "edgespec"} | bodies[path] | {"stream": stream})
        error = answer.json()["error"]
        line = error if path == OLLAMA else error["message"]
        assert (answer.status_code, line[: len(lines[path])]) == (status, lines[path]), line
        if path in (CHAT, RESPONSES) and mistake not in ("length", "model"):
            assert error["param"] == lines[path].partition(":")[0].partition(".")[0]
            assert error["type"] == "invalid_request_error"
    assert served.log == []


# ---- limits ----

LONG = {path: body | {"model": "edgespec", "temperature": 0} for path, body in asked().items()}
LONG[RESPONSES] |= {"max_output_tokens": 60_000}
LONG[OLLAMA] |= {"options": {"temperature": 0, "num_predict": 60_000}}
for one in (CHAT, MESSAGES):
    LONG[one] |= {"max_tokens": 60_000}
FAILED = {CHAT: 'data: {"error":', RESPONSES: "event: response.failed\n", MESSAGES: "event: error\n"}
FAILED[OLLAMA] = '{"error":'


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """A server whose queue is full, and one that gives an answer too little time."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("limited") / "long.gguf", seed=1, n_ctx=1 << 16)
    with (
        serving(path, worker_options={"max_queue": 0}) as full,
        serving(path, worker_options={"max_seconds": 0.2}) as short,
        full.client() as client,
        client.stream("POST", CHAT, json=LONG[CHAT] | {"stream": True}) as endless,
    ):
        text = endless.iter_text()  # kept: when it goes, the client leaves
        next(text)
        yield {"full": full, "short": short}


@pytest.mark.parametrize("path", SAME)
@pytest.mark.parametrize(
    ("name", "status", "said", "kinds"),
    [
        ("full", 503, "wait already", {"queue_full", "overloaded_error"}),
        ("short", 504, "not complete within", {"timeout", "timeout_error", "server_error"}),
    ],
)
def test_a_limit_in_each_api(
    limited: dict[str, Served], path: str, name: str, status: int, said: str, kinds: set[str]
):
    for stream in (False, True):
        with limited[name].client() as client:
            answer = client.post(path, json=LONG[path] | {"stream": stream})
        began = stream and name == "short"
        last = answer.text.rstrip().split("\n" if path == OLLAMA else "\n\n")[-1]
        assert answer.status_code == (200 if began else status), answer.text
        assert last.startswith(FAILED[path] if began else "{")
        told = json.loads(last[last.index("{") :])
        error = told.get("response", told)["error"]
        assert said in (error if path == OLLAMA else error["message"])
        assert path == OLLAMA or kinds & {error.get("code"), error.get("type")}
