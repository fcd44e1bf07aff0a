"""Tiny models of every architecture: files that any part of edgespec can load."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import UsageError
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from operations import operations_of
from tiny_gguf import EOS, vocabulary
from tiny_models import ARCHITECTURES, make_tiny

# What csrc/kernels does not do yet. A test that begins to pass fails: then delete the line here.
WAITS = {
    "rwkv7": "RWKV's own operation",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tiny_model_has_logits_that_depend_on_all_the_text(name, tmp_path):
    path = make_tiny(name, tmp_path / "tiny.gguf")
    architecture = ARCHITECTURES[name]
    assert check_model_file(path).architecture == architecture.gguf_name
    with Model(path) as model, Session(model, n_ctx=256, n_threads=1) as session:
        assert (model.n_vocab, model.eos) == (len(vocabulary()[0]), EOS)
        text = "the quick brown fox"
        tokens = model.tokenize(text, add_special=True, parse_special=True)
        assert b"".join(map(model.piece, tokens)).decode() == text

        def logits(*tokens):
            session.clear()
            return session.eval(list(tokens), n_logits=1)[0].copy()

        rows = np.stack([logits(first, *tokens) for first in (1, 2)])
        assert np.isfinite(rows).all()
        assert (rows.std(axis=1) > 1).all() and (rows.std(axis=1) < 4).all()
        assert np.abs(rows[0] - rows[1]).max() > 0.01
        assert (logits(1, *tokens) == rows[0]).all()


def test_the_same_arguments_write_the_same_bytes_and_another_seed_others(tmp_path):
    first, same, other = (
        make_tiny("qwen35", tmp_path / f"{name}.gguf", seed=seed).read_bytes()
        for name, seed in [("first", 1), ("same", 1), ("other", 2)]
    )
    assert first == same
    assert first != other


def test_a_model_without_a_tokenizer_has_as_many_tokens(tmp_path):
    path = make_tiny("lfm2", tmp_path / "tiny.gguf", tokenizer=False)
    with Model(path, header=read_header(path)) as model:
        assert model.n_vocab == len(vocabulary()[0])
        assert model.tokenizer_type == "unknown"


def test_the_layers_of_an_mtp_head_are_in_the_file(tmp_path):
    plain, mtp = (check_model_file(make_tiny(name, tmp_path / name)) for name in ("qwen35", "qwen35-mtp"))
    added = {tensor.name for tensor in mtp.gguf.tensors} - {tensor.name for tensor in plain.gguf.tensors}
    assert "blk.2.nextn.eh_proj.weight" in added
    assert "blk.2.nextn.embed_tokens.weight" not in added
    assert all(name.startswith("blk.2.") for name in added)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=r"unknown architecture 'llama9'; known: .*qwen35"):
        make_tiny("llama9", tmp_path / "tiny.gguf")


def test_tensors_are_those_of_published_models(tmp_path):
    def names(architecture):
        path = make_tiny(architecture, tmp_path / f"{architecture}.gguf")
        return {tensor.name for tensor in read_header(path).gguf.tensors}

    llama, qwen2, gemma3, phi3 = map(names, ("llama", "qwen2", "gemma3", "phi3"))
    assert "rope_freqs.weight" in llama - qwen2
    assert "blk.0.attn_q.bias" in qwen2 - llama
    assert "output.weight" in llama - gemma3
    assert "blk.0.attn_qkv.weight" in phi3
    assert "blk.0.attn_q.weight" not in phi3


def test_matrices_are_quantized_where_the_library_would(tmp_path):
    ours = make_tiny("qwen35moe", tmp_path / "ours.gguf", weights_type="q8_0")
    quantize(make_tiny("qwen35moe", tmp_path / "f32.gguf"), tmp_path / "theirs.gguf", "q8_0", pure=True)

    def types(path):
        return {tensor.name: tensor.type for tensor in read_header(path).gguf.tensors}

    assert types(ours) == types(tmp_path / "theirs.gguf")


def test_what_the_kernels_run_is_what_ggml_gives_them(kernels, tmp_path):
    path = make_tiny("rwkv7", tmp_path / "tiny.gguf", weights_type="q8_0")
    with Model(path) as model, Model(path, kernels=False) as stock:
        packed, plain = operations_of(model), operations_of(stock)
    assert packed.claimed["MUL_MAT"] >= len(model.packed)
    assert packed.declined == {"RWKV_WKV7": 2}
    assert packed.n_pieces > 2
    assert plain.claimed == {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=WAITS[name])) if name in WAITS else name
        for name in ARCHITECTURES
    ],
)
def test_models_run_whole_on_the_kernels(kernels, tmp_path, name):
    with Model(make_tiny(name, tmp_path / "tiny.gguf", weights_type="q8_0")) as model:
        assert operations_of(model).declined == {}
