"""Tiny models of every architecture: files that any part of edgespec can load."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_gguf import EOS, vocabulary
from tiny_models import ARCHITECTURES, make_tiny


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
