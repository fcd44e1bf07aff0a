"""Which models run where none, or only one, was named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgespec.engine.model_choice import choose_models
from edgespec.engine.options import EngineOptions
from edgespec.engine.pair import Pair
from edgespec.errors import UsageError
from edgespec.llama import gguf_header
from edgespec.models import draft_records, store
from edgespec.models.draft_records import DraftRecord, DraftSpeedups, write_record
from edgespec.models.registry import Entry, add_local, remove_local, user_models_file
from edgespec.models.store import Stamp, Store
from model_stores import OllamaStore
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
    add_local("its-draft", draft, 5, sha256_of_bytes(b"draft"))
    with user_models_file().open("a") as file:
        file.write('\n[pairs]\nmine = { target = "with-head", draft = "its-draft" }\n')
    assert choose_models("with-head", None) == ("with-head", None)
    assert choose_models("with-head", None, writes=True) == ("with-head", "its-draft")
    assert choose_models("with-head", "its-draft") == ("with-head", "its-draft")
    draft.write_bytes(b"draft")
    assert choose_models("with-head", None) == ("with-head", "its-draft")


# ---- one file, many names ----


def sha256_of_bytes(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def paired(tmp_path):
    """A registered pair of which the target was not pulled; returns what its file holds."""
    content, draft = b"the target of a pair", tmp_path / "head.gguf"
    draft.write_bytes(b"head")
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text(f"""
[models.big]
sources = [{{ kind = "hub", repo = "me/repo", file = "big.gguf" }}]
size = {len(content)}
sha256 = "{sha256_of_bytes(content)}"

[models.head]
path = "{draft}"
size = 4
sha256 = "{sha256_of_bytes(b"head")}"

[pairs]
mine = {{ target = "big", draft = "head" }}
""")
    return content


def copied(tmp_path, content):
    file = tmp_path / "a copy.gguf"
    file.write_bytes(content)
    return file


def as_path(tmp_path, content):
    return str(copied(tmp_path, content))


def as_symbolic_link(tmp_path, content):
    link = tmp_path / "link.gguf"
    link.symlink_to(copied(tmp_path, content))
    return str(link)


def as_hard_link(tmp_path, content):
    link = tmp_path / "hard.gguf"
    link.hardlink_to(copied(tmp_path, content))
    return str(link)


def as_own_name(tmp_path, content):
    add_local("another-name", copied(tmp_path, content), len(content), sha256_of_bytes(content))
    return "another-name"


def as_file_of_the_store(tmp_path, content):
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "big.gguf"
    file.write_bytes(content)
    store = Store.default()
    store.write_stamp(Entry("big"), Stamp(sha256_of_bytes(content), len(content), "hub me/repo/big.gguf"))
    return str(file)


def in_ollama(tmp_path, content):
    OllamaStore(tmp_path / ".ollama" / "models").add("big:7b", copied(tmp_path, content))
    return "ollama:big:7b"


PLACES = [as_path, as_symbolic_link, as_hard_link, as_own_name, as_file_of_the_store, in_ollama]


@pytest.fixture(params=PLACES, ids=[place.__name__ for place in PLACES])
def place(request, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda content: request.param(tmp_path, content)


def test_a_pairs_draft_belongs_to_the_file_wherever_it_lies(paired, place):
    target = place(paired)
    assert choose_models(target, None) == (target, "head")
    assert choose_models(target, None, "model") == (target, "head")
    assert choose_models(target, None, "suffix") == (target, None)
    assert choose_models(target, "other.gguf") == (target, "other.gguf")


def test_a_made_draft_belongs_to_the_file_wherever_it_lies(paired, place, tmp_path):
    target = place(paired)
    make_draft(tmp_path, "made", tmp_path / "a copy.gguf" if "big.gguf" not in target else target, 1.2)
    assert choose_models(target, None) == (target, "made")


def test_a_file_of_the_same_size_is_another_model(paired, place):
    target = place(paired[::-1])
    assert choose_models(target, None) == (target, None)


def test_only_a_file_of_the_right_size_is_hashed(paired, tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(draft_records, "sha256_of", lambda path: hashed.append(path) or "00")
    for content in (paired + b"!", paired[::-1]):
        target = as_path(tmp_path, content)
        assert choose_models(target, None) == (target, None)
    assert hashed == [tmp_path / "a copy.gguf"], "once, that of the same size"


def test_a_pairs_draft_that_is_not_here_is_not_pulled_for_a_file(paired, tmp_path):
    (tmp_path / "head.gguf").unlink()
    target = as_path(tmp_path, paired)
    assert choose_models(target, None) == (target, None)
    assert choose_models("big", None) == ("big", "head"), "by its name it is"


def test_a_link_to_a_file_of_the_store_needs_no_hash(paired, tmp_path, monkeypatch):
    link = tmp_path / "elsewhere.gguf"
    link.symlink_to(as_file_of_the_store(tmp_path, paired))
    store.sha256_of(tmp_path / "head.gguf")
    monkeypatch.setattr(store, "hash_file", None)
    assert choose_models(str(link), None) == (str(link), "head")


def test_a_start_reads_each_header_once(tiny_path, tiny_draft_path, monkeypatch):
    read, read_gguf = [], gguf_header.read_gguf
    monkeypatch.setattr(gguf_header, "read_gguf", lambda path: read.append(path) or read_gguf(path))
    Pair(EngineOptions(tiny_path, tiny_draft_path), "auto").close()
    assert sorted(read) == sorted([tiny_path, tiny_draft_path])
