"""What Ollama's API tells of the served model, the names it has, and what is not here."""

from __future__ import annotations

import re
from pathlib import Path

import ollama
import pytest

from server_app import Served
from tiny_gguf import TOOLS_TEMPLATE


def test_the_model_is_told_truly(client: ollama.Client, served: Served, target: Path):
    (listed,) = client.list().models
    assert (listed.model, listed.size) == ("llama-1b-f32:latest", target.stat().st_size)
    assert re.fullmatch("[0-9a-f]{64}", listed.digest or "")
    assert listed.details and (listed.details.family, listed.details.format) == ("llama", "gguf")
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.digest, loaded.size_vram) == (listed.model, listed.digest, 0)
    assert loaded.expires_at and loaded.expires_at.year > 2300
    shown = client.show("edgespec")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.template, shown.license) == (TOOLS_TEMPLATE, "apache-2.0")
    info = dict(shown.modelinfo or {})
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 4096)
    assert info["general.parameter_count"] == served.engine.target.n_params
    assert info["tokenizer.ggml.tokens"] == []
    assert "tokenizer.chat_template" not in info
    with served.client() as plain:
        named = plain.post("/api/show", json={"name": "llama-1b-f32", "verbose": True, "system": ""})
        assert named.json()["capabilities"] == shown.capabilities
        assert re.fullmatch(r"\d+\.\d+\.\d+", plain.get("/api/version").json()["version"])


@pytest.mark.parametrize("name", ["edgespec", "llama-1b", "llama-1b:latest"])
def test_a_pull_of_the_served_model_succeeds(client: ollama.Client, name: str):
    assert client.pull(name).status == "success"
    assert [line.status for line in client.pull(name, stream=True)] == ["pulling manifest", "success"]


def test_what_ollama_has_and_this_server_has_not_is_one_line(client: ollama.Client):
    for number, ask in enumerate(
        (
            lambda: client.pull("llama3.2"),
            lambda: [*client.pull("llama3.2", stream=True)],
            lambda: client.push("llama3.2"),
            lambda: client.create("mine", from_="llama3.2"),
            lambda: client.copy("edgespec", "mine"),
            lambda: client.embed("edgespec", "hello"),
            lambda: client.embeddings("edgespec", "hello"),
            lambda: client.delete("edgespec"),
        )
    ):
        with pytest.raises(ollama.ResponseError, match=r"this server (has one model|writes text)") as caught:
            ask()
        assert caught.value.status_code == (404 if number < 2 else 501), (
            "a model that is not here, or a route"
        )
