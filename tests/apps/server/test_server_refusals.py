"""What the server refuses: a row of refusals.txt each, asked of a server of text, of vectors or of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from embedding_app import serving_embeddings
from refusals import check_all_asked, check_message, rows
from server_app import serving
from speech_app import recording, speech_service
from tiny_bert import TinyBert
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf

ROWS = rows(Path(__file__).with_name("refusals.txt"))
HELLO = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "edgespec", "messages": HELLO},
    "/v1/completions": {"model": "edgespec", "prompt": "hello"},
    "/v1/responses": {"model": "edgespec", "input": "hello"},
    "/v1/messages": {"model": "edgespec", "messages": HELLO, "max_tokens": 4},
    "/api/chat": {"model": "edgespec", "messages": HELLO},
    "/api/generate": {"model": "edgespec", "prompt": "hello"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
PLACEHOLDERS = {'"LONG"': json.dumps("word " * 5000), '"MANY"': json.dumps(["a"] * 2049)}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of the servers: of a model that writes, hears and fills gaps, of vectors, of ranks."""
    folder, gaps = tmp_path_factory.mktemp("refused"), {"pre": 260, "suf": 261, "mid": 262}
    path = write_tiny_gguf(
        folder / "tiny.gguf",
        seed=1,
        chat_template=TOOLS_TEMPLATE,
        texts={token: f"<|{kind}|>" for kind, token in gaps.items()},
        kinds=dict.fromkeys(gaps.values(), 3),
        extra={f"tokenizer.ggml.fim_{kind}_token_id": token for kind, token in gaps.items()},
    )
    with ExitStack() as stack:
        speech = stack.enter_context(speech_service(path))
        text = stack.enter_context(serving(path, speech=speech.service))
        vectors = stack.enter_context(serving_embeddings(TinyBert().write(folder / "vectors.gguf")))
        ranks = stack.enter_context(
            serving_embeddings(TinyBert().write(folder / "ranks.gguf", pooling="rank"))
        )
        yield {"": text.url, "/v1/embeddings": vectors.url, "/v1/rerank": ranks.url}
        assert not text.log and not vectors.log and not ranks.log, "a refusal is no failure"


def asked_by(row: str) -> str:
    """Return the route and the body of a row."""
    return row.split(" ", 2)[2]


@pytest.mark.proof
@pytest.mark.parametrize("row", ROWS, ids=asked_by)
def test_a_refusal(row: str, urls: dict[str, str], pytestconfig: pytest.Config) -> None:
    """One line that names the field, in the form of the API, whether a stream was asked for or not."""
    status, field, path, body = row.split(" ", 3)
    for placeholder, value in PLACEHOLDERS.items():
        body = body.replace(placeholder, value)
    url, changes = urls.get(path, urls[""]) + path, json.loads(body)
    if "audio" in path:
        answer = httpx.post(url, files={"file": ("a.wav", recording(0.1))}, data=changes)
    else:
        answer = httpx.post(url, json=GOOD.get(path, {}) | changes, timeout=60)
    assert answer.status_code == int(status), answer.text
    error = answer.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    if "param" in error:
        assert field in (error["param"], error["code"]), error
    else:
        assert said.startswith(field), said
    assert "\n" not in said
    check_message(asked_by(row), said, write=pytestconfig.option.write_messages)


def test_every_message_has_a_row(pytestconfig: pytest.Config) -> None:
    check_all_asked({asked_by(row) for row in ROWS}, write=pytestconfig.option.write_messages)
