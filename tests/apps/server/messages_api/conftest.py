"""The server that the tests of Anthropic's API ask, and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from chat_templates import THINKING_CODER
from server_app import Served, serving
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_draft_path: Path) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("messages") / "tiny.gguf"
    write_tiny_gguf(path, seed=1, n_ctx=4096, chat_template=TOOLS_TEMPLATE)
    with serving(path, tiny_draft_path) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template begins each answer with a thought."""
    path = tmp_path_factory.mktemp("thinking") / "tiny.gguf"
    with serving(write_tiny_gguf(path, seed=1, n_ctx=4096, chat_template=THINKING_CODER)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client
    assert served.log == []
