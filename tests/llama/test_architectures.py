"""Tiny models of every architecture: files that any part of edgespec can load."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.llama.gguf_header import check_model_file
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
