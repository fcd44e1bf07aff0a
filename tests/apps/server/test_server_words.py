"""No answer to a mistake has words of Python: wrong values for every field of every request."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from edgespec.apps.server.request_fields import OtherFields
from edgespec.apps.server.streaming import Answerer
from embedding_app import serving_embeddings
from server_app import Served, serving
from speech_app import recording, speech_service
from tiny_bert import TinyBert

WORDS = re.compile(
    r"\b(None|NoneType|True|False|dict|dictionary|bytes|bytearray|str|int|float|bool|tuple|iterable|"
    r"pydantic|Input|valid (string|integer|number|list|dictionary)|instance|validator|Value error|"
    r"Literal|Annotated|Traceback)\b"
    r"|<class|function-|Expected (`|Upload)"
)
VALUES: list[Any] = [True, 7, -1, 2.5, 1e30, "x", "", [], [1], [None], ["x"], {}, {"a": 1}]
VALUES += [{"type": "x"}, [{"type": "x"}], [{"role": "x"}], [[]], "y" * 9]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "edgespec",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "a"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        "speculative": {"drafter": "none", "gamma": 0},
    },
    "/v1/completions": {"model": "edgespec", "prompt": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}]},
    "/v1/responses": {
        "model": "edgespec",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "function_call_output", "call_id": "a", "output": "5"},
        ],
        "tools": [
            {"type": "function", **TOOL},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **TOOL}]},
            {
                "type": "custom",
                "name": "c",
                "format": {"type": "grammar", "syntax": "regex", "definition": "a"},
            },
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "text": {"format": SCHEMA, "verbosity": "low"},
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "model": "edgespec",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": False}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"format": SCHEMA, "effort": "low"},
        "metadata": {"user_id": "u"},
    },
    "/api/chat": {
        "model": "edgespec",
        "messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {"temperature": 1, "stop": ["x"]},
        "format": {"type": "object"},
    },
    "/api/generate": {"model": "edgespec", "prompt": "a"},
    "/api/show": {"model": "edgespec"},
    "/api/pull": {"model": "edgespec"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
}
for path in ("/v1/responses/input_tokens", "/v1/messages/count_tokens"):
    BODIES[path] = BODIES[path.rpartition("/")[0]]
VECTORS: dict[str, Any] = {
    "/v1/embeddings": {"model": "edgespec", "input": ["a"]},
    "/v1/rerank": {"model": "edgespec", "query": "a", "documents": ["b", {"text": "c"}]},
    "/api/embed": {"model": "edgespec", "input": "a", "options": {"num_ctx": 9}},
    "/api/embeddings": {"model": "edgespec", "prompt": "a"},
}


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all parts of `value`, itself first."""
    yield way
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in parts:
        yield from places(part, (*way, step))


def wrong(body: dict[str, Any], names: Iterable[str]) -> Iterator[Any]:
    """Yield `body` with each part, and each of `names`, changed, left out, or under another name."""
    yield from VALUES
    for way in [*places(body), *((name,) for name in names if name not in body)]:
        for value in [*VALUES, None] if way else ():
            made = copy.deepcopy(body)
            holder: Any = made
            for step in way[:-1]:
                holder = holder[step]
            holder[way[-1]] = value
            if value is None and isinstance(holder, dict):
                holder["unknown"] = holder.pop(way[-1])
            yield made


def check(answer: httpx.Response, names: re.Pattern[str], asked: object) -> None:
    assert answer.status_code != 500, (asked, answer.text)
    if answer.status_code != 200:
        line = re.sub(r"'[^']*'", "", answer.text)  # what was sent
        assert not WORDS.search(line) and not names.search(line), (asked, answer.text)


def classes(description: dict[str, Any]) -> re.Pattern[str]:
    """The names of all models of requests and answers."""
    made = (name for name in description["components"]["schemas"] if not name.istitle())
    return re.compile(rf"\b({'|'.join(made)})\b")


@pytest.fixture(scope="module")
def served(tiny_path: Path) -> Iterator[Served]:
    with speech_service(tiny_path) as speech, serving(tiny_path, speech=speech.service) as running:
        yield running


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(*_args: Any, **_options: Any) -> Response:
        return Response("{}")

    monkeypatch.setattr(Answerer, "answer", answer)


async def ask_all(app: FastAPI, path: str, bodies: Iterator[Any]) -> None:
    names = classes(app.openapi())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for body in bodies:
            data = json.dumps(body)
            answer = await client.post(path, content=data, headers={"content-type": "application/json"})
            check(answer, names, (path, data[-300:]))


@pytest.mark.usefixtures("unanswered")
@pytest.mark.parametrize("path", BODIES)
def test_mistakes_are_told_in_words_of_json(served: Served, path: str):
    shared = () if path == "/v1/completions" else OtherFields.model_fields
    described = served.app.openapi()
    body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = described["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    names = [name for name in fields if name not in shared]
    bodies = wrong(BODIES[path], names)
    asyncio.run(ask_all(served.app, path, bodies))


@pytest.mark.parametrize("ranks", [False, True])
def test_mistakes_in_requests_for_vectors(tmp_path: Path, ranks: bool):
    path = TinyBert().write(tmp_path / "tiny.gguf", pooling="rank" if ranks else "mean")
    with serving_embeddings(path) as running, running.client() as client:
        names = classes(client.get("/openapi.json").json())
        for route, good in VECTORS.items():
            for body in wrong(good, ["user", "dimensions", "encoding_format", "top_n", "truncate"]):
                data = json.dumps(body)
                answer = client.post(route, content=data, headers={"content-type": "application/json"})
                check(answer, names, (route, data))


FORM = (
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "stream",
    "timestamp_granularities[]",
)


@pytest.mark.parametrize("name", [*FORM, "file", "beam_size", "include[]", "unknown"])
def test_mistakes_in_forms(served: Served, name: str):
    names = classes(served.app.openapi())
    with served.client() as client:
        for value in ("", "x", "-1", "1e9", "yes", "[]"):
            fields = {"model": "whisper-1", name: value}
            for files in ({"file": recording()}, {}):
                answer = client.post("/v1/audio/transcriptions", data=fields, files=files)
                check(answer, names, (fields, [*files]))
