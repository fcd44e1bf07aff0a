"""bench/sources.py: the real loop and a real (tiny) head over a target that says again what it said."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack

import numpy as np
import pytest

from edgespec import Engine
from edgespec.llama.quantize import quantize
from edgespec.models.suites import Prompt
from random_heads import write_random_head
from sources import WAYS, Counts, Replay, load_texts, save_texts, table, write
from tiny_gguf import write_tiny_gguf

PROMPTS = [Prompt("1", "copy", "abc abd abc abd abc"), Prompt("2", "rag", "one two three one two")]
COSTS = Namespace(
    target_ms=[35, 34, 34, 46, 83, 165], head_ms=[0.8, 0.85, 0.9, 1.0, 1.2, 1.6], threads=1, n_ctx=512
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, kernels):
    directory = tmp_path_factory.mktemp("sources")
    source = write_tiny_gguf(directory / "f32.gguf", n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_ctx=1024)
    quantize(source, directory / "q4_k_m.gguf", "q4_k_m")
    head = write_random_head(directory / "head.gguf", directory / "q4_k_m.gguf")
    with Engine(directory / "q4_k_m.gguf", head, n_ctx=1024, profile=False) as engine:
        yield engine


def test_texts_are_written_again(engine, tmp_path, capsys):
    save_texts(tmp_path / "texts.npz", list(write(engine, PROMPTS, 40)))
    texts = load_texts(tmp_path / "texts.npz")
    assert [text.category for text in texts] == ["copy", "rag"]
    found = {}
    with ExitStack() as stack:
        replay = Replay(engine.target, engine.draft.path, COSTS, stack)
        for text in texts:
            n = len(text.tokens) - text.n_prompt
            assert 0 < n <= 40 and np.any(text.states[-1])
            found[text.category] = {way: Counts() for way in WAYS}
            for way in WAYS:
                counts = replay.count(text, way)  # which ends where the text is another
                assert counts.emitted == n - 1 and counts.passes == counts.emitted - counts.accepted
                assert (counts.head_passes > 0) <= (way != "store")
                found[text.category][way].add(counts)
    table(found)
    assert "both over the better one by cost" in capsys.readouterr().out
