"""The kernels inside llama.cpp: whole models, packed and not, of each architecture at hand."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.decoding.session import Forward
from edgespec.llama.backend import llama
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_architectures import ARCHITECTURES, write_architecture
from tiny_models import make_tiny
from tree_shapes import DEEP, SPREAD, WIDE, WIDEST, paths, random_shape, trunk

N_CTX = 512
THREADS = (2,) if os.environ.get("SANITIZED") else (1, 2, 3, 4)
TOKENS = np.random.default_rng(5).integers(0, 256, 170).tolist()

TYPES = (
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "iq4_nl",
    "iq4_xs",
    "q2_k",
    "q3_k_m",
    "q4_k_m",
    "q5_k_m",
    "q6_k",
    "f16",
    "bf16",
)

BY_TYPE = [
    (architecture, name)
    for architecture in ARCHITECTURES
    for name in TYPES
    if architecture != "gemma3" or name in ("q4_k_m", "q8_0", "bf16")  # the largest of them
]

ROUTED = ("qwen3moe", "qwen35moe", "openai-moe", "lfm2moe", "glm4-moe", "deepseek2")
RECURRENT = ("qwen35", "qwen3next", "mamba2", "granite-hybrid", "falcon-h1", "nemotron-h", "lfm2")


@pytest.fixture(scope="module")
def float_models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("architectures")
    return {name: write_architecture(directory, name, N_CTX) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def quantized(float_models, tmp_path_factory):
    """Return the path of an architecture's model in a quantization type, made on first use."""
    directory = tmp_path_factory.mktemp("quantized")

    def path(architecture: str, name: str) -> Path:
        target = directory / f"{architecture}-{name}.gguf"
        if not target.exists():
            quantize(float_models[architecture], target, name)
        return target

    return path


def logits(model, tokens=TOKENS, *, batch=32, n_threads=2):
    """The logits after each token, read in batches."""
    with Session(model, n_ctx=N_CTX, n_threads=n_threads) as session:
        return read(session, tokens, batch)


def read(session, tokens, batch):
    parts = [tokens[i : i + batch] for i in range(0, len(tokens), batch)]
    return np.concatenate([session.eval(part, n_logits=len(part)).copy() for part in parts])


