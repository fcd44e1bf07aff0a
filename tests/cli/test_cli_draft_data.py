"""`edgespec draft data` as a user types it: texts go from one machine's cache to another's."""

from __future__ import annotations

import numpy as np
import pytest

from command_line import failed, run_cli
from edgespec.apps.forge.dataset import Dataset, DatasetTarget
from edgespec.apps.forge.prompts import TextPrompt
from edgespec.apps.forge.writing import TargetWriter, WritingSettings
from edgespec.llama.weights import Model
from edgespec.models.hashes import sha256_of

pytestmark = pytest.mark.slow


@pytest.fixture
def edgespec(environment):
    return lambda *arguments, **more: run_cli("draft", "data", *arguments, env={**environment, **more})


@pytest.fixture
def texts(environment, tiny_path, tmp_path, monkeypatch):
    """Three answers of the tiny target, and one made from the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    settings = WritingSettings(n_texts=2, n_predict=8, longest_prompt=100, n_pass=32)
    with Model(tiny_path, kernels=False) as model:
        target = DatasetTarget.of(model.header, tiny_path.stem, sha256_of(tiny_path))
        prompts = [TextPrompt("prompt:built-in", (f"Say {i}.",)) for i in range(3)]
        prompts.append(TextPrompt("prompt:file", ("Mine.",)))
        with TargetWriter(model, settings, n_threads=1) as writing, Dataset(target).writer(1 << 24) as writer:
            writing.fill(writer, prompts, until=1 << 20)
    return tmp_path / "texts.npz"


def test_texts_go_to_another_machine(edgespec, texts, tiny_path, tmp_path):
    process = edgespec("export", texts, "-t", tiny_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"{texts}: 3 texts, ")
    assert "1 texts made from your own were left out; --own-texts takes them along" in process.stderr
    refused = edgespec("export", texts, "-t", tiny_path)
    assert "exists already" in failed(refused, 2)

    elsewhere = str(tmp_path / "elsewhere")
    process = edgespec("import", texts, "-t", tiny_path, "--threads", "1", XDG_CACHE_HOME=elsewhere)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(elsewhere)
    assert ": 3 texts more, 24 tokens of answers\n" in process.stdout
    again = edgespec("import", texts, "-t", tiny_path, XDG_CACHE_HOME=elsewhere)
    assert "0 texts more, 0 tokens of answers; 3 were there already" in again.stdout

    with np.load(texts) as arrays:
        content = dict(arrays)
    np.savez(texts, **content | {"target_sha256": np.array("cd" * 32)})
    refused = edgespec("import", texts, "-t", tiny_path, XDG_CACHE_HOME=elsewhere)
    assert "texts of another target" in failed(refused, 2)
