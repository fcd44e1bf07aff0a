"""Texts to quantize by: the model's own."""

from __future__ import annotations

import pytest

from edgespec.apps.forge.commands.quantize import own_texts
from edgespec.errors import EdgespecError
from tiny_architectures import write_architecture


def test_a_model_writes_its_own(tmp_path):
    told = []
    texts = own_texts(
        write_architecture(tmp_path, "llama", 1024), 300, on_progress=lambda *now: told.append(now)
    )
    assert sum(map(len, texts)) >= 300
    assert told[0] == (0, 300) and all(0 <= done < 300 for done, _ in told)


def test_a_model_that_reads_too_little_at_once(tmp_path):
    path = write_architecture(tmp_path, "llama", 512)
    with pytest.raises(EdgespecError, match=r"\.gguf: reads 512 tokens at once, .* --calibrate FILE"):
        own_texts(path)
