"""The first stage of `edgespec draft make`."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.apps.forge.data_stage import write_texts
from edgespec.apps.forge.dataset import BUILT_IN, FROM_FILE, FROM_HISTORY, READ, Dataset, DatasetTarget
from edgespec.apps.forge.request import DraftRequest, StageContext
from edgespec.drafting.history import History
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import tokenizer_fingerprint
from edgespec.llama.weights import Model
from tiny_gguf import write_tiny_gguf


def test_files_and_the_history_are_asked_beside_built_in_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    book = tmp_path / "book.txt"
    book.write_text("".join(f"This is line {i}, and it says so.\n" for i in range(40)))
    with Model(write_tiny_gguf(tmp_path / "target.gguf", n_ctx=2048)) as model:
        dataset = Dataset(DatasetTarget("ab" * 32, "tiny", model.n_embd), tmp_path / "data")
        request = DraftRequest(target="tiny", hours=1.0, answer_tokens=40, prompts=(book,), from_history=True)
        with pytest.raises(EdgespecError, match="the history has 0 tokens"):
            write_texts(model, dataset, request, 6_000, StageContext())
        questions = [model.tokenize_chat([{"role": "user", "content": f"What is {i}?"}]) for i in range(40)]
        History(tokenizer_fingerprint(model.header)).extend(
            [[*question, *range(60)] for question in questions]
        )
        write_texts(model, dataset, request, 6_000, StageContext())
    assert dataset.n_answer_tokens() >= 6_000
    assert {text.source for text in dataset.texts()} == {BUILT_IN, FROM_FILE, FROM_HISTORY, READ}