def relative_distance(a, b):
    return float(np.max(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.parametrize(
    ("architecture", "name"), [x for x in BY_TYPE if x[1] in ("q4_k_m", "q4_0", "q8_0", "f16", "bf16")]
)
def test_logits_do_not_depend_on_the_batch_or_the_threads(kernels, quantized, architecture, name):
    with Model(quantized(architecture, name)) as model:
        assert model.uses_kernels
        each = logits(model, batch=1, n_threads=1)
        for n_threads in THREADS:
            with Session(model, n_ctx=N_CTX, n_threads=n_threads) as session:
                for batch in (*range(2 * n_threads - 1, 33, 7), 64):  # all remainders of a tile
                    session.clear()
                    np.testing.assert_array_equal(
                        read(session, TOKENS, batch), each, f"{batch=} {n_threads=}"
                    )


@pytest.mark.parametrize(("architecture", "name"), BY_TYPE)
def test_packed_models_say_what_stock_ones_say(kernels, quantized, architecture, name):
    """As near as stock is to itself with weights that are not repacked, and other kernels therefore."""
    path = quantized(architecture, name)
    with (
        Model(path) as packed,
        Model(path, kernels=False) as stock,
        Model(path, kernels=False, repack=False) as plain,
    ):
        n_layer = ARCHITECTURES[architecture].get("n_layer", 2)
        assert len(packed.packed) == 7 * n_layer + 1  # all that is multiplied
        expected = logits(stock)
        distance, own = (
            relative_distance(logits(packed), expected),
            relative_distance(logits(plain), expected),
        )
        print(f"{architecture} {name}: {distance:.4f} from stock, stock without repacking {own:.4f}")
        assert distance < max(0.03, 3 * own)
        assert (logits(packed).argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_cannot_be_packed_are_exactly_stock(kernels, quantized, float_models, architecture):
    path = float_models[architecture]
    with Model(quantized(architecture, "q4_k_m")), Model(path) as model, Model(path, kernels=False) as stock:
        assert not model.uses_kernels
        for batch in (1, 8):
            np.testing.assert_array_equal(
                logits(model, batch=batch, n_threads=1), logits(stock, batch=batch, n_threads=1)
            )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the path of a tiny model of an architecture, with weights of a type."""
    directory = tmp_path_factory.mktemp("made")

    def path(name: str, weights_type: str) -> Path:
        target = directory / f"{name}-{weights_type}.gguf"
        return target if target.exists() else make_tiny(name, target, weights_type=weights_type)

    return path


@pytest.mark.parametrize("weights_type", ["q4_0", "mxfp4", "bf16"])
@pytest.mark.parametrize("name", ROUTED)
def test_experts_do_not_depend_on_the_batch_or_the_threads(kernels, made, name, weights_type):
    with Model(made(name, weights_type)) as model:
        assert any("_exps" in tensor.name for tensor in model.packed)
        assert_invariant(model)


def assert_invariant(model):
    each = logits(model, batch=1, n_threads=1)
    for n_threads in (1, 2, 3):
        with Session(model, n_ctx=N_CTX, n_threads=n_threads) as session:
            for batch in (2, 5, 17, 64)[n_threads - 1 :]:
                session.clear()
                np.testing.assert_array_equal(read(session, TOKENS, batch), each, f"{batch=} {n_threads=}")


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_does_not_depend_on_the_batch_or_the_threads(kernels, made, name):
    with Model(made(name, "q8_0")) as model:
        assert_invariant(model)


@pytest.mark.parametrize("weights_type", ["q8_0", "f16"])
@pytest.mark.parametrize("name", [*ROUTED, *RECURRENT])
def test_experts_and_states_say_what_stock_ones_say(kernels, made, name, weights_type):
    path = made(name, weights_type)
    with Model(path) as packed, Model(path, kernels=False) as stock:
        ours, expected = logits(packed), logits(stock)
    # Another expert is chosen now and then, where two are as likely: the median forgives it.
    each = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    print(f"{name} {weights_type}: {np.median(each):.4f} from stock")
    assert np.median(each) < (0.003 if weights_type == "f16" else 0.03)
    assert (ours.argmax(1) == expected.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "lfm2", "nemotron-h"])
def test_states_of_tokens_before_are_kept(kernels, made, name, monkeypatch):
    """As llama.cpp's snapshots: after tokens are taken back, all is as if they had never been read."""
    make, n_snapshots = llama.llama_init_from_model, 5

    def with_snapshots(model, params):
        params.n_rs_seq = n_snapshots
        return make(model, params)

    with Model(made(name, "q8_0")) as model:
        for n_back in (0, 1, 3, n_snapshots):
            with Session(model, n_ctx=64, n_threads=1) as fresh:
                fresh.eval(TOKENS[: 20 - n_back])
                expected = fresh.eval(TOKENS[30:36], n_logits=6).copy()
            monkeypatch.setattr(llama, "llama_init_from_model", with_snapshots)
            with Session(model, n_ctx=64, n_threads=1) as session:
                monkeypatch.undo()
                for part in (TOKENS[:9], TOKENS[9:14], TOKENS[14:20]):
                    session.eval(part)
                memory = llama.llama_get_memory(session.cache._context)
                assert llama.llama_memory_seq_rm(memory, 0, 20 - n_back, -1)
                np.testing.assert_array_equal(session.eval(TOKENS[30:36], n_logits=6), expected)


@pytest.mark.parametrize("order", ["abcd", "dcba", "cadb", "bdac"])
def test_models_and_contexts_are_freed_in_any_order(kernels, quantized, order):
    """Closing a model closes its sessions; dropping references leaves it to the collector."""
    path = quantized("qwen2", "q4_k_m")
    a, b = Model(path), Model(quantized("llama", "q8_0"))
    things = {"a": a, "b": b, "c": Session(a, n_ctx=64, n_threads=2), "d": Session(b, n_ctx=64, n_threads=2)}
    things["c"].eval(TOKENS[:8])
    things["d"].eval(TOKENS[:8])
    del a, b
    for i, name in enumerate(order):
        if i % 2:
            things[name].close()
        del things[name]
        gc.collect()


@pytest.mark.parametrize("n_logits", [0, 1, 3, 20])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_of_a_pass_for_hidden_states_only_the_wanted_logits_are_computed(
    kernels, quantized, architecture, n_logits, monkeypatch
):
    """They and the states have the bits of a pass that computes all; other passes are not touched."""
    size = KVCacheSize(n_ctx=N_CTX, n_logits_max=32, n_sequences=2)
    with Model(quantized(architecture, "q4_0")) as model, KVCache(model, size, n_threads=2) as cache:
        first, second = Session.within(cache), Session.within(cache)
        found = []
        for _ in range(2):
            for session in (first, second):  # the one alone in its cache's first sequence, the other not
                session.clear()
                part = Forward(session, TOKENS[:20], n_logits, with_features=True)
                result = cache.forward([part])[0].copy()
                session.clear()
                whole = session.eval(TOKENS[:20], n_logits=20).copy()
                assert np.array_equal(result.rows, whole[20 - n_logits :])
                found.append(result.features)
            monkeypatch.setattr(cache, "_plugin", None)  # all of them
        assert all(np.array_equal(states, found[0]) for states in found)
        both = [Forward(first, TOKENS[20:25], with_features=True), Forward(second, TOKENS[20:24], 2)]
        assert [len(result.rows) for result in cache.forward(both)] == [1, 2]


def test_logits_that_are_left_out_are_not_computed(kernels, quantized):
    """Else a pass for hidden states would cost what it cost before."""
    size = KVCacheSize(n_ctx=N_CTX, n_logits_max=32)
    with Model(quantized("qwen2", "q4_0")) as model:
        found = []
        for left_out in (True, False):
            with KVCache(model, size, n_threads=1) as cache:
                session = Session.within(cache)
                session.eval(TOKENS[30:60], n_logits=30)
                session.clear()
                cache.forward([Forward(session, TOKENS[:30], 1 if left_out else 30, with_features=True)])
                found.append(cache._outputs.rows(30).copy())
        assert np.array_equal(found[0][29], found[1][29])
        assert not (found[0][:29] == found[1][:29]).all(axis=1).any()


def test_packed_weights_come_back_as_they_were(kernels, quantized, tmp_path):
    """llama.cpp saves a model through the plugin's buffers: the same bytes as in the file."""
    for name in TYPES:
        path, saved = quantized("llama", name), tmp_path / f"{name}.gguf"
        with Model(path) as model:
            assert model.uses_kernels
            llama.llama_model_save_to_file(model.handle, os.fsencode(saved))
        before, after = (
            {t.name: t.data for t in gguf.GGUFReader(file).tensors if t.n_elements} for file in (path, saved)
        )
        assert before.keys() == after.keys()
        for tensor, data in before.items():
            np.testing.assert_array_equal(after[tensor], data, f"{name} {tensor}")


def test_no_logits_wanted(kernels, quantized):
    with Model(quantized("gemma3", "q4_0")) as model, Session(model, n_ctx=N_CTX, n_threads=2) as session:
        expected = logits(model)[-1]
        session.eval(TOKENS[:-1], n_logits=0)
        np.testing.assert_array_equal(session.eval(TOKENS[-1:])[0], expected)


def test_a_rewound_timeline_gives_the_same_bits(kernels, quantized):
    with Model(quantized("gemma3", "q4_k_m")) as model, Session(model, n_ctx=N_CTX, n_threads=2) as session:
        expected = logits(model)
        session.eval(TOKENS[:150])
        session.eval([7] * 9)  # a draft, rejected
        session.rewind(150)
        np.testing.assert_array_equal(session.eval(TOKENS[150:159], n_logits=9), expected[150:159])


def assert_tree_is_chains(session, chains, tokens, parents):
    """A pass with a tree gives the bits of chains, and leaves the timeline that the trunk's chain leaves."""
    n_past, n_before = chains.n_past, len(tokens) - len(parents)
    rows = session.eval(tokens, n_logits=len(parents) + 1, parents=parents)
    expected = [chains.eval(tokens[:n_before])[0].copy()]
    for path in paths(parents):
        expected.append(chains.eval([tokens[n_before + node] for node in path])[0].copy())
        chains.rewind(n_past + n_before)
    np.testing.assert_array_equal(rows, expected, f"{n_past=} {parents=}")
    kept = tokens[n_before : n_before + trunk(parents)]
    chains.eval(kept, n_logits=0)
    assert session.n_past == chains.n_past


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["q4_k_m", "q8_0"])
def test_a_branch_has_the_bits_of_a_chain(kernels, quantized, architecture, name):
    """Wherever the cache's blocks of 64 and segments of 256 end, and with a sliding window or without."""
    rng = np.random.default_rng(10)
    tokens = rng.integers(0, 256, 400).tolist()
    with Model(quantized(architecture, name)) as model:
        assert model.uses_kernels
        for n_threads in (1, 2):
            with (
                Session(model, n_ctx=N_CTX, n_threads=n_threads) as session,
                Session(model, n_ctx=N_CTX, n_threads=n_threads) as chains,
            ):
                for n_past in (0, *range(60, 71), 128, 130, 245, 255, 256, 257):
                    for one in (session, chains):
                        one.rewind(min(n_past, one.n_past))
                        rest = tokens[one.n_past : n_past]
                        one.eval(rest, n_logits=min(1, len(rest)))
                    parents = random_shape(rng, int(rng.integers(2, 14)))
                    assert_tree_is_chains(session, chains, tokens[300 : 302 + len(parents)], parents)
                    np.testing.assert_array_equal(
                        session.eval(tokens[:9], n_logits=9), chains.eval(tokens[:9], n_logits=9)
                    )


@pytest.mark.parametrize("parents", [[], [-1], [-1, -1], SPREAD, DEEP, WIDE, WIDEST], ids=len)
def test_trees_of_all_shapes_have_the_bits_of_chains(kernels, quantized, parents):
    with (
        Model(quantized("qwen2", "q4_k_m")) as model,
        Session(model, n_ctx=N_CTX, n_threads=2) as session,
        Session(model, n_ctx=N_CTX, n_threads=2) as chains,
        Session(model, n_ctx=N_CTX, n_threads=1) as fresh,
    ):
        timeline = []
        for length in (62, 33, 7):
            tokens = TOKENS[length : 2 * length + len(parents)]
            assert_tree_is_chains(session, chains, tokens, parents)
            timeline += tokens[: length + trunk(parents)]
        row = session.eval(TOKENS[:1])[0]
        np.testing.assert_array_equal(row, fresh.eval([*timeline, TOKENS[0]])[0])


def test_a_tree_through_embeddings_has_the_bits_of_tokens(kernels, quantized):
    path = quantized("llama", "q4_0")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    table = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    with (
        Model(path) as model,
        Session(model, n_ctx=N_CTX, n_threads=2) as session,
        Session(model, n_ctx=N_CTX, n_threads=2, embeddings=lambda tokens: table[tokens]) as embedded,
    ):
        for parents in (None, SPREAD, WIDE):
            n_logits = 5 if parents is None else len(parents) + 1
            np.testing.assert_array_equal(
                embedded.eval(TOKENS[:80], n_logits=n_logits, parents=parents),
                session.eval(TOKENS[:80], n_logits=n_logits, parents=parents),
            )


@pytest.mark.pair
@pytest.mark.parametrize("which", [0, 1])
def test_branches_of_the_real_pair_have_the_bits_of_chains(kernels, pair, which):
    rng = np.random.default_rng(11)
    text = "def median(values):\n    ordered = sorted(values)\n    # the one in the middle, or a mean\n"
    with Model(pair[which]) as model:
        assert model.uses_kernels
        tokens = model.tokenize(text * 8, add_special=False, parse_special=False)
        with (
            Session(model, n_ctx=N_CTX, n_threads=2) as session,
            Session(model, n_ctx=N_CTX, n_threads=2) as chains,
        ):
            for n_past in (*range(60, 71), 128, 130):
                for one in (session, chains):
                    one.rewind(min(n_past, one.n_past))
                    one.eval(tokens[one.n_past : n_past], n_logits=0)
                parents = random_shape(rng, int(rng.integers(3, 9)))
                nodes = rng.integers(0, 50_000, len(parents)).tolist()
                assert_tree_is_chains(session, chains, [tokens[n_past], *nodes], parents)
                np.testing.assert_array_equal(session.eval(tokens[:1]), chains.eval(tokens[:1]))
