"""Hidden states that edgespec's kernels leave: those of llama.cpp's graph, of any layer and sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.forge import importance
from edgespec.decoding.session import Forward, SequenceTokens
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.backend import llama
from edgespec.llama.hidden_states import of_kernels
from edgespec.llama.kernels import LAST_NORM_OUT, KernelStates
from edgespec.llama.kv_cache import Batch, KVCache, KVCacheSize, create_context
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

pytestmark = pytest.mark.skipif(not kernels.plugin_path().exists(), reason="the kernels are not built")

TOKENS = np.random.default_rng(3).integers(0, 256, 512).tolist()
LAYERS = (0, 1, LAST_NORM_OUT)
NAMES = {0: "l_out-0", 1: "l_out-1", LAST_NORM_OUT: "result_norm"}


@pytest.fixture(scope="module")
def model(packable_path: Path) -> Model:
    with Model(packable_path) as model:
        assert model.uses_kernels
        assert model.header.n_layer == 2
        model.hidden_states = of_kernels(LAYERS, 2)
        yield model


def cache(model: Model, n_sequences: int = 1) -> KVCache:
    size = KVCacheSize(n_ctx=1024, n_batch=512, n_logits_max=512, n_sequences=n_sequences)
    return KVCache(model, size, n_threads=2)


def of_graph(model: Model, tokens: list[int]) -> np.ndarray:
    """What llama.cpp's callback sees in the graph of the same kernels, side by side."""
    found: dict[str, np.ndarray] = {}

    def look(address: int, asks: bool, _data: int) -> bool:
        node = importance._CTensor.from_address(address)
        name = node.name.decode()
        if not asks and name in NAMES.values():
            found[name] = importance._array(node, importance._F32)[0, 0].copy()
        return name in NAMES.values() or not asks

    callback = llama.ggml_backend_sched_eval_callback(look)
    n = len(tokens)
    context = create_context(
        model, n_ctx=1024, n_threads=2, n_batch=512, n_logits_max=512, n_sequences=1, on_operation=callback
    )
    try:
        given = Batch(n, 1)
        given.fill([SequenceTokens(0, tokens)], all_logits=True)
        assert llama.llama_decode(context, given.struct) == 0
    finally:
        llama.llama_free(context)
    return np.concatenate([found[NAMES[layer]] for layer in LAYERS], axis=1)


@pytest.mark.parametrize("n", [1, 8, 512])
def test_they_are_those_of_the_graph(model: Model, n: int) -> None:
    with cache(model) as states:
        part = Forward(Session.within(states), TOKENS[:n], 1, with_features=True)
        found = states.forward([part])[0].features
        assert found is not None
        assert found.shape == (n, 3 * model.n_embd)
        assert np.array_equal(found, of_graph(model, TOKENS[:n]))


def test_of_several_sequences_in_a_pass_each_gets_its_own(model: Model) -> None:
    texts = [TOKENS[:20], TOKENS[100:103], TOKENS[200:231]]
    with cache(model, n_sequences=3) as states:
        parts = [Forward(Session.within(states), text, 1, with_features=True) for text in texts]
        results = [result.copy() for result in states.forward(parts)]
    for text, result in zip(texts, results, strict=True):
        assert result.features is not None
        # Another number of tokens in a pass is another order of sums.
        assert np.allclose(result.features, of_graph(model, text), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("n_logits", [1, 3])
def test_tokens_with_logits_leave_theirs_for_nothing(packable_path: Path, n_logits: int) -> None:
    """In the very pass that a prompt makes anyway: same logits, and the states of its end."""
    with Model(packable_path) as model, cache(model) as states:
        assert model.leaves_last_states
        session = Session.within(states)
        plain = states.forward([Forward(session, TOKENS[:40], n_logits)])[0].copy()
        states.clear()
        part = Forward(session, TOKENS[:40], n_logits, with_last_states=True)
        left = states.forward([part])[0].copy()
        states.clear()
        wanted = states.forward([Forward(session, TOKENS[:40], n_logits, with_features=True)])[0]
        assert plain.features is None
        assert left.features is not None
        assert wanted.features is not None
        assert np.array_equal(left.rows, plain.rows)
        assert np.array_equal(left.features, wanted.features[-n_logits:])


def test_stock_kernels_leave_none_beside_logits(packable_path: Path) -> None:
    with Model(packable_path, kernels=False) as model, cache(model) as states:
        assert not model.leaves_last_states
        part = Forward(Session.within(states), TOKENS[:40], 1, with_last_states=True)
        assert states.forward([part])[0].features is None
    with Model(packable_path, kernels=False) as model:
        model.hidden_states = of_kernels(LAYERS, 2)
        with cache(model) as states, pytest.raises(EdgespecError, match="do not run all of its layers"):
            Forward(Session.within(states), TOKENS[:4], 1, with_features=True).run()


def test_layers_that_are_not_there() -> None:
    plugin = kernels.load().plugin
    assert plugin
    for layers in ((), (2,), (-2,), (0,) * 9):
        with pytest.raises(ValueError, match="hidden states of layers"):
            KernelStates(plugin, layers, 2, 8)
