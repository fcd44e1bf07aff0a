"""The texts that drafts are trained on, on disk."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.apps.forge.dataset import (
    BUILT_IN,
    READ,
    TEXTS_PER_SHARD,
    Dataset,
    DatasetTarget,
    TrainingText,
    is_held_out,
    key_of,
)
from edgespec.errors import EdgespecError

TARGET = DatasetTarget("ab" * 32, "a target", n_embd=8)
PLENTY = 1 << 24


def a_text(i: int, length: int = 12, source: str = BUILT_IN) -> TrainingText:
    rng = np.random.default_rng(i)
    return TrainingText(
        tokens=rng.integers(0, 50, length).astype(np.int32),
        n_prompt=5,
        first=2,
        features=rng.normal(size=(length - 3, TARGET.n_embd)).astype(np.float16),
        temperature=math.nan if source == READ else 0.8,
        source=source,
        key=key_of(str(i).encode()),
    )


def same(a: TrainingText, b: TrainingText) -> bool:
    plain = [(t.n_prompt, t.first, t.source, t.key, np.float32(t.temperature).tobytes()) for t in (a, b)]
    arrays = np.array_equal(a.tokens, b.tokens) and np.array_equal(a.features, b.features)
    return arrays and plain[0] == plain[1]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def dataset(tmp_path: Path, lines: list[str]) -> Dataset:
    return Dataset(TARGET, tmp_path / "data", on_message=lines.append)


def fill(dataset: Dataset, texts: list[TrainingText], budget: int = PLENTY) -> list[bool]:
    with dataset.writer(budget) as writer:
        return [writer.append(text) for text in texts]


def test_what_is_written_is_read_again(dataset: Dataset, tmp_path: Path) -> None:
    texts = [a_text(i, 8 + i % 20, READ if i % 5 == 0 else BUILT_IN) for i in range(TEXTS_PER_SHARD + 10)]
    assert list(dataset.texts()) == []
    assert all(fill(dataset, texts))
    assert [path.name for path in dataset.shards()] == ["00001.npz", "00002.npz"]
    for one in (dataset, Dataset(TARGET, dataset.folder)):
        assert all(same(a, b) for a, b in zip(texts, one.texts(), strict=True))
    assert dataset.n_answer_tokens() == sum(len(text.tokens) - 5 for text in texts)
    assert dataset.n_bytes() == sum(path.stat().st_size for path in dataset.shards())


def test_the_format_is_numpys(dataset: Dataset) -> None:
    texts = [a_text(1), a_text(2, 9)]
    fill(dataset, texts)
    with np.load(dataset.shards()[0], allow_pickle=False) as shard:
        assert {name: str(shard[name].dtype) for name in shard} == {
            "tokens": "int32", "length": "int32", "n_prompt": "int32", "first": "int32",
            "features": "float16", "temperature": "float32", "source": "<U15", "key": "uint64",
        }  # fmt: skip
        assert shard["length"].tolist() == [12, 9]
        assert shard["features"].shape == ((12 - 3) + (9 - 3), TARGET.n_embd)
        assert np.array_equal(shard["features"], np.concatenate([text.features for text in texts]))
    document = json.loads((dataset.folder / "dataset.json").read_text())
    assert document["sha256"] == TARGET.sha256 and document["budget"] == PLENTY


def test_held_out_texts_are_told_by_their_prompts(dataset: Dataset) -> None:
    texts = [a_text(i) for i in range(200)]
    fill(dataset, texts)
    apart = [[text.key for text in dataset.texts(held_out=which)] for which in (True, False)]
    assert all(map(is_held_out, apart[0])) and not any(map(is_held_out, apart[1]))
    assert sorted(apart[0] + apart[1]) == sorted(text.key for text in texts)
    assert 0 < len(apart[0]) < 40
    # These never change: a draft trained before would otherwise be judged by what it learnt.
    assert [i for i in range(100) if is_held_out(key_of(str(i).encode()))] == [39, 51, 55]


def test_the_budget_is_kept_and_a_larger_one_goes_on(dataset: Dataset) -> None:
    texts = [a_text(i, 400) for i in range(40)]
    budget = 20 * texts[0].features.nbytes
    added = fill(dataset, texts, budget)
    n = sum(added)
    assert added == [True] * n + [False] * (40 - n)
    assert 10 < n < 20 and dataset.n_bytes() <= budget
    with dataset.writer(budget) as writer:
        assert not writer.has_room(texts[0].features.nbytes)
    assert all(fill(dataset, texts[n:]))
    assert all(same(a, b) for a, b in zip(texts, dataset.texts(), strict=True))


def test_two_processes_do_not_write_at_once(dataset: Dataset) -> None:
    with dataset.writer(PLENTY) as writer:
        writer.append(a_text(1))
        with pytest.raises(EdgespecError, match="another process writes the data of a target"):
            fill(Dataset(TARGET, dataset.folder), [a_text(2)])
        writer.flush()
        assert len(list(Dataset(TARGET, dataset.folder).texts())) == 1  # but others may read
    fill(Dataset(TARGET, dataset.folder), [a_text(2)])
    assert len(list(dataset.texts())) == 2


def test_half_a_file_of_a_killed_process_is_removed(dataset: Dataset) -> None:
    fill(dataset, [a_text(1)])
    half = dataset.folder / ".edgespec-1-2.tmp"
    half.write_bytes(dataset.shards()[0].read_bytes()[:100])
    assert len(list(dataset.texts())) == 1
    fill(dataset, [a_text(2)])
    assert not half.exists()
    assert len(list(dataset.texts())) == 2


def test_what_was_added_is_kept_when_an_error_ends_the_writing(dataset: Dataset) -> None:
    with pytest.raises(KeyboardInterrupt), dataset.writer(PLENTY) as writer:
        writer.append(a_text(1))
        raise KeyboardInterrupt
    assert len(list(dataset.texts())) == 1


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[len(data) // 2] ^= 4
    elif how == "its end":
        del data[-200:]
    elif how == "everything":
        data[:] = b"not a zip at all" * 20
    elif how == "empty":
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["a bit", "its end", "everything", "empty", "missing", "packed"])
def test_a_damaged_shard_is_set_aside_and_the_rest_used(dataset: Dataset, lines: list[str], how: str) -> None:
    for i in range(3):
        fill(dataset, [a_text(i)])
    path = dataset.shards()[1]
    if how == "missing":
        with np.load(path) as shard:
            np.savez(path, **{name: shard[name] for name in shard if name != "key"})
    elif how == "packed":
        with np.load(path) as shard:
            np.savez_compressed(path, **{name: shard[name] for name in shard})
    else:
        damage(path, how)
    dataset = Dataset(TARGET, dataset.folder, on_message=lines.append)
    for _ in range(2):
        assert all(same(a, b) for a, b in zip([a_text(0), a_text(2)], dataset.texts(), strict=True))
    assert len(lines) == 1
    assert "00002.npz: damaged (" in lines[0] and "set aside as 00002.npz.set-aside, the rest" in lines[0]
    fill(dataset, [a_text(5)])  # no number is given twice
    assert [path.name for path in dataset.shards()] == ["00001.npz", "00003.npz", "00004.npz"]


def test_the_data_of_another_target_is_refused(dataset: Dataset) -> None:
    fill(dataset, [a_text(1)])
    other = replace(TARGET, sha256="cd" * 32, name="another")
    with pytest.raises(
        EdgespecError, match=r"the data of another target, a target .SHA-256 abababababababab.,"
    ):
        Dataset(other, dataset.folder)
    assert other.folder != TARGET.folder


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format": "else"}', b"\xff"])
def test_a_damaged_description_is_one_line(dataset: Dataset, content: bytes) -> None:
    fill(dataset, [a_text(1)])
    (dataset.folder / "dataset.json").write_bytes(content)
    with pytest.raises(EdgespecError, match=r"dataset\.json: .*; remove"):
        Dataset(TARGET, dataset.folder)


def test_a_budget_that_the_disk_has_no_room_for_is_refused(dataset: Dataset) -> None:
    with pytest.raises(
        EdgespecError, match=r"no disk space for the data of a target: .* choose a smaller budget"
    ):
        fill(dataset, [a_text(1)], 1 << 60)
    assert dataset.shards() == []


def test_a_disk_that_fails_is_one_line_and_loses_nothing(dataset: Dataset) -> None:
    fill(dataset, [a_text(1)])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(EdgespecError, match="cannot write the data: "):
            fill(dataset, [a_text(2, 4000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [text.key for text in dataset.texts()] == [a_text(1).key]
    assert sorted(path.name for path in dataset.folder.iterdir()) == [".lock", "00001.npz", "dataset.json"]
