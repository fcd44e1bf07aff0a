"""The routes of a server of an embedding or a reranking model, asked by the clients of other servers."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest

from edgespec.apps.embed.embedder import normalised
from edgespec.apps.server.embedding_routes import RERANK
from edgespec.apps.server.request_fields import REFUSED_VECTORS
from embedding_app import serving_embeddings
from server_app import serving
from tiny_bert import TinyBert

TEXTS = ["the cat", "a dog, and the cat ran!", "x"]
CLOSE = 1e-4
"""Texts may have shared a pass with others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


@pytest.fixture(scope="module")
def served(folder):
    with serving_embeddings(TinyBert().write(folder / "tiny.gguf")) as running:
        yield running


@pytest.fixture(scope="module")
def ranking(folder):
    with serving_embeddings(TinyBert().write(folder / "rank.gguf", pooling="rank")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected():
    """What the network in numpy makes of TEXTS."""

    def rows(embedder, texts=TEXTS):
        return np.stack([TinyBert().vector(embedder.tokens(text), "mean") for text in texts])

    return rows


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]
    message = message if isinstance(message, str) else message["message"]
    for word in words:
        assert word in message, message


def test_vectors_for_openais_client(client, served, expected):
    answer = client.embeddings.create(model="tiny", input=TEXTS)  # it asks for base64 by itself
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    rows = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(rows, expected(served.embedder), atol=5e-4)
    n = sum(len(served.embedder.tokens(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (n, n, "tiny")
    floats = client.embeddings.create(model="edgespec", input=TEXTS, encoding_format="float")
    np.testing.assert_allclose([entry.embedding for entry in floats.data], rows, atol=CLOSE)


def test_base64_is_of_the_same_floats(served):
    with served.client() as http:
        body = {"input": TEXTS[0], "encoding_format": "base64"}
        coded = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        plain = http.post("/v1/embeddings", json={"input": TEXTS[0]}).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(plain, np.float32))


def test_token_ids_and_dimensions(client, served):
    tokens = [served.embedder.tokens(text) for text in TEXTS]
    whole = client.embeddings.create(model="tiny", input=TEXTS)
    of_tokens = client.embeddings.create(model="tiny", input=tokens)
    one = client.embeddings.create(model="tiny", input=tokens[1])
    rows, others = ([entry.embedding for entry in answer.data] for answer in (whole, of_tokens))
    np.testing.assert_allclose(rows, others, atol=CLOSE)
    np.testing.assert_allclose(one.data[0].embedding, rows[1], atol=CLOSE)
    cut = client.embeddings.create(model="tiny", input=TEXTS, dimensions=5)
    np.testing.assert_allclose(
        [entry.embedding for entry in cut.data], normalised(np.array(rows), 5), atol=CLOSE
    )


def test_ollamas_client(served, expected):
    client = ollama.Client(served.url)
    answer = client.embed("tiny:latest", TEXTS)
    np.testing.assert_allclose(answer.embeddings, expected(served.embedder), atol=5e-4)
    assert answer.prompt_eval_count == sum(len(served.embedder.tokens(text)) for text in TEXTS)
    assert len(client.embed("tiny", TEXTS[0], dimensions=7).embeddings[0]) == 7
    older = client.embeddings("tiny", TEXTS[1])
    np.testing.assert_allclose(older.embedding, answer.embeddings[1], atol=CLOSE)
    assert client.embed("tiny", "").embeddings == []  # as there: it only loads the model
    long = "cat " * 120
    cut = client.embed("tiny", long, options={"num_ctx": 20})
    assert cut.prompt_eval_count == 20 and client.embed("tiny", long).prompt_eval_count == 48
    with pytest.raises(ollama.ResponseError, match="a text of 122 tokens, and tiny bert reads at most 48"):
        client.embed("tiny", long, truncate=False)
    assert [(model.model, model.details.family) for model in client.list().models] == [
        ("tiny:latest", "bert")
    ]
    assert client.show("tiny").capabilities == ["embedding"]


@pytest.mark.long
def test_langchain(served, expected):
    from langchain_ollama import OllamaEmbeddings  # two seconds, for this test alone
    from langchain_openai import OpenAIEmbeddings

    theirs = OpenAIEmbeddings(
        base_url=f"{served.url}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(theirs.embed_documents(TEXTS), expected(served.embedder), atol=5e-4)
    other = OllamaEmbeddings(base_url=served.url, model="tiny")
    np.testing.assert_allclose(other.embed_query(TEXTS[0]), theirs.embed_query(TEXTS[0]), atol=CLOSE)


def test_what_it_does_not_do(served, ranking, tiny_path):
    rerank = {"query": "a", "documents": ["b"]}
    with served.client() as http:
        refused(http.post("/v1/rerank", json=rerank), 501, "tiny makes vectors and ranks no documents")
        refused(http.post("/v1/chat/completions", json={}), 501, "makes vectors of texts")
        refused(http.post("/api/chat", json={}), 501, "makes vectors of texts")
    with ranking.client() as http:
        refused(http.post("/v1/embeddings", json={"input": "a"}), 501, "ranks documents and makes no vectors")
        refused(http.post("/api/embed", json={"model": "tiny", "input": "a"}), 501, "makes no vectors")


def test_a_server_that_writes_text_names_the_one_that_embeds(tiny_path):
    with serving(tiny_path) as writes, writes.client() as http:
        for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/api/embed"):
            refused(http.post(path, json={"input": "a"}), 501, "edgespec serve MODEL --embeddings")


def test_ranking(ranking):
    documents = [*TEXTS, "hello world 123"]
    scores = [TinyBert().score(ranking.embedder.pair("the cat", text)) for text in documents]
    order = sorted(range(4), key=lambda i: -scores[i])
    with ranking.client() as http:
        body = {"query": "the cat", "documents": [*documents[:3], {"text": documents[3]}]}
        answer = http.post("/v1/rerank", json=body).json()
        assert [result["index"] for result in answer["results"]] == order
        given = [result["relevance_score"] for result in answer["results"]]
        np.testing.assert_allclose(given, sorted(scores, reverse=True), atol=5e-4)
        assert answer["usage"]["total_tokens"] == sum(
            len(ranking.embedder.pair("the cat", text)) for text in documents
        )
        best = http.post("/rerank", json={**body, "top_n": 1, "return_documents": True}).json()["results"]
        assert [(one["index"], one["document"]) for one in best] == [
            (order[0], {"text": documents[order[0]]})
        ]
        assert "document" not in answer["results"][0]


@pytest.mark.parametrize("path", RERANK)
def test_the_other_names_of_the_route(ranking, path):
    with ranking.client() as http:
        body = {"query": "the cat", "documents": TEXTS}
        answers = [http.post(one, json=body).json()["results"] for one in (path, "/v1/rerank")]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", REFUSED_VECTORS)
def test_fields_that_would_change_the_answer_are_refused_by_name(served, ranking, name):
    asked = {"/v1/embeddings": (served, {"input": "a"})}
    asked["/v1/rerank"] = (ranking, {"query": "a", "documents": ["b"]})
    for path, (server, body) in asked.items():
        with server.client() as http:
            refused(http.post(path, json={**body, name: "some"}), 400, f"{name}: is not supported here")
            for neutral in ("", False, None):
                assert http.post(path, json={**body, name: neutral}).status_code == 200


def test_what_is_served_and_counted(served, ranking):
    with served.client() as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert model["id"] == "tiny" and http.get("/v1/models/tiny").json() == model
        http.headers["anthropic-version"] = "2023-06-01"
        page = http.get("/v1/models").json()
        assert page["data"] == [http.get("/v1/models/tiny").json()]
        assert (page["has_more"], page["first_id"], page["data"][0]["type"]) == (False, "tiny", "model")
        assert http.get("/v1/models/none").json()["error"]["type"] == "not_found_error"
        facts = model["edgespec"]
        assert (facts["dimensions"], facts["n_ctx"], facts["pooling"]) == (64, 48, "mean")
        assert facts["embeddings"] and not facts["rerank"]
        assert http.get("/health").json()["status"] == "ok"
        http.post("/v1/embeddings", json={"input": TEXTS})
        counted = http.get("/metrics").text
        assert 'edgespec_embeddings_total{outcome="finished"}' in counted
        assert "edgespec_embedded_tokens_total 0.0" not in counted
        assert len(http.post("/tokenize", json={"content": "the cat"}).json()["tokens"]) == 2
    with ranking.client() as http:
        assert http.get("/v1/models").json()["data"][0]["edgespec"]["rerank"]
        assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == []


def test_clients_share_passes(served, monkeypatch):
    """While a pass is under way others wait; the next one takes a text of each."""
    passes: list[int] = []
    gate, begun = threading.Event(), threading.Event()
    forward = served.embedder.forward

    def gated(texts):
        passes.append(len(texts))
        begun.set()
        assert gate.wait(30)
        return forward(texts)

    monkeypatch.setattr(served.embedder, "forward", gated)
    with served.client() as http, ThreadPoolExecutor(4) as pool:

        def ask(texts):
            return http.post("/v1/embeddings", json={"input": texts, "user": str(len(texts))})

        first = pool.submit(ask, ["a"])
        assert begun.wait(30)
        others = [pool.submit(ask, ["the cat"] * n) for n in (2, 3)]
        while http.get("/health").json()["waiting"] < 2:
            pass
        gate.set()
        answers = [future.result() for future in (first, *others)]
    assert [len(answer.json()["data"]) for answer in answers] == [1, 2, 3]
    assert passes == [1, 5]
