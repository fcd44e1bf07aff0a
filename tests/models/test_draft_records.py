"""Records of made drafts: what they hold, and which draft a target has."""

from __future__ import annotations

import hashlib
import json

import pytest
from msgspec.structs import replace

import kept_drafts
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.draft_records import (
    DraftSpeedups,
    draft_records,
    drafts_for,
    read_record,
    record_file,
    write_record,
)
from edgespec.models.registry import add_local, remove_local

RECORD = replace(
    kept_drafts.RECORD, data={"prompt:built-in": 1000, "read": 50}, tokens_seen=3000, acceptance=(0.6, 0.55)
)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))
    (tmp_path / "models").mkdir()


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "target.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def keep(tmp_path, target):
    """Put a draft with a record among the models."""

    def keep(name, **changes):
        file = tmp_path / "models" / f"{name}.gguf"
        file.write_bytes(b"draft")
        sha256 = hashlib.sha256(target.read_bytes()).hexdigest()
        write_record(file, replace(RECORD, **{"name": name, "target_sha256": sha256, **changes}))
        add_local(name, file, 5, "00" * 32)
        return file

    return keep


def test_a_record_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "models" / "mine.v2.gguf"
    assert read_record(file) is None
    write_record(file, RECORD)
    assert record_file(file).name == "mine.v2.draft.json"
    assert read_record(file) == RECORD
    assert RECORD.gains.mean == pytest.approx(1.32)
    assert RECORD.uses_own_texts, "some were read"
    assert not replace(RECORD, data={"prompt:built-in": 1, "prompt:history": 0}).uses_own_texts


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "shallow"},
        {"target_sha256": "short"},
        {"acceptance": [1.5]},
        {"gains": {"greedy": 1.0}},
        {"gains": {"greedy": 0.0, "sampled": 1.0}},
        {"hours": -1},
        {"hours": float("inf")},
        {"format": 2},
        {"data": {"read": -1}},
        {"cost_ratio": None},
    ],
)
def test_a_record_that_is_none(tmp_path, changes):
    file = tmp_path / "models" / "mine.gguf"
    write_record(file, RECORD)
    record_file(file).write_text(json.dumps({**json.loads(record_file(file).read_text()), **changes}))
    with pytest.raises(EdgespecError, match=r"mine\.draft\.json: no record of a draft.*draft remove mine"):
        read_record(file)


def test_the_best_draft_of_the_very_file(keep, target):
    keep("good", gains=DraftSpeedups(1.3, 1.2))
    keep("best", gains=DraftSpeedups(1.4, 1.2), made="2026-01-01T00:00:00+00:00")
    keep("of-another", target_sha256="cd" * 32)
    keep("of-another-size", target_bytes=8)
    assert [one.name for one in drafts_for(str(target))] == ["best", "good"]
    assert next(one.name for one in draft_records()) == "best", "the oldest first"
    assert len(draft_records()) == 4
    target.write_bytes(b"another")
    assert drafts_for(str(target)) == []


def test_a_draft_without_its_name_or_its_file(keep, target):
    keep("a")
    keep("b").unlink()
    remove_local("a")
    assert drafts_for(str(target)) == []
    assert draft_records() == []


def test_a_damaged_record_is_one_line(keep, target):
    keep("good")
    record_file(keep("bad")).write_text("{")
    said = []
    assert [one.name for one in drafts_for(str(target), said.append)] == ["good"]
    (line,) = said
    assert "bad.draft.json" in line


def test_targets_by_name(keep, tmp_path, target):
    keep("mine")
    add_local("my-target", target, 7, "00" * 32)
    assert [one.name for one in drafts_for("my-target")] == ["mine"]
    assert drafts_for("qwen2.5-coder-1.5b-q4_k_m") == [], "not here"
    with pytest.raises(UsageError, match="no model is called"):
        drafts_for("qwen2.5-coder-1.5b-q4_k_x")
