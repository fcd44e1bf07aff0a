"""Texts of a dataset leave as a small file, and another dataset of the same target takes them in."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.apps.forge.data_stage import DataRequest, write_texts
from edgespec.apps.forge.dataset import BUILT_IN, FROM_FILE, READ, Dataset, DatasetTarget, TrainingText
from edgespec.apps.forge.exported_texts import ExportedTexts, TextCount, export_texts, import_texts
from edgespec.apps.forge.progress import StageContext
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt, built_in
from edgespec.apps.forge.writing import TargetWriter, WritingSettings
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.weights import Model

PLENTY = 1 << 26
SMALL = WritingSettings(n_texts=4, n_predict=12, longest_prompt=300, n_pass=64)


@pytest.fixture
def target(tiny_target: Model) -> DatasetTarget:
    return DatasetTarget("ab" * 32, "tiny", tiny_target.n_embd, tiny_target.n_vocab)


@pytest.fixture
def dataset(tmp_path: Path, tiny_target: Model, target: DatasetTarget) -> Dataset:
    """Five answers to built-in prompts, one to a file's, and a text that was only read."""
    written = Dataset(target, tmp_path / "written")
    own = [TextPrompt(FROM_FILE, ("Mine.",)), TokenPrompt(READ, tuple(range(60, 90)), 10)]
    with TargetWriter(tiny_target, SMALL, n_threads=1) as writing, written.writer(PLENTY) as writer:
        writing.fill(writer, [*islice(built_in(), 5), *own], until=1 << 30)
    return written


def take_in(file: Path, model: Model, target: DatasetTarget, folder: Path, budget: int = PLENTY) -> TextCount:
    exported = ExportedTexts(file, target, is_named=False)
    return import_texts(model, Dataset(target, folder), exported, budget, StageContext(), n_threads=1)


def facts(text: TrainingText) -> tuple[Any, ...]:
    temperature = "read" if math.isnan(text.temperature) else text.temperature
    return text.tokens.tolist(), text.n_prompt, temperature, text.source, text.key


def changed(file: Path, **arrays: Any) -> Path:
    """Write the arrays of an export again, those changed; None: without it."""
    with np.load(file) as stored:
        found = {name: array for name, array in {**stored, **arrays}.items() if array is not None}
    np.savez_compressed(file, **found)
    return file


@pytest.fixture
def file(dataset: Dataset, tmp_path: Path) -> Path:
    export_texts(dataset, tmp_path / "texts.npz", own=True)
    return tmp_path / "texts.npz"


