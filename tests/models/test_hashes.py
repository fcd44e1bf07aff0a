"""The SHA-256 of files, read once."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest

from edgespec.models import store
from edgespec.models.registry import Entry, Registry
from edgespec.models.store import Stamp, Store, known_sha256, sha256_of

_TICK = 0.03  # the clock of a file system is no finer than that


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
    before = file.stat()
    time.sleep(_TICK)
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert counted(file) == (hashlib.sha256(b"other").hexdigest(), 5)
    assert len(json.loads(kept.read_text())["files"]) == 1


def test_a_split_model_is_all_of_its_parts(tmp_path):
    first, second = (tmp_path / f"m-0000{no}-of-00002.gguf" for no in (1, 2))
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    before = sha256_of(first)
    time.sleep(_TICK)
    assert known_sha256(first) == before != hashlib.sha256(b"1").hexdigest()
    second.write_bytes(b"3")
    assert known_sha256(first) is None
    assert sha256_of(first) != before


def in_place(file, content):
    file.write_bytes(content)


def renamed(file, content):
    (new := file.with_suffix(".new")).write_bytes(content)
    new.replace(file)


@pytest.mark.parametrize("change", [in_place, renamed])
@pytest.mark.parametrize("older", [True, False])
def test_another_file_of_the_same_size_and_time_is_not_present(tmp_path, change, older):
    """Pulled by this version, and by one whose stamps had an identity; and a model of the user's own."""
    store, pulled = Store.default(), Entry("a")
    store.root.mkdir()
    file = store.file(pulled)
    file.write_bytes(b"12345")
    sha256 = hashlib.sha256(b"12345").hexdigest()
    own = Entry("own", path=file, sha256=sha256, size=5)
    store.write_stamp(pulled, Stamp(sha256, 5, "test"))
    if older:
        record = store.root / "a.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"file": [1, 2, 3, 4]}))
    entries = {"a": pulled, "own": own}
    assert [store.is_present(one, Registry(entries, {}, None)) for one in (pulled, own)] == [True, True]
    assert counted(file) == (sha256, 0)
    times = file.stat()
    time.sleep(_TICK)
    change(file, b"54321")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [store.is_present(one, Registry(entries, {}, None)) for one in (pulled, own)] == [False, False]
    time.sleep(_TICK)
    change(file, b"12345")
    assert [store.is_present(one, Registry(entries, {}, None)) for one in (pulled, own)] == [True, True]
    assert counted(file) == (sha256, 0)


def test_only_the_newest_are_remembered(tmp_path, kept, monkeypatch):
    monkeypatch.setattr(store, "_MOST", 2)
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
