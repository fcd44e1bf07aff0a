"""Texts to quantize by: the model's own."""

from __future__ import annotations

import pytest

from edgespec.apps.forge.commands.quantize import own_texts
from tiny_architectures import write_architecture


@pytest.mark.parametrize("n_ctx", [1024, 256])
def test_a_model_writes_its_own(tmp_path, n_ctx):
    told = []
    path = write_architecture(tmp_path, "llama", n_ctx)
    texts = own_texts(path, 300, n_threads=1, on_progress=lambda *now: told.append(now))
    assert sum(map(len, texts)) >= 300
    assert all(0 < done <= total == 300 for done, total in told)
