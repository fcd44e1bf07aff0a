"""What is kept to make drafts from, and deleting what of it came from the user."""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import pytest

from edgespec.apps.forge import dataset as room
from edgespec.apps.forge.dataset import (
    BUILT_IN,
    FROM_FILE,
    FROM_HISTORY,
    READ,
    Dataset,
    DatasetTarget,
    TrainingText,
)
from edgespec.apps.forge.draft_store import DraftStore, delete_user_texts, find_stored
from edgespec.errors import EdgespecError

TARGET = DatasetTarget("ab" * 32, "my-target", n_embd=8)


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(room, "TEXTS_PER_SHARD", 2)


_KEYS = count(1)


def a_text(source, length=9, n_prompt=4, first=1):
    number = next(_KEYS)
    return TrainingText(
        tokens=np.full(length, number % 100, np.int32),
        n_prompt=n_prompt,
        first=first,
        features=np.full((length - 1 - first, TARGET.n_embd), number, np.float16),
        temperature=math.nan if source == READ else 0.5,
        source=source,
        key=number,
    )


def stored(*sources, target=TARGET):
    """A dataset of texts of these sources and different lengths, two in a shard; and the texts."""
    dataset = Dataset(target)
    texts = [a_text(source, length=9 + i, first=i % 3) for i, source in enumerate(sources)]
    with dataset.writer(1 << 20) as writer:
        assert all(map(writer.append, texts))
    return dataset, texts


def same(one, other):
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.features, other.features)
        and (one.n_prompt, one.first, one.source, one.key)
        == (other.n_prompt, other.first, other.source, other.key)
    )


def test_nothing():
    assert find_stored() == []


def test_what_is_kept(tmp_path):
    dataset, _ = stored(BUILT_IN, FROM_HISTORY, READ, FROM_FILE, BUILT_IN)
    checkpoint = dataset.folder / "training/0001.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"x" * 5000)
    (kept,) = find_stored()
    assert (kept.target, kept.target_sha256, kept.path) == ("my-target", "ab" * 32, dataset.folder)
    assert (kept.texts, kept.own_texts) == (5, 3)
    assert kept.data_bytes == dataset.n_bytes()
    assert 5000 <= kept.checkpoint_bytes < 6000
    assert kept.damaged == ()


def test_own_texts_go_and_the_others_stay_as_they_were():
    dataset, texts = stored(
        BUILT_IN, FROM_HISTORY, READ, BUILT_IN, FROM_FILE, FROM_HISTORY, BUILT_IN, BUILT_IN
    )
    untouched = dataset.shards()[-1].stat()
    (kept,) = find_stored()
    assert delete_user_texts(kept) == 4
    (after,) = find_stored()
    assert (after.texts, after.own_texts) == (4, 0)
    assert after.data_bytes < kept.data_bytes
    rest = [text for text in texts if text.source == BUILT_IN]
    assert all(map(same, Dataset(TARGET).texts(), rest))
    assert len(dataset.shards()) == 3, "one had nothing else"
    assert dataset.shards()[-1].stat().st_mtime_ns == untouched.st_mtime_ns
    assert delete_user_texts(after) == 0


def test_new_texts_after_that():
    stored(BUILT_IN, READ, READ, READ)
    (kept,) = find_stored()
    assert delete_user_texts(kept) == 3
    _, texts = stored(BUILT_IN, FROM_HISTORY)
    assert same([*Dataset(TARGET).texts()][-1], texts[-1])
    assert find_stored()[0].texts == 3


def test_files_that_cannot_be_read_are_shown_and_go():
    dataset, _ = stored(BUILT_IN, BUILT_IN, BUILT_IN)
    first, second = dataset.shards()
    first.write_bytes(b"damaged")
    aside = second.with_name(f"{second.name}.set-aside")
    aside.write_bytes(b"of an earlier day")
    (kept,) = find_stored()
    assert kept.damaged == (first, aside)
    assert (kept.texts, kept.own_texts) == (1, 0)
    assert delete_user_texts(kept) == 0
    assert dataset.shards() == [second]
    assert not aside.exists()


def test_a_folder_without_its_description():
    dataset, _ = stored(READ)
    (dataset.folder / "dataset.json").write_text("{")
    (kept,) = find_stored()
    assert (kept.target, kept.target_sha256, kept.own_texts) == (None, "ab" * 8, 1)
    assert delete_user_texts(kept) == 1


def test_targets_by_name():
    stored(BUILT_IN)
    stored(BUILT_IN, target=DatasetTarget("cd" * 32, "a-target", 8))
    assert [one.target for one in find_stored()] == ["a-target", "my-target"]


def test_beside_a_process_that_makes_a_draft():
    stored(READ)
    (kept,) = find_stored()
    with (
        DraftStore("my-target", TARGET.sha256).locked_folder(),
        pytest.raises(EdgespecError, match="another process makes drafts for my-target") as raised,
    ):
        delete_user_texts(kept)
    assert "\n" not in str(raised.value)
    assert find_stored()[0].own_texts == 1


def test_a_disk_that_fails(monkeypatch):
    dataset, texts = stored(BUILT_IN, READ)
    (kept,) = find_stored()

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(EdgespecError, match="not all could be deleted: No space left on device"):
        delete_user_texts(kept)
    assert all(map(same, Dataset(TARGET).texts(), texts))
    assert {path.name for path in dataset.folder.iterdir()} == {"00001.npz", "dataset.json", ".lock"}
