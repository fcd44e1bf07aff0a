"""Training a head: what it computes, against llama.cpp and against loops that take one column at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgespec.forge.training import arithmetic
from edgespec.forge.training.batches import Packing, Place, batches
from edgespec.forge.training.head import Walk
from edgespec.llama.cache import Cache, CacheSize, Piece
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.head_file import Fusion, TargetEmbeddings, read_head
from edgespec.llama.weights import Model
from tiny_training import IDS, ROWS, TinyTexts, tiny_head, write_target


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

    def __init__(self, path, target):
        header = check_model_file(path)
        file = read_head(header)
        assert file.token_ids.tolist() == IDS.tolist()
        self.fusion = Fusion(file, TargetEmbeddings(read_header(target)))
        self.model = Model(path, kernels=False, header=header)
        size = CacheSize(n_ctx=256, n_batch=64, n_logits_max=64)
        self.cache = Cache(self.model, size, n_threads=1, takes_inputs=True)
        self.sequence = self.cache.take()

    def __call__(self, tokens, features):
        """Append columns; return their features, (n, n_embd), and logits, (n, kept ids)."""
        piece = Piece(self.sequence, tokens, len(tokens), inputs=self.fusion(tokens, features))
        rows = self.cache.eval([piece], with_features=True)[0]
        return self.cache.features[0].copy(), rows.copy()


@pytest.mark.parametrize(("type_", "tolerance"), [("f32", 2e-3), ("f16", 2e-2), ("q8_0", 0.1)])
def test_llama_cpp_computes_what_was_trained(target, tmp_path, exact, type_, tolerance):
    head = tiny_head(target)
    params = head.init(jax.random.key(1))
    path = tmp_path / "head.gguf"
    head.export(params, path, type_)
    batch = a_batch(head, TinyTexts(target, 1, lengths=(40, 41)).all)
    walk = Walk(head, params, batch)
    at = batch.answers[0][batch.weights[0] > 0]
    expected = [np.asarray(walk.step())[0, : len(at)] for _ in range(3)]
    tokens, features = batch.tokens[0], batch.features[0].astype(np.float32)

    llama = LlamaHead(path, target)
    first, last = 1, int(at[-1])  # columns 1 .. last, each with the feature before it
    found, logits = llama(tokens[first : last + 1], features[first - 1 : last])
    np.testing.assert_allclose(found[at - first], expected[0], atol=tolerance)
    wanted = expected[0] @ head.target.rows(head.target.output, IDS).T
    np.testing.assert_allclose(logits[at - first], wanted, atol=5 * tolerance)

    for began in (int(at[3]), int(at[9])):  # a draft of three tokens that begins at an answer's column
        llama = LlamaHead(path, target)
        own = llama(tokens[first : began + 1], features[first - 1 : began])[0][-1:]
        for step in (1, 2):
            own = llama(tokens[began + step : began + step + 1], own)[0]
            index = int(np.flatnonzero(at == began + step)[0])
            np.testing.assert_allclose(own[0], expected[step][index], atol=tolerance)
