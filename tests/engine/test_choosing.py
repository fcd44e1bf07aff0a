"""Which models run where none, or only one, was named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.draft_records import DraftRecord, DraftSpeedups, write_record
from edgespec.models.registry import add_local, remove_local, user_models_file
from tiny_states import tiny

DEFAULT = ("qwen2.5-coder-1.5b-q4_k_m", "qwen2.5-coder-1.5b-head-q4_0")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target.gguf"
    path.write_bytes(b"weights")
    return str(path)


def make_draft(folder, name, target, gain):
    """A draft, as far as its choice is concerned."""
    file = folder / f"{name}.gguf"
    file.write_bytes(b"draft")
    data = Path(target).read_bytes()
    record = DraftRecord(
        name=name,
        target_name="target",
        target_sha256=hashlib.sha256(data).hexdigest(),
        target_bytes=len(data),
        cost_ratio=0.1,
        gains=DraftSpeedups(gain, gain),
        made="2026-01-02T03:04:05+00:00",
    )
    write_record(file, record)
    add_local(name, file, 5, "00" * 32)


def test_the_registrys_pairs(target):
    assert choose_models(None, None) == DEFAULT
    assert choose_models(None, None, writes=True) == (DEFAULT[0], "qwen2.5-coder-0.5b-q4_0")
    assert choose_models(DEFAULT[0], None, "none") == (DEFAULT[0], None)
    assert choose_models(None, "any.gguf") == (DEFAULT[0], "any.gguf")
    assert choose_models(target, None) == (target, None)
    with pytest.raises(UsageError, match=r"no draft is known for .*target\.gguf"):
        choose_models(target, None, "model")


def test_the_best_made_for_the_target(target, tmp_path):
    make_draft(tmp_path, "good", target, 1.2)
    make_draft(tmp_path, "best", target, 1.5)
    assert choose_models(target, None) == (target, "best")
    assert choose_models(target, None, "model") == (target, "best")
    assert choose_models(target, None, "suffix") == (target, None)
    assert choose_models(target, "good") == (target, "good")
    assert choose_models(None, None) == DEFAULT, "another target"
    with pytest.raises(UsageError, match="no draft is known"):
        choose_models(target, None, "model", writes=True)
    remove_local("best")
    assert choose_models(target, None) == (target, "good")


def test_a_made_draft_comes_before_the_registrys(target, tmp_path):
    add_local("my-target", tmp_path / "target.gguf", 7, "00" * 32)
    add_local("my-draft", tmp_path / "target.gguf", 7, "00" * 32)
    with user_models_file().open("a") as file:
        file.write('\n[pairs]\nmine = { target = "my-target", draft = "my-draft" }\n')
    assert choose_models("my-target", None) == ("my-target", "my-draft")
    make_draft(tmp_path, "made", target, 1.2)
    assert choose_models("my-target", None) == ("my-target", "made")
    assert choose_models("my-target", None, writes=True) == ("my-target", "my-draft")


def test_another_quantization_has_none(target, tmp_path):
    make_draft(tmp_path, "made", target, 1.2)
    other = tmp_path / "target-q8_0.gguf"
    other.write_bytes(b"Weights")  # of the same size
    assert choose_models(str(other), None) == (str(other), None)


def test_a_head_in_the_targets_own_file():
    target = str(tiny("glm4-moe-mtp"))
    for drafter in ("auto", "model", "chain", "mtp"):
        assert choose_models(target, None, drafter) == (target, None), "the pair finds it in the file"
    assert choose_models("qwen3.5-4b-mtp-q4_k_m", None, "model") == ("qwen3.5-4b-mtp-q4_k_m", None)
    with pytest.raises(UsageError, match="leave out any"):
        choose_models(target, "any.gguf", "mtp")
    with pytest.raises(UsageError, match="no draft is known"):
        choose_models(target, None, "model", writes=True)


def test_a_head_in_the_targets_file_comes_before_a_draft_that_is_not_here(tmp_path):
    add_local("with-head", tiny("glm4-moe-mtp"), tiny("glm4-moe-mtp").stat().st_size, "00" * 32)
    draft = tmp_path / "draft.gguf"
    add_local("its-draft", draft, 5, "00" * 32)
    with user_models_file().open("a") as file:
        file.write('\n[pairs]\nmine = { target = "with-head", draft = "its-draft" }\n')
    assert choose_models("with-head", None) == ("with-head", None)
    assert choose_models("with-head", None, writes=True) == ("with-head", "its-draft")
    assert choose_models("with-head", "its-draft") == ("with-head", "its-draft")
    draft.write_bytes(b"draft")
    assert choose_models("with-head", None) == ("with-head", "its-draft")
