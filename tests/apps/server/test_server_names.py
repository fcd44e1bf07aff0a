"""Names of models in requests: one rule for every route and API, for one model or several."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.names import NamedModel, ServedNames
from embedding_app import serving_embeddings
from server_app import serving
from speech_app import recording, speech_service
from tiny_bert import TinyBert

NAMES = ServedNames(
    [
        NamedModel("Coder-1.5b-q4_k_m", ("gpt-4o", "small:1b"), title="Coder", quantization="Q4_K_M"),
        NamedModel("vectors", kinds=frozenset({"vectors"}), title="Other", size="23M"),
        NamedModel("whisper-base", kinds=frozenset({"speech"})),
        NamedModel("other", title="Coder"),
    ]
)


@pytest.mark.parametrize(
    ("asked", "kind", "number"),
    [
        (None, None, 0),
        ("", "text", 0),
        (None, "speech", 2),
        (None, "vectors", 1),
        ("EdgeSpec", "vectors", 1),
        ("edgespec:latest", "text", 0),
        ("Whisper-1", None, 2),
        ("CODER-1.5B-Q4_K_M:Latest", None, 0),
        ("coder:1.5b", "text", 0),
        ("coder-1.5b:q4_k_m", "text", 0),
        ("coder", None, 0),
        ("GPT-4o:latest", None, 0),
        ("small:1b", None, 0),
        ("vectors:23m", None, 1),
        ("other", None, 3),
        ("whisper-base", "text", 2),
    ],
)
def test_the_model_that_a_name_means(asked: str | None, kind: Any, number: int):
    assert NAMES.find(asked, kind) == number


@pytest.mark.parametrize("asked", ["gpt-5", "coder:7b", "latest", ":latest:", "1.5b"])
def test_any_other_name_is_a_404_with_those_that_are_here(asked: str):
    with pytest.raises(ApiError, match=r"'Coder-1\.5b-q4_k_m', 'vectors', 'whisper-base', 'other'") as error:
        NAMES.find(asked)
    assert (error.value.status, error.value.param) == (404, "model")


SAID = [{"role": "user", "content": "hello"}]
TEXT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": SAID, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": SAID}),
    ("/tokenize", {"content": "a"}),
    ("/detokenize", {"tokens": [1]}),
    ("/api/chat", {"messages": SAID, "options": {"num_predict": 1}, "stream": False}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 1}, "stream": False}),
    ("/api/show", {}),
    ("/api/pull", {}),
]
VECTORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "a"}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
]


def _check(client: Any, path: str, body: dict[str, Any], name: str) -> None:
    given: list[dict[str, Any]] = [{}, {"model": ""}, {"model": None}]
    given += [{"model": one} for one in ("edgespec", f"{name.upper()}:latest", "EDGESPEC:Latest")]
    for model in given:
        answer = client.post(path, json=body | model)
        assert answer.status_code == 200, (model, answer.text)
    answer = client.post(path, json=body | {"model": "gpt-5"})
    assert (answer.status_code, "gpt-5" in answer.text or path == "/api/pull") == (404, True)


def test_each_route_of_a_server_of_one_model_and_a_whisper_model(tiny_path):
    with (
        speech_service(tiny_path) as speech,
        serving(tiny_path, speech=speech.service, service={"names": ["Own", "other"]}) as served,
        served.client() as client,
    ):
        for path, body in TEXT:
            _check(client, path, body, "own")
            assert client.post(path, json=body | {"model": "OTHER"}).status_code == 200
        for name, found in (("OWN:latest", "Own"), ("edgespec", "Own"), ("Whisper-1", "whisper-tiny")):
            assert client.get(f"/v1/models/{name}").json()["id"] == found
        form: dict[str, Any] = {"files": {"file": ("a.wav", recording(1.0))}}
        for model in ({}, {"model": "Whisper-1"}, {"model": "WHISPER-tiny:latest"}, {"model": "edgespec"}):
            answer = client.post("/v1/audio/transcriptions", data=model, **form)
            assert answer.status_code == 200, (model, answer.text)
        assert client.post("/v1/audio/transcriptions", data={"model": "own"}, **form).status_code == 404


def test_each_route_of_a_server_of_vectors(tmp_path):
    with serving_embeddings(TinyBert().write(tmp_path / "tiny.gguf")) as served, served.client() as client:
        for path, body in VECTORS:
            _check(client, path, body, "tiny")
