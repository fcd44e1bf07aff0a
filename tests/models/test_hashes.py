"""The SHA-256 of files, read once."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from edgespec.models import hashes
from edgespec.models.entries import Entry
from edgespec.models.hashes import sha256_of
from edgespec.models.store import Stamp, Store


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "store"))


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "cache" / "edgespec" / "hashes.json"


def counted(path):
    """The hash, and how many bytes were read for it."""
    read = [0]
    return sha256_of(path, read.append), read[-1]


def test_a_file_is_hashed_once_until_it_changes(tmp_path, kept):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"first")
    assert counted(file) == (hashlib.sha256(b"first").hexdigest(), 5)
    assert counted(file) == (hashlib.sha256(b"first").hexdigest(), 0)
    link = tmp_path / "b.gguf"
    link.symlink_to(file)
    assert counted(link)[1] == 0, "the same file"
    file.write_bytes(b"other")
    os.utime(file, ns=(1, 1))
    assert counted(file) == (hashlib.sha256(b"other").hexdigest(), 5)
    assert len(json.loads(kept.read_text())["files"]) == 1


def test_a_stamp_is_trusted(tmp_path, kept):
    store = Store.default()
    store.root.mkdir()
    (store.root / "a.gguf").write_bytes(b"12345")
    store.write_stamp(Entry("a"), Stamp("ab" * 32, 5, "test"))
    assert counted(store.root / "a.gguf") == ("ab" * 32, 0)
    store.write_stamp(Entry("a"), Stamp("ab" * 32, 6, "of another file"))
    assert counted(store.root / "a.gguf")[1] == 5
    assert kept.exists()


def test_only_the_newest_are_remembered(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(hashes, "_MOST", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
        sha256_of(tmp_path / name)
    assert [*json.loads(kept.read_text())["files"]] == [str(tmp_path / "b"), str(tmp_path / "c")]


def test_without_a_place_to_remember(tmp_path, kept):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"text")
    kept.parent.parent.write_text("a file where the folder should be")
    assert counted(file)[1] == counted(file)[1] == 4
    kept.parent.parent.unlink()
    kept.parent.mkdir(parents=True)
    kept.write_text('{"files": {"x": {"size": "many"}}}')
    assert counted(file)[1] == 4
    assert counted(file)[1] == 0
    assert len([*kept.parent.glob("hashes.json.set-aside*")]) == 1
