"""Training a head: what it computes, against llama.cpp and against loops that take one column at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgespec.forge.training import arithmetic
from edgespec.forge.training.batches import Packing, Place, batches
from edgespec.forge.training.head import _Walk
from edgespec.llama.cache import Cache, CacheSize, Piece
from edgespec.llama.ggml_types import to_floats
from edgespec.llama.gguf_header import read_header
from edgespec.llama.weights import Model
from tiny_training import IDS, N_EMBD, ROWS, TinyTexts, tiny_head, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("training"))


@pytest.fixture
def exact(monkeypatch):
    """Products in float32, whatever the processor is fast at."""
    monkeypatch.setattr(arithmetic, "FACTOR", jnp.float32)


def a_batch(head, texts, rows=ROWS):
    return next(batches(Packing(texts, rows), head.embed, rows.n, 0, Place()))[0]


class LlamaHead:
    """An exported head in llama.cpp: features and logits of inputs, one column after another."""

    def __init__(self, path):
        header = read_header(path)
        self.inputs = np.zeros((0, N_EMBD), np.float32)
        kind = int(header.gguf.number("edgespec.head.fusion_type"))
        at = int(header.gguf.number("edgespec.head.fusion_offset"))
        raw = np.frombuffer(path.read_bytes()[at:], np.uint8).reshape(N_EMBD, -1)
        self.fusion = to_floats(raw.copy(), kind, 2 * N_EMBD)
        assert header.gguf.numbers("edgespec.draft.token_ids").tolist() == IDS.tolist()
        self.model = Model(path, kernels=False, header=header)
        size = CacheSize(n_ctx=256, n_batch=64, n_logits_max=64)
        self.cache = Cache(self.model, size, n_threads=1, embeddings=lambda _tokens: self.inputs)
        self.sequence = self.cache.take()

    def __call__(self, embeddings, features):
        """Append columns, (n, n_embd) each; return their features and logits."""
        self.inputs = np.concatenate([embeddings, features], 1).astype(np.float32) @ self.fusion.T
        n = len(self.inputs)
        rows = self.cache.eval([Piece(self.sequence, [0] * n, n)], with_features=True)[0]
        return self.cache.features[0].copy(), rows.copy()


@pytest.mark.parametrize(("type_", "tolerance"), [("f32", 2e-3), ("f16", 2e-2), ("q8_0", 0.1)])
def test_llama_cpp_computes_what_was_trained(target, tmp_path, exact, type_, tolerance):
    head = tiny_head(target)
    params = head.init(jax.random.key(1))
    path = tmp_path / "head.gguf"
    head.export(params, path, type_)
    batch = a_batch(head, TinyTexts(target, 1, lengths=(40, 41)).all)
    walk = _Walk(head.shape, params, batch)
    at = batch.answers[0][batch.weights[0] > 0]
    expected = [np.asarray(walk.step())[0, : len(at)] for _ in range(3)]
    features = batch.features[0].astype(np.float32)
    embeddings = batch.embeddings[0].astype(np.float32)

    llama = LlamaHead(path)
    first, last = 1, int(at[-1])  # columns 1 .. last, each with the feature before it
    found, logits = llama(embeddings[first : last + 1], features[first - 1 : last])
    np.testing.assert_allclose(found[at - first], expected[0], atol=tolerance)
    wanted = expected[0] @ head.target.rows(head.target.output, IDS).T
    np.testing.assert_allclose(logits[at - first], wanted, atol=5 * tolerance)

    for began in (int(at[3]), int(at[9])):  # a draft of three tokens that begins at an answer's column
        llama = LlamaHead(path)
        own = llama(embeddings[first : began + 1], features[first - 1 : began])[0][-1:]
        for step in (1, 2):
            own = llama(embeddings[began + step : began + step + 1], own)[0]
            index = int(np.flatnonzero(at == began + step)[0])
            np.testing.assert_allclose(own[0], expected[step][index], atol=tolerance)