def with_token(token: int) -> dict[str, Any]:
    return {"tokens": np.array([5, token, 5], np.int32), "length": np.array([3], np.int32)} | {
        "n_prompt": np.array([1], np.int32),
        "temperature": np.array([0.0], np.float32),
        "source": np.array([BUILT_IN]),
        "key": np.array([1], np.uint64),
    }


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An export of three tokens."""
    about = {"target_sha256": np.array("ab" * 32), "target_name": np.array("tiny")}
    np.savez_compressed(tmp_path / "small.npz", **with_token(7), **about)
    return tmp_path / "small.npz"


SOME = DatasetTarget("ab" * 32, "tiny", 8, 100)


def test_what_was_exported_is_there_after_an_import(
    dataset: Dataset, file: Path, tmp_path: Path, tiny_target: Model, target: DatasetTarget
) -> None:
    texts = {text.key: text for text in dataset.texts()}
    assert len(texts) == 7
    count = take_in(file, tiny_target, target, tmp_path / "read")
    n_answer_tokens = sum(len(text.tokens) - text.n_prompt for text in texts.values())
    assert (count.n_texts, count.n_tokens, count.n_left_out) == (7, n_answer_tokens, 0)
    for text in Dataset(target, tmp_path / "read").texts():
        before = texts.pop(text.key)
        assert facts(text) == facts(before)
        n = len(text.tokens) - 1 - max(text.first, before.first)
        assert n > 0
        assert np.allclose(text.features[-n:], before.features[-n:], rtol=2e-3, atol=2e-3)
    assert not texts
    again = take_in(file, tiny_target, target, tmp_path / "read")
    assert (again.n_texts, again.n_left_out) == (0, 7)


def test_the_users_texts_stay_unless_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    count = export_texts(dataset, tmp_path / "some.npz")
    assert (count.n_texts, count.n_left_out) == (5, 2)
    with np.load(tmp_path / "some.npz") as arrays:
        assert set(arrays["source"].tolist()) == {BUILT_IN}
        assert len(arrays["tokens"]) == count.n_tokens == arrays["length"].sum()


def test_no_texts_no_export(tmp_path: Path, target: DatasetTarget) -> None:
    with pytest.raises(EdgespecError, match="tiny has written no texts here"):
        export_texts(Dataset(target, tmp_path / "none"), tmp_path / "texts.npz")
    assert not (tmp_path / "texts.npz").exists()


def test_keys_of_built_in_prompts_are_found_again(
    dataset: Dataset, file: Path, tiny_target: Model, target: DatasetTarget
) -> None:
    exported = ExportedTexts(changed(file, key=None), target, is_named=False)
    keys = {text.tokens: text.key for text in exported.texts(tiny_target)}
    for text in dataset.texts():
        tokens = tuple(text.tokens.tolist())
        own = TokenPrompt(text.source, tokens, text.n_prompt).key
        assert keys[tokens] == (text.key if text.source == BUILT_IN else own)


def test_a_target_with_imported_texts_need_not_write(
    dataset: Dataset, file: Path, tmp_path: Path, tiny_target: Model, target: DatasetTarget
) -> None:
    count = take_in(file, tiny_target, target, tmp_path / "read")
    there = Dataset(target, tmp_path / "read")
    write_texts(tiny_target, there, DataRequest(tokens=40), count.n_tokens, 1, StageContext())
    assert len(list(there.texts())) == 7
    write_texts(tiny_target, there, DataRequest(tokens=40), count.n_tokens + 1, 1, StageContext())
    assert len(list(there.texts())) > 7


def test_a_budget_too_small_keeps_what_fits(
    file: Path, tmp_path: Path, tiny_target: Model, target: DatasetTarget
) -> None:
    with pytest.raises(EdgespecError, match=r"of 7 texts were read, then the budget of .* is used up"):
        take_in(file, tiny_target, target, tmp_path / "read", budget=30_000)
    n_read = len(list(Dataset(target, tmp_path / "read").texts()))
    assert 0 < n_read < 7
    assert take_in(file, tiny_target, target, tmp_path / "read").n_texts == 7 - n_read


def test_one_of_another_target_and_one_that_does_not_say(small: Path) -> None:
    other = DatasetTarget("cd" * 32, "another", 8, 100)
    with pytest.raises(UsageError, match=r"texts of another target, tiny \(SHA-256 abab.*\), not of another"):
        ExportedTexts(small, other, is_named=True)
    changed(small, target_sha256=None)
    with pytest.raises(UsageError, match="does not say which model wrote it; name the target"):
        ExportedTexts(small, SOME, is_named=False)
    assert ExportedTexts(small, SOME, is_named=True).n_texts == 1


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (with_token(1 << 20), r"token 1048576, and the target's vocabulary has"),
        (with_token(-1), r"token -1, and"),
        ({"tokens": None}, "damaged, or no export of texts: it has no tokens"),
        ({"n_prompt": np.array([1, 1])}, "its arrays do not belong together"),
        (with_token(5) | {"n_prompt": np.array([3])}, "lengths that cannot be"),
        (with_token(5) | {"temperature": np.array([-1.0])}, "temperatures that cannot be"),
        (with_token(5) | {"source": np.array(["elsewhere"])}, "texts from 'elsewhere'"),
        (with_token(5) | {"length": np.array([3.0])}, "length of type float64"),
        (with_token(5) | {"source": np.array([{}])}, "truncated or damaged .*allow_pickle"),
    ],
)
def test_what_cannot_be_an_export(small: Path, arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refusal:
        ExportedTexts(changed(small, **arrays), SOME, is_named=True)
    assert str(small) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_truncated_file_and_other_files(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    for n in (len(whole) - 1, len(whole) // 2, 10):
        small.write_bytes(whole[:n])
        with pytest.raises(UsageError, match="truncated or damaged"):
            ExportedTexts(small, SOME, is_named=True)
    middle = len(whole) // 2
    small.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
    with pytest.raises(UsageError, match="truncated or damaged"):
        ExportedTexts(small, SOME, is_named=True)
    for other in (b"", b"hello", b"\x80\x04."):
        small.write_bytes(other)
        with pytest.raises(UsageError, match="no export"):
            ExportedTexts(small, SOME, is_named=True)
    with pytest.raises(UsageError, match="no such file"):
        ExportedTexts(tmp_path / "none.npz", SOME, is_named=True)
