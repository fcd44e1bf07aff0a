"""Which tokens a cut keeps: required ones, what the target wrote, what it expects, small ids."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import pytest

from edgespec.apps.forge.training.weights import ModelWeights
from edgespec.apps.forge.vocabulary_ranking import SourceVocabulary, expectations, rank, read_vocabulary
from edgespec.decoding.session import Forward
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import BOS, CONTROL_TOKENS, EOS, N_WORDS, write_tiny_gguf

N_VOCAB = 320
VOCABULARY = SourceVocabulary(N_VOCAB, np.array([3, 300]), np.array([318, 319]))


@dataclass
class Sample:
    tokens: np.ndarray
    n_prompt: int
    features: np.ndarray
    first: int = 0


def sample(prompt, answer, n_embd=4):
    tokens = np.array([*prompt, *answer], np.int32)
    return Sample(tokens, len(prompt), np.zeros((len(tokens) - 1, n_embd), np.float16))


def test_required_then_written_then_asked_then_small_ids():
    texts = [sample([200, 201], [150, 150, 150, 250]), sample([200], [250, 150])]
    ranking = rank(VOCABULARY, texts)
    assert ranking.order[:6].tolist() == [3, 300, 150, 250, 200, 201]
    assert ranking.order[6:10].tolist() == [0, 1, 2, 4], "then by id, as tokenizers number by frequency"
    assert ranking.n_required == 2
    assert sorted(ranking.order) == list(range(318)), "no padding, each id once"


def test_a_cut_is_ascending_and_of_whole_rows_for_the_kernels():
    ids = rank(VOCABULARY, [sample([], [317, 310, 310])]).cut(17)
    assert len(ids) == 32
    assert ids.tolist() == sorted(ids)
    assert {3, 300, 317, 310} <= set(ids.tolist())


def test_nothing_written_at_all_ranks_by_ids():
    assert rank(VOCABULARY, []).cut(16).tolist() == [*range(15), 300]


def test_what_every_head_can_say(tmp_path):
    source = write_tiny_gguf(tmp_path / "m.gguf", n_padding=3, kinds={260: int(gguf.TokenType.USER_DEFINED)})
    found = read_vocabulary(check_model_file(source))
    n_vocab = N_WORDS + len(CONTROL_TOKENS)
    assert found.n_vocab == n_vocab + 3
    assert found.required.tolist() == [*range(256), 260, *range(N_WORDS, n_vocab)]
    assert found.unused.tolist() == [n_vocab, n_vocab + 1, n_vocab + 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return check_model_file(write_tiny_gguf(tmp_path_factory.mktemp("target") / "t.gguf", peak=1.0))


def test_expectations_are_the_targets_own_probabilities(target):
    """From features that the library gives, against softmax of the logits that it gives."""
    tokens = np.random.default_rng(2).integers(0, N_WORDS, 40)
    size = KVCacheSize(n_ctx=64)
    with Model(target.path, kernels=False) as model, KVCache(model, size, n_threads=1) as cache:
        result = Forward(Session.within(cache), tokens.tolist(), 40, with_features=True).run()
        logits = result.rows[:-1].astype(np.float64)
        features = result.features[:-1].astype(np.float16)
    n_prompt, first = 12, 5
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    text = Sample(tokens, n_prompt, features[first:], first)
    found = expectations([text], ModelWeights(target), n_places=1000)
    assert np.allclose(found, probs[n_prompt - 1 :].mean(0), rtol=0.02, atol=1e-5)
    few = expectations([text, text], ModelWeights(target), n_places=10)
    assert few.sum() == pytest.approx(1.0)


def test_what_the_target_expects_ranks_before_small_ids(target):
    """The most expected of the ids that no text has comes before those less expected."""
    vocabulary = read_vocabulary(target)
    tokens = np.arange(20)
    weights = ModelWeights(target)
    toward = weights.rows(weights.output)[N_WORDS - 1]
    features = np.tile(20 * toward / np.linalg.norm(toward), (len(tokens) - 1, 1)).astype(np.float16)
    text = Sample(tokens, 10, features)
    required = set(vocabulary.required.tolist())
    assert N_WORDS - 1 not in required
    with_target = [t for t in rank(vocabulary, [text], weights).order.tolist() if t not in required]
    without = [t for t in rank(vocabulary, [text]).order.tolist() if t not in required]
    assert with_target[0] == N_WORDS - 1
    assert without[0] != N_WORDS - 1
    assert required >= {EOS, BOS} and len(required) >= 256 + len(CONTROL_TOKENS)
