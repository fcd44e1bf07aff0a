"""The servers that the tests of the Responses API ask: of a model with functions, of one that thinks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from chat_templates import HERMES
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

THINKING = HERMES.replace(
    "{{ m.content }}",
    "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content }}{{ m.content }}",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("responses") / "thinking.gguf"
    return write_tiny_gguf(path, seed=1, n_ctx=4096, chat_template=THINKING)


@pytest.fixture(scope="module")
def served(target: Path, tiny_draft_path: Path) -> Iterator[Served]:
    with serving(target, tiny_draft_path) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
    assert served.log == []


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert served.log == []
