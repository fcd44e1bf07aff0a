"""A draft head in the real loop: the target's own text whatever it drafts, and what its passes read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.decoding.features import KEPT, TargetFeatures
from edgespec.drafting.head import HeadModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import quantize
from edgespec.llama.cache import Cache, CacheSize
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import Fusion, TargetEmbeddings, read_head
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.options import Options
from random_heads import write_random_head
from tiny_gguf import N_WORDS, write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {
    "one token": [1],
    "short": [3, 7, 9] * 5,
    "longer than a window": [(7 * i * i + 3) % 250 for i in range(250)],
    "longer than a pass": [(5 * i * i + 11) % 250 for i in range(700)],
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    """A small model that the kernels run whole: its logits do not depend on what shares a pass."""
    directory = tmp_path_factory.mktemp("head")
    source = write_tiny_gguf(directory / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_ctx=1024)
    quantize(source, directory / "q4_k_m.gguf", "q4_k_m")
    return directory / "q4_k_m.gguf"


@pytest.fixture(scope="module")
def head_path(target_path):
    return write_random_head(target_path.with_name("head.gguf"), target_path)


@pytest.fixture(scope="module")
def plain(target_path, kernels):
    """What the target writes alone."""
    known = {}
    with Engine(target_path, drafter="none", n_ctx=1024, profile=False) as engine:

        def answer(prompt, **options):
            key = (tuple(prompt), repr(options))
            if key not in known:
                known[key] = engine.generate(prompt, **options)
            return known[key]

        yield answer


@pytest.fixture(scope="module")
def engine(target_path, head_path, kernels):
    with Engine(target_path, head_path, n_ctx=1024, profile=False, prefix_cache=0) as engine:
        yield engine


@pytest.mark.parametrize("drafter", ["auto", "model", "tree", "chain", "staged"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_plain_decodings_own(engine, plain, prompt, drafter):
    result = engine.generate(prompt, params=GREEDY, n_predict=50, drafter=drafter)
    assert result.token_ids == plain(prompt, params=GREEDY, n_predict=50).token_ids
