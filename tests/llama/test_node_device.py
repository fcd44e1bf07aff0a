"""The device of a node: a complete backend, here in the tests' own process, without a network."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.llama import rpc
from edgespec.llama.backend import llama
from edgespec.llama.gguf_header import read_header
from remote_models import loaded, logits
from tiny_models import make_tiny

TOKENS = [1, *np.random.default_rng(3).integers(5, 90, 40).tolist()]
MEMORY = 1 << 30

WHOLE = ("llama", "gemma2", "phi3", "qwen3moe", "qwen35", "deepseek2")
"""Run whole on the kernels; of the others some operations are handed to llama.cpp's CPU backend."""
IN_PARTS = ("rwkv7",)


@pytest.fixture
def device(kernels):
    yield kernels.plugin.node_device(rpc.cpu_device(), MEMORY)
    assert kernels.plugin.node().used == 0  # all that a test has taken is free again


def counted(plugin, before=None):
    facts = plugin.node()
    return np.array([facts.n_run, facts.n_handed_on]) - (0 if before is None else before)


@pytest.mark.parametrize("name", [*WHOLE, *IN_PARTS])
@pytest.mark.parametrize("weights_type", ["q4_0", "q8_0"])
def test_a_model_on_the_device_says_what_it_says_in_process(kernels, device, tmp_path, name, weights_type):
    path = make_tiny(name, tmp_path / "tiny.gguf", weights_type=weights_type)
    with loaded(path) as model:
        here = logits(model, TOKENS)
    before = counted(kernels.plugin)
    with loaded(path, [device], output=True) as model:
        np.testing.assert_array_equal(logits(model, TOKENS), here)
        if name in WHOLE:
            np.testing.assert_array_equal(logits(model, TOKENS, batch=1, n_threads=1), here)
        assert kernels.plugin.node().n_packed > 0
    by_kernels, handed_on = counted(kernels.plugin, before)
    assert by_kernels > 0
    assert (handed_on > 0) == (name in IN_PARTS)


def test_a_model_without_packable_weights_runs_as_in_llama_cpp(kernels, device, tmp_path):
    path = make_tiny("llama", tmp_path / "tiny.gguf")
    with loaded(path, kernels=False) as model:
        stock = logits(model, TOKENS)
    before = counted(kernels.plugin)
    with loaded(path, [device], kernels=False, output=True) as model:
        np.testing.assert_array_equal(logits(model, TOKENS), stock)
        assert kernels.plugin.node().n_packed == 0
    assert counted(kernels.plugin, before)[0] == 0


def test_packed_weights_are_read_back_as_they_were_sent(kernels, device, tmp_path):
    path = make_tiny("llama", tmp_path / "tiny.gguf", weights_type="q4_0")
    with loaded(path, [device], output=True) as model:
        logits(model, TOKENS)  # packs them
        assert (packed := kernels.plugin.node().n_packed) > 0
        saved = tmp_path / "saved.gguf"
        llama.llama_model_save_to_file(model, str(saved).encode())
        after = logits(model, TOKENS)
        assert kernels.plugin.node().n_packed == packed  # reading them has not cost the packed copies
    assert weights(saved) == weights(path)
    with loaded(path) as model:
        np.testing.assert_array_equal(after, logits(model, TOKENS))


def weights(path):
    """The bytes of each tensor in a file."""
    header = read_header(path)
    data = path.read_bytes()
    begin = header.gguf.data_start
    return {t.name: data[begin + t.offset : begin + t.offset + t.bytes] for t in header.gguf.tensors}


def test_two_models_in_turns_do_not_mix_their_caches(kernels, device, tmp_path):
    """A freed cache and a new one may lie at the same address."""
    paths = [make_tiny("llama", tmp_path / f"{seed}.gguf", seed=seed, weights_type="q8_0") for seed in (1, 2)]
    expected = []
    for path in paths:
        with loaded(path) as model:
            expected.append(logits(model, TOKENS))
    for _ in range(2):
        for path, here in zip(paths, expected, strict=True):
            with loaded(path, [device], output=True) as model:
                for length in (7, len(TOKENS)):
                    np.testing.assert_array_equal(logits(model, TOKENS[:length]), here[:length])


def test_weights_are_held_once(kernels, device, tmp_path):
    path = make_tiny("llama", tmp_path / "tiny.gguf", weights_type="q8_0")
    with loaded(path, [device], output=True) as model:
        before = kernels.plugin.node().used
        logits(model, TOKENS)
        facts = kernels.plugin.node()
        assert facts.packed_bytes > 50_000
        assert facts.used - before < 0.1 * facts.packed_bytes


def test_what_does_not_fit_is_refused(kernels, tmp_path):
    device = kernels.plugin.node_device(rpc.cpu_device(), 1 << 16)
    path = make_tiny("llama", tmp_path / "tiny.gguf")
    with (
        pytest.raises(AssertionError, match="failed to allocate EDGESPEC_NODE buffer of size"),
        loaded(path, [device], output=True),
    ):
        pass
    assert kernels.plugin.node().used == 0
