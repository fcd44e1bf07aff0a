"""The server that the tests of Ollama's API ask, and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest

from edgespec import Engine, SamplingParams
from server_app import Served, serving
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ollama") / "llama-1b-f32.gguf"
    return write_tiny_gguf(
        path, seed=1, n_ctx=4096, chat_template=TOOLS_TEMPLATE, extra={"general.license": "apache-2.0"}
    )


@pytest.fixture(scope="module")
def served(target: Path, tiny_draft_path: Path) -> Iterator[Served]:
    with serving(target, tiny_draft_path) as running:
        yield running


@pytest.fixture(scope="module")
def expected(target: Path) -> str:
    """What the engine says to "hello"."""
    with Engine(target, drafter="none", profile=False) as engine:
        return engine.generate("hello", params=SamplingParams(temperature=0), n_predict=24).text


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url) as client:
        yield client
    assert [line for line in served.log if "no effect" not in line] == []
