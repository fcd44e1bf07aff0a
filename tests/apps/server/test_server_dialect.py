"""An API in a file of its own: it streams, calls a tool, stops, and refuses in its own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chat_templates import FAMILIES
from other_package import offer
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("lines") / "tiny.gguf"
    with pytest.MonkeyPatch.context() as patched:
        offer(patched, "lines", "lines_dialect:add", "edgespec.dialects")
        with serving(write_tiny_gguf(path, seed=1, chat_template=FAMILIES["hermes"])) as running:
            yield running


def lines(served: Served, said: str, status: int = 200, **head: Any) -> list[Any]:
    text = "".join(f"{name}: {value}\n" for name, value in head.items())
    with served.client() as client:
        answer = client.post("/lines", content=f"{text}\n{said}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == status, answer.text
    return [json.loads(line) for line in answer.text.splitlines() if not line.startswith(":") and line]


def test_an_api_in_a_file_of_its_own(served: Served):
    *parts, end = lines(served, "hello", most=12)
    said = "".join(part["text"] for part in parts)
    assert len(parts) > 1 and end == {"end": "length", "tokens": 12}
    assert lines(served, "hello", most=12, whole=1) == [{"text": said, "do": []}]
    *parts, end = lines(served, "hello", most=12, stop=said[4:6])
    assert "".join(part["text"] for part in parts) == said[: said.index(said[4:6])] and end["end"] == "stop"
    call, end = lines(served, "hello", do="now")
    assert (call["do"], json.loads(call["with"]), end["end"]) == ("now", {}, "tool_calls")
    assert lines(served, "hello", 400, most=0) == [
        {
            "sorry": "most: must be at least 1; 0 is for a text completion with echo, its prompt alone",
            "why": 400,
        }
    ]
    (sorry,) = lines(served, "word " * 5000, 400)
    assert "the text" in sorry["sorry"] and sorry["why"] == "context_length_exceeded"
    with served.client() as client:
        assert "/lines" in client.get("/openapi.json").json()["paths"]
