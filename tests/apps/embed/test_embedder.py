"""Vectors and scores of an Embedder beside the same networks in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.embed.embedder import Embedder, VectorModel, normalised
from edgespec.decoding.session import Forward
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.processes import Cancellation
from tiny_bert import CLS, SEP, TinyBert
from tiny_gguf import write_tiny_gguf

TEXTS = ("the cat", "a dog, and the cat ran!", "x", "hello world 123 abc def ghi jk")
CLOSE = 5e-4
"""ggml looks GELU up in a table of 16-bit floats, and keeps softmax in 32 bits."""


@pytest.fixture(scope="module")
def bert() -> TinyBert:
    return TinyBert()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


@pytest.fixture(scope="module")
def mean(bert: TinyBert, folder: Path):
    with Embedder(str(bert.write(folder / "mean.gguf"))) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def ranker(bert: TinyBert, folder: Path):
    with Embedder(str(bert.write(folder / "rank.gguf", pooling="rank"))) as embedder:
        yield embedder


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_those_of_numpy(bert, folder, pooling):
    with Embedder(str(bert.write(folder / f"{pooling}-of-file.gguf", pooling=pooling))) as embedder:
        assert embedder.model.pooling == pooling
        tokens = [embedder.tokens(text) for text in TEXTS]
        assert [(text[0], text[-1]) for text in tokens] == [(CLS, SEP)] * len(TEXTS)
        rows = embedder.embed(tokens)
    expected = [bert.vector(text, pooling) for text in tokens]
    np.testing.assert_allclose(rows, expected, atol=CLOSE)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)


def test_a_file_that_says_no_pooling_is_told_one(bert, folder):
    path = str(bert.write(folder / "silent.gguf", pooling=None))
    with pytest.raises(EdgespecError, match=r"an encoder, whose file does not say how .*--pooling"):
        Embedder(path)
    with Embedder(path, pooling="cls") as embedder:
        tokens = embedder.tokens(TEXTS[1])
        np.testing.assert_allclose(embedder.embed([tokens])[0], bert.vector(tokens, "cls"), atol=CLOSE)


def test_texts_of_different_lengths_share_passes(mean, bert):
    tokens = [mean.tokens("the cat "[: 1 + i % 8] * (1 + i % 9)) for i in range(150)]
    assert 1 < mean.n_fitting(map(len, tokens)) < len(tokens)
    done: list[int] = []
    rows = mean.embed(tokens, done.append)
    assert 2 < len(done) < len(tokens) and done[-1] == len(tokens)
    alone = np.concatenate([mean.embed([text]) for text in tokens])
    np.testing.assert_allclose(rows, alone, atol=1e-4)  # ggml rounds by the number of rows
    np.testing.assert_allclose(rows, [bert.vector(text, "mean") for text in tokens], atol=CLOSE)


def test_a_text_longer_than_the_model_reads(mean):
    text = "cat " * 120
    with pytest.raises(UsageError, match=r"a text of 122 tokens, and tiny bert reads at most 48"):
        mean.tokens(text)
    cut = mean.tokens(text, truncate=True)
    assert len(cut) == 48 and (cut[0], cut[-1]) == (CLS, SEP)
    assert mean.embed([cut]).shape == (1, 64)


def test_a_causal_model_reads_a_long_text_in_parts(tmp_path):
    files = {
        name: write_tiny_gguf(tmp_path / f"{name}.gguf", n_ctx=2048, extra=extra)
        for name, extra in (("writes", {}), ("embeds", {"{arch}.pooling_type": 3}))
    }
    with Embedder(str(files["embeds"])) as embedder, Model(files["writes"]) as model:
        texts = [embedder.tokens(text) for text in ("the in on " * 60, "and the other", "x")]
        assert len(texts[0]) > 2 * embedder.model.pass_tokens
        rows = embedder.embed(texts)
        for text, row in zip(texts, rows, strict=True):
            with KVCache(model, KVCacheSize(n_ctx=512, n_logits_max=512), n_threads=1) as cache:
                features = Forward(Session.within(cache), text, with_features=True).run().features
                assert features is not None
                np.testing.assert_allclose(row, normalised(features[-1:])[0], atol=1e-5)


def test_a_model_that_writes_embeds_only_when_told_how(tiny_path):
    with pytest.raises(EdgespecError, match=r"a model that writes text, whose file .*--pooling"):
        Embedder(str(tiny_path))
    with Embedder(str(tiny_path), pooling="mean") as embedder:
        assert embedder.embed([embedder.tokens("the other")]).shape == (1, 64)


def test_scores_are_those_of_numpy(ranker, bert):
    pairs = [ranker.pair("the cat", text) for text in TEXTS]
    words = [embedded[1:-1] for embedded in map(ranker.model.text_tokens, ("the cat", TEXTS[1]))]
    assert pairs[1] == [CLS, *words[0], SEP, *words[1], SEP]
    scores = ranker.embed(pairs)[:, 0]
    np.testing.assert_allclose(scores, [bert.score(pair) for pair in pairs], atol=CLOSE)
    assert np.ptp(scores) > 0.02


def test_a_reranking_template_of_the_file(tmp_path):
    path = write_tiny_gguf(
        tmp_path / "template.gguf",
        extra={
            "{arch}.pooling_type": 3,
            "tokenizer.chat_template.rerank": "<|im_start|>is {document} for {query}<|im_end|>",
        },
    )
    with VectorModel(path) as model:
        text = "<|im_start|>is the {query} for on<|im_end|>"
        expected = model.tokenize(text, add_special=False, parse_special=True)
        assert model.pair_tokens("on", "the {query}") == expected


def test_what_is_no_embedding_model(bert, folder, ranker):
    three = bert.write(folder / "three.gguf", pooling="rank", classes=3)
    with pytest.raises(EdgespecError, match="a classifier of 3 classes"):
        Embedder(str(three))
    with pytest.raises(EdgespecError, match="pooling cls: is for embedding models, and this one ranks"):
        Embedder(str(ranker.model.path), pooling="cls")
    adapter = write_tiny_gguf(folder / "adapter.gguf", general_type="adapter")
    with pytest.raises(EdgespecError, match="a LoRA adapter, not a model; choose an embedding"):
        Embedder(str(adapter))


def test_a_pass_can_be_interrupted(mean):
    with (
        Cancellation() as cancellation,
        Embedder(str(mean.model.path), interrupt=cancellation.interrupt) as embedder,
    ):
        text = embedder.tokens("the cat")
        cancellation.cancel()
        with pytest.raises(KeyboardInterrupt):
            embedder.embed([text])
        cancellation.drain()
        np.testing.assert_array_equal(embedder.embed([text]), mean.embed([text]))


def test_cut_vectors_have_length_1_again():
    rows = np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 1.0]], np.float32)
    np.testing.assert_allclose(normalised(rows, 2), [[0.6, 0.8], [0, 0]], atol=1e-7)
