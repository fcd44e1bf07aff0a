"""Training a head: what it computes, against llama.cpp and against loops that take one column at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgespec.apps.forge.training import head
from edgespec.apps.forge.training.batches import EpochPosition, TextPacking, batches
from edgespec.apps.forge.training.head import HeadFamily, HeadRollout, divergence_from
from edgespec.apps.forge.training.loop import starts
from edgespec.apps.forge.training.weights import ModelWeights
from edgespec.decoding.session import Forward
from edgespec.drafting.heads.head_file import read_head
from edgespec.drafting.heads.matrices import EMBEDDINGS, MappedMatrix
from edgespec.errors import UsageError
from edgespec.llama.gguf import to_floats
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_training import IDS, N_EMBD, ROWS, TinyTexts, tiny_head, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("training"))


@pytest.fixture
def exact(monkeypatch):
    """Products in float32, whatever the processor is fast at."""
    monkeypatch.setattr(head, "FACTOR", jnp.float32)


def a_batch(head, texts, rows=ROWS):
    return next(batches(TextPacking(texts, rows), head.target.embed, rows.n, 0, EpochPosition()))[0]


class LlamaHead:
    """An exported head in llama.cpp: features and logits of inputs, one column after another."""

    def __init__(self, path, target):
        header = check_model_file(path)
        file = read_head(header)
        assert file.token_ids.tolist() == IDS.tolist()
        raw = np.frombuffer(path.read_bytes()[file.fusion_offset :], np.uint8).reshape(N_EMBD, -1)
        self.fusion = to_floats(raw.copy(), file.fusion_type, 2 * N_EMBD)
        self.embeddings = MappedMatrix(read_header(target), EMBEDDINGS)
        self.model = Model(path, kernels=False, header=header)
        size = KVCacheSize(n_ctx=256, n_batch=64, n_logits_max=64)
        self.cache = KVCache(self.model, size, n_threads=1, takes_inputs=True)
        self.session = Session.within(self.cache)

    def __call__(self, tokens, features):
        """Append columns; return their features, (n, n_embd), and logits, (n, kept ids)."""
        inputs = np.concatenate([self.embeddings(tokens), features], axis=1) @ self.fusion.T
        part = Forward(self.session, tokens, len(tokens), inputs=inputs, with_features=True)
        result = self.cache.forward([part])[0].copy()
        return result.features, result.rows


@pytest.mark.parametrize(("type_", "tolerance"), [("f32", 2e-3), ("f16", 2e-2), ("q8_0", 0.1)])
def test_llama_cpp_computes_what_was_trained(target, tmp_path, exact, type_, tolerance):
    head = tiny_head(target)
    params = head.init(jax.random.key(1))
    path = tmp_path / "head.gguf"
    head.export(params, path, type_)
    batch = a_batch(head, TinyTexts(target, 1, lengths=(40, 41)).all)
    rollout = HeadRollout(head, params, batch)
    at = batch.answers[0][batch.weights[0] > 0]
    expected = [np.asarray(rollout.step())[0, : len(at)] for _ in range(3)]
    tokens, features = batch.tokens[0], batch.features[0].astype(np.float32)

    llama = LlamaHead(path, target)
    first, last = 1, int(at[-1])  # columns 1 .. last, each with the feature before it
    found, logits = llama(tokens[first : last + 1], features[first - 1 : last])
    np.testing.assert_allclose(found[at - first], expected[0], atol=tolerance)
    wanted = 0.5 * expected[0] @ head.target.rows(head.target.output, IDS).T
    np.testing.assert_allclose(logits[at - first], wanted, atol=5 * tolerance)

    for began in (int(at[3]), int(at[9])):  # a draft of three tokens that begins at an answer's column
        llama = LlamaHead(path, target)
        own = llama(tokens[first : began + 1], features[first - 1 : began])[0][-1:]
        for step in (1, 2):
            own = llama(tokens[began + step : began + step + 1], own)[0]
            index = int(np.flatnonzero(at == began + step)[0])
            np.testing.assert_allclose(own[0], expected[step][index], atol=tolerance)


@pytest.mark.parametrize(("type_", "tolerance"), [("f32", 1e-5), ("f16", 1e-3), ("q4_0", 0.15)])
def test_a_head_is_read_back(target, tmp_path, type_, tolerance):
    head = tiny_head(target)
    params = head.init(jax.random.key(1))
    params["confidence"] = jnp.asarray(0.7)
    path = tmp_path / "head.gguf"
    head.export(params, path, type_)
    read = head.read(path)
    assert read.keys() == params.keys()
    for name, wanted in params.items():
        off = np.abs(read[name] - wanted).max() / np.abs(wanted).max()
        assert read[name].shape == wanted.shape and off < tolerance, name


def test_what_is_no_head_of_this_shape_is_not_read(target, tmp_path):
    with pytest.raises(UsageError, match="no draft head"):
        tiny_head(target).read(target)
    tiny_head(target).export(tiny_head(target).init(jax.random.key(1)), tmp_path / "head.gguf", "f32")
    wider = HeadFamily(ModelWeights(read_header(target)), "5a" * 32, IDS, 128)
    with pytest.raises(UsageError, match="a head of another width"):
        wider.read(tmp_path / "head.gguf")


def test_a_walk_is_right_where_a_slow_loop_is(target, exact):
    texts = TinyTexts(target, 40)
    head = tiny_head(target, texts.all)  # fitted, so that some are right
    params = head.init(jax.random.key(2))
    batch = a_batch(head, texts.all)
    output = head.target.rows(head.target.output, IDS)
    right = np.asarray(head.rollout(params, head.frozen, batch, 3))
    rollout = HeadRollout(head, params, batch)
    features = [np.asarray(rollout.step()) for _ in range(3)]
    n_right = 0
    for row, i in zip(*np.nonzero(starts(batch, 3)), strict=True):
        column = batch.answers[row, i]
        for step in range(3):
            said = IDS[(features[step][row, i + step] @ output.T).argmax()]
            assert right[row, i, step] == (said == batch.tokens[row, column + step + 1])
            n_right += right[row, i, step]
    assert n_right > 0


def test_a_sample_of_tokens_stands_for_all_of_them():
    rng = np.random.default_rng(0)
    output = rng.normal(0, 1.5 / np.sqrt(N_EMBD), (2048, N_EMBD)).astype(np.float32)
    features = rng.normal(0, 1, (6, N_EMBD)).astype(np.float32)
    predicted = features + rng.normal(0, 0.5, features.shape).astype(np.float32)

    def divergence(n, seed):
        rows = features.reshape(2, 3, N_EMBD)
        divergence = divergence_from(rows, jnp.ones((2, 3)), output, n, jax.random.key(seed))
        return np.asarray(divergence(jnp.asarray(predicted)))

    everything = divergence((2048, 0), 0)
    logits, wanted = predicted @ output.T, features @ output.T
    p, q = (x - x.max(1, keepdims=True) for x in (wanted, logits))
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    np.testing.assert_allclose(everything, (np.exp(p) * (p - q)).sum(1), rtol=0.03)
    sampled = np.mean([divergence((256, 256), seed) for seed in range(40)], axis=0)
    np.testing.assert_allclose(sampled, everything, rtol=0.05)
