"""Making drafts from what a tiny target writes."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgespec.apps.forge import make as make_module
from edgespec.apps.forge.dataset import Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import DraftStore, delete_dataset, remove_draft
from edgespec.apps.forge.make import LEAST_GAIN, MakeRun, make
from edgespec.apps.forge.request import DraftRequest, StageContext
from edgespec.drafting.heads.head_file import read_head
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import read_header
from edgespec.llama.weights import Model
from edgespec.models.draft_records import read_record, record_file, write_record
from edgespec.models.registry import add_local, load_registry, remove_local, user_models_file
from edgespec.models.store import hash_file
from edgespec.platform.kept import FORGE
from random_heads import write_random_head
from tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A registry, a store and a cache of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))


@pytest.fixture(autouse=True)
def trained(jobs):
    """Nothing is really trained here."""


REAL_TRAIN = MakeRun.train


def left(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_draft_is_made_judged_and_used(request_, tiny_path, tmp_path, jobs):
    seen, said = [], []
    context = StageContext(on_progress=lambda *step: seen.append(step), on_message=said.append)
    made = make(replace(request_, force=True), context)
    assert list(dict.fromkeys(stage for stage, *_ in seen)) == [
        "hashing the target",
        "writing",
        "choosing tokens",
        "evaluating",
    ]
    assert said == []
    (judged,) = made.candidates
    assert judged.candidate.name == made.best == "head-q8_0"
    assert made.gain == pytest.approx(judged.gains.mean / max(1, made.before.gains.mean) - 1)
    assert made.before.candidate.path is None, "the target had no draft"

    record = made.kept
    assert record.name == "target-head-q8_0"
    assert made.path == tmp_path / "models" / "target-head-q8_0.gguf"
    assert read_record(made.path) == record
    assert (record.target_name, record.target_sha256) == ("target", hash_file(tiny_path))
    assert record.parent is None
    assert record.data.keys() == {"prompt:built-in"}
    assert record.data["prompt:built-in"] >= 300
    assert (record.tokens_seen, record.hours) == (1000, 0.1)
    assert (record.joules is None) == bool(record.joules_reason)
    assert len(record.acceptance) == 4
    assert record.gains == judged.gains
    assert read_head(read_header(made.path)).target_sha256 == hash_file(tiny_path)
    assert [len(job.token_ids) for job in jobs] == [272]

    entry = load_registry().get(record.name)
    assert (entry.path, entry.size, entry.sha256) == (
        made.path,
        made.path.stat().st_size,
        hash_file(made.path),
    )
    assert choose_models(str(tiny_path), None) == (str(tiny_path), record.name)
    assert [name for name in left(tmp_path / "models") if not name.endswith(".lock")] == [
        "target-head-q8_0.draft.json",
        "target-head-q8_0.gguf",
    ]
    folder = FORGE.path() / record.target_sha256[:16]
    assert not (folder / "judging").exists()
    assert "make.json" in left(folder)


@pytest.mark.parametrize(
    ("gain", "is_kept"), [(1.0 + LEAST_GAIN + 0.01, True), (1.0 + LEAST_GAIN - 0.01, False), (0.5, False)]
)
def test_only_what_is_faster_is_kept(request_, speeds, gain, is_kept, tmp_path):
    speeds["head-q8_0"] = gain
    made = make(request_)
    assert made.gain == pytest.approx(gain - 1)
    assert (made.kept is not None) == is_kept
    assert user_models_file().exists() == is_kept
    assert any(name.endswith(".gguf") for name in left(tmp_path / "models")) == is_kept


def test_it_has_to_beat_the_draft_that_is_there(request_, speeds, tiny_path):
    speeds["head-q8_0"] = 1.5
    first = make(request_)
    assert first.kept
    speeds["head-q8_0"] = 1.39
    request = replace(request_, types=("f16",))
    speeds["head-f16"] = 1.4
    second = make(request)
    assert second.before.candidate.name == first.kept.name
    assert second.kept is None
    assert read_record(first.path).gains.mean == pytest.approx(1.39), "its record says what was measured last"
    speeds["head-f16"] = 1.45
    third = make(request)
    assert third.kept.name == "target-head-f16"
    assert choose_models(str(tiny_path), None)[1] == "target-head-f16"


def test_plain_decoding_has_to_be_beaten_too(request_, speeds):
    speeds.update({"none": 0.5, "head-q8_0": 0.9})
    made = make(request_)
    assert made.before.gains.mean == pytest.approx(0.5)
    assert made.gain == pytest.approx(-0.1)
    assert made.kept is None


def test_what_was_stopped_goes_on(request_, tmp_path):
    """Ctrl-C while it is judged: nothing is written again, and what was judged is not judged again."""

    def stop(stage, _share, detail):
        if stage == "evaluating" and detail.startswith("round 1: head"):
            raise KeyboardInterrupt

    request = replace(request_, force=True)
    with pytest.raises(KeyboardInterrupt):
        make(request, StageContext(on_progress=stop))
    assert not user_models_file().exists()
    assert [name for name in left(tmp_path / "models") if not name.endswith(".lock")] == []
    seen, said = [], []
    made = make(request, StageContext(on_progress=lambda *step: seen.append(step), on_message=said.append))
    assert said == ["resuming the run that was stopped"]
    assert {stage for stage, *_ in seen} == {"choosing tokens", "evaluating"}
    assert {detail for stage, _, detail in seen if stage == "evaluating" and detail} == {
        "round 1: head-q8_0"
    }, "the head is the same file, and was timed; what was there was judged"
    assert made.kept
    make(request, StageContext(on_message=said.append))
    assert len(said) == 1, "a run that has ended does not go on"


def test_other_options_begin_anew_with_the_same_texts(request_, tmp_path):
    def stop(stage, _share, detail):
        if stage == "evaluating":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(request_, StageContext(on_progress=stop))
    said, seen = [], []
    request = replace(request_, types=("f16",), force=True)
    made = make(request, StageContext(on_message=said.append, on_progress=lambda *step: seen.append(step)))
    assert said[0] == "the run that was stopped had other options: a new one begins, with the texts it wrote"
    assert not any("tokens/s" in detail for *_, detail in seen), "the texts are there"
    assert made.kept
    folder = FORGE.path() / made.kept.target_sha256[:16]
    assert [path.name for path in (folder / "training").iterdir()] == ["2"]


def test_a_run_that_kept_nothing_goes_on_by_force(request_, speeds):
    said, seen = [], []
    context = StageContext(on_message=said.append, on_progress=lambda *step: seen.append(step))
    assert make(request_).kept is None
    made = make(replace(request_, force=True, name="mine"), context)
    assert said == ["resuming the last run, which kept nothing: its drafts are evaluated again"]
    assert "writing" not in {stage for stage, *_ in seen}
    assert made.kept.name == "mine"
    make(replace(request_, force=True), context)
    assert len(said) == 1, "that one was kept: a new run"


def test_a_head_goes_on_from_its_file_where_that_is_all_there_is(request_, speeds, jobs):
    """As on another machine, to which only the draft was copied."""
    request_ = replace(request_, force=True)
    first = make(request_)
    assert (jobs[0].start, first.kept.parent) == (None, None)
    shutil.rmtree(FORGE.path())
    own = msgspec.structs.replace(first.kept, data={**first.kept.data, "prompt:file": 5000})
    write_record(first.path, own)
    second = make(request_).kept
    assert (jobs[1].start, second.parent) == (first.path, first.kept.name)
    assert second.data["prompt:file"] == 5000, "its weights know of these texts"
    make(request_)
    assert jobs[2].run != jobs[1].run, "the same texts come in another order"


def test_a_head_goes_on_from_that_of_its_pair(request_, speeds, tiny_path, tmp_path, jobs):
    head = write_random_head(tmp_path / "theirs.gguf", tiny_path)
    for name, path in (("target", tiny_path), ("theirs", head)):
        add_local(name, path, path.stat().st_size, hash_file(path))
    with user_models_file().open("a") as file:
        file.write('[pairs.mine]\ntarget = "target"\ndraft = "theirs"\n')
    assert make(replace(request_, force=True)).kept.parent == "theirs"
    assert jobs[0].start == head


def test_a_head_goes_on_from_one_that_is_named(request_, speeds, tiny_path, tmp_path, jobs):
    """It came from another machine, with its record. What is no head for the target is refused."""
    head = write_random_head(tmp_path / "theirs.gguf", tiny_path)
    request_ = replace(request_, force=True)
    first = make(request_)
    theirs = msgspec.structs.replace(first.kept, name="theirs", data={"prompt:file": 5000})
    write_record(head, theirs)
    named = replace(request_, start=str(head))
    kept = make(named).kept
    assert (jobs[1].start, kept.parent, kept.data["prompt:file"]) == (head, "theirs", 5000)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=9)
    for start in (tiny_path, write_random_head(tmp_path / "of-another.gguf", other)):
        with pytest.raises(UsageError, match=r"start .*: no head for target"):
            make(replace(request_, start=str(start)))


def test_another_text_in_the_same_file_is_another_run(request_, tmp_path):
    """Its texts are read; the same text under another name goes on."""

    def stop(stage, _share, detail):
        if stage == "choosing tokens":
            raise KeyboardInterrupt

    file, said = tmp_path / "notes.txt", []
    for name, text, word in (
        ("notes.txt", "one two three " * 40, None),
        ("notes.txt", "four five six " * 40, "other options: a new one begins"),
        ("copy.txt", "four five six " * 40, "resuming the run"),
    ):
        file = file.with_name(name)
        file.write_text(text)
        request = replace(request_, prompts=(file,))
        said.clear()
        with pytest.raises(KeyboardInterrupt):
            make(request, StageContext(on_progress=stop, on_message=said.append))
        assert [word in line for line in said] == ([True] if word else [])
    header = read_header(Path(request_.target))
    dataset = Dataset(DatasetTarget(hash_file(header.path), "target", header.n_embd))
    with Model(header.path) as model:
        read = b"".join(model.piece(token) for text in dataset.texts() for token in text.tokens.tolist())
    assert b"one two" in read and b"four five" in read


@pytest.mark.parametrize("room_for", [0, 1])
def test_a_full_disk_leaves_the_draft_that_is_there(request_, tmp_path, monkeypatch, room_for):
    """With its record, and the hash that models.toml has of it."""
    made = make(replace(request_, name="mine", force=True))
    files = made.path, record_file(made.path), user_models_file()
    before = [file.read_bytes() for file in files]
    fsync, n_synced = os.fsync, 0

    def fill(handle):
        nonlocal n_synced
        if (n_synced := n_synced + 1) > room_for:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fsync(handle)

    (other := tmp_path / "other.gguf").write_bytes(b"GGUF other")
    monkeypatch.setattr(os, "fsync", fill)
    store = DraftStore("target", made.kept.target_sha256)
    with pytest.raises(OSError, match="No space"):
        store.store(other, msgspec.structs.replace(made.kept, hours=9.0))
    assert [file.read_bytes() for file in files] == before
    monkeypatch.setattr(os, "fsync", fsync)
    store.store(other, msgspec.structs.replace(made.kept, hours=9.0))
    assert (read_record(made.path).hours, load_registry().get("mine").sha256) == (9.0, hash_file(made.path))


def test_names(request_, speeds, tmp_path, tiny_path):
    speeds["head-q8_0"] = 1.5
    request = replace(request_, name="mine", force=True)
    first = make(request)
    assert (first.kept.name, first.path) == ("mine", tmp_path / "models" / "mine.gguf")
    with pytest.raises(UsageError, match="name mine: a draft of that name exists already"):
        make(replace(request, force=False))
    speeds["mine"], speeds["head-q8_0"] = 1.2, 1.3
    again = make(replace(request, types=("f16",)))
    assert again.before.gains.mean == pytest.approx(1.2)
    assert again.kept.name == "mine"
    assert read_record(first.path) == again.kept, "not what was measured of the one before"
    assert user_models_file().read_text().count("[models.") == 1
    for name, problem in (
        ("qwen2.5-coder-0.5b-q4_0", "a model of that name exists already"),
        ("../mine", "not a usable name"),
    ):
        with pytest.raises(UsageError, match=problem):
            make(replace(request, name=name))


def test_removing(request_, speeds, tiny_path, tmp_path):
    speeds["head-q8_0"] = 1.5
    made = make(replace(request_, name="mine"))
    record, gone = remove_draft("mine")
    assert record == made.kept
    assert gone == [made.path, record_file(made.path)]
    assert not any(path.exists() for path in gone)
    assert choose_models(str(tiny_path), None) == (str(tiny_path), None)
    folder = FORGE.path() / record.target_sha256[:16]
    n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert delete_dataset(record.target_name, record.target_sha256) == (folder, n_bytes)
    assert not folder.exists()
    assert delete_dataset(record.target_name, record.target_sha256) == (None, 0)
    with pytest.raises(UsageError, match="no draft that was made here is called 'mine'"):
        remove_draft("mine")


def test_a_draft_whose_name_was_removed_is_still_found_by_its_file(request_, speeds):
    speeds["head-q8_0"] = 1.5
    made = make(replace(request_, name="mine"))
    remove_local("mine")
    assert remove_draft("mine") == (made.kept, [made.path, record_file(made.path)])
    assert not made.path.exists()
    with pytest.raises(UsageError, match="no draft that was made here is called 'mine'"):
        remove_draft("mine")


def test_a_damaged_record_can_be_removed(request_, speeds):
    speeds["head-q8_0"] = 1.5
    made = make(replace(request_, name="mine"))
    record_file(made.path).write_text("{")
    record, gone = remove_draft("mine")
    assert record is None
    assert len(gone) == 2


def test_what_cannot_be_made(request_, tmp_path, monkeypatch):
    (tmp_path / "text.gguf").write_text("some text")

    for changed, problem in (
        ({"start": str(tmp_path / "none.gguf")}, "no such file"),
        ({"keep": 100}, "keep 100: at least 260 tokens stay"),
        ({"target": "no-such-model"}, "no model is called"),
        ({"target": str(tmp_path / "text.gguf")}, "not a GGUF model but a text file"),
    ):
        with pytest.raises(EdgespecError, match=problem):
            make(replace(request_, **changed))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    with pytest.raises(EdgespecError, match="no disk space for"):
        make(request_)
    assert [name for name in left(tmp_path / "models") if not name.endswith(".lock")] == []


def test_too_little_memory_to_train(request_, monkeypatch):
    monkeypatch.setattr(MakeRun, "train", REAL_TRAIN)
    monkeypatch.setattr(make_module, "available_bytes", lambda: 100 << 20)
    with pytest.raises(EdgespecError, match=r"not enough memory to train: about 1\.07 GB"):
        make(request_)


def test_one_process_at_a_time(request_):
    def again(stage, _share, detail):
        if stage == "writing":
            make(request_)

    with pytest.raises(EdgespecError, match="another process makes drafts for target"):
        make(request_, StageContext(on_progress=again))


def test_how_much_is_written_for_a_training():
    for hours, wanted in ((2.0, 400_000), (0.01, 20_000), (100.0, 1_000_000)):
        assert DraftRequest(target="x", hours=hours).default_tokens == wanted
    assert DraftRequest(target="x", tokens=900_000).default_tokens == 300_000
