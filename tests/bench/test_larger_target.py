"""A stand-in for a larger target: it says what the small model says, and every layer's bytes are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.speech.whisper_model import SequenceBatch, WhisperModel
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.llama.gguf_header import check_model_file
from larger_target import write_larger
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper


def written(path: Path) -> tuple[int, ...]:
    with Engine(path, drafter="none", n_threads=1) as engine:
        return engine.generate("one two three", params=SamplingParams(temperature=0), n_predict=40).token_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_it_says_the_same_with_more_layers(tmp_path: Path, architecture: str) -> None:
    small = write_tiny_gguf(tmp_path / "small.gguf", architecture=architecture)
    larger = write_larger(small, 7, tmp_path / "larger.gguf")
    assert check_model_file(larger).n_layer == 7
    assert larger.stat().st_size > 2 * small.stat().st_size
    assert written(larger) == written(small)


def test_a_larger_whisper_hears_the_same(tmp_path: Path) -> None:
    small = write_tiny_whisper(tmp_path / "small.gguf", n_audio_ctx=60, n_text_ctx=40)
    larger = write_larger(small, [3, 4], tmp_path / "larger.gguf")
    sound = np.random.default_rng(1).normal(0, 0.5, (80, 120)).astype(np.float32)
    rows = []
    for path in (small, larger):
        with WhisperModel.open(path, n_threads=1) as model:
            assert model.dims.n_text_layer == (2 if path == small else 4)
            cache = model.cache(model.encode(sound))
            rows.append(cache.forward([SequenceBatch(0, [1, 2, 3], 3)])[0])
    assert np.array_equal(*rows)
