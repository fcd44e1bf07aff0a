"""Accuracy of a comparison's targets: their groups, what is measured and kept. In processes, as in use."""

from __future__ import annotations

import json
import operator
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import Engine
from edgespec.apps.bench.accuracy import Problem, TargetAccuracy, arithmetic, groups, solve
from edgespec.apps.bench.runs import Cell, Run
from edgespec.apps.bench.variants import parse_variants
from edgespec.llama.kernels import STOCK
from edgespec.llama.quantize import quantize
from edgespec.models.quantizations import ModelFile
from tiny_gguf import write_tiny_gguf

TEXT = "the cat and the other dog ran in the rain; on and on it went, as the sun was out. " * 20
N_TOKENS = 600  # a window and a rest

RUN = Run("a", "words", "plain", 0, prompt_tokens=5, tokens=2, total_s=1.0, ttft_s=0.5, prefill_s=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def f32(folder) -> ModelFile:
    return ModelFile("net-f32", write_tiny_gguf(folder / "net-f32.gguf", n_ctx=1024, seed=3))


@pytest.fixture(scope="module")
def q8(f32, folder) -> ModelFile:
    quantize(f32.path, folder / "net-q8_0.gguf", "q8_0")
    return ModelFile("net-q8_0", folder / "net-q8_0.gguf", made_from="net-f32")


@pytest.fixture(scope="module")
def q4(f32, folder) -> ModelFile:
    quantize(f32.path, folder / "net-q4_0.gguf", "q4_0")
    return ModelFile("net-q4_0", folder / "net-q4_0.gguf")


class Measured:
    """A measurement, and what it told."""

    def __init__(self, folder: Path, *files: ModelFile) -> None:
        self.progress: list[tuple[str, int, int]] = []
        self.messages: list[str] = []
        self.targets = TargetAccuracy(
            folder,
            files,
            {file.name: file.facts() for file in files},
            "off",
            1,
            on_progress=lambda *what: self.progress.append(what),
            on_message=self.messages.append,
        )


def spoil(path: Path) -> None:
    """Make a model's weights nonsense, and leave its header and its size as they are."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2))


# ---- groups ----


def test_the_largest_that_was_not_made_here_comes_first(f32, q8, q4):
    def names(*files):
        facts = {file.name: file.facts() for file in files}
        return [[file.name for file in group] for group in groups(files, facts)]

    assert names(q4, q8, f32) == [["net-f32", "net-q4_0", "net-q8_0"]]
    assert names(q8, q4) == [["net-q4_0", "net-q8_0"]]
    assert names(q8, replace(q4, made_from="net-f32")) == [["net-q8_0", "net-q4_0"]]


def test_another_model_has_a_group_of_its_own(f32, q4, tmp_path):
    tuned = ModelFile("tuned", write_tiny_gguf(tmp_path / "tuned.gguf", n_ctx=1024, seed=4))
    small = ModelFile("small", write_tiny_gguf(tmp_path / "small.gguf", n_layer=1, name="tiny 3"))
    files = (q4, tuned, small, f32)
    facts = {file.name: file.facts() for file in files}
    assert groups(files, facts) == [[f32, q4], [tuned], [small]]


# ---- on a text ----


def test_texts(f32, q8, q4, tmp_path):
    run = Measured(tmp_path, q4, q8, f32)
    found = run.targets.texts(TEXT, N_TOKENS)
    assert run.messages == []
    assert found.keys() == {"net-f32", "net-q8_0", "net-q4_0"}
    best, fine, coarse = (found[name] for name in ("net-f32", "net-q8_0", "net-q4_0"))
    assert {one.reference for one in found.values()} == {"net-f32"}
    assert (best.kl, best.kl_error, best.top1) == (None, None, None)
    assert 0 < fine.kl < coarse.kl
    assert fine.kl_error > 0
    assert coarse.top1 <= fine.top1 <= 1
    assert {(one.kernels, one.n_tokens) for one in found.values()} == {(STOCK, N_TOKENS - 2)}
    assert {one.passed for one in found.values()} == {None}
    assert run.progress[-1][1:] == (N_TOKENS, N_TOKENS)
    assert [file.name for file in tmp_path.iterdir()] == ["accuracy-net-f32+kernels-off.json"]


def test_what_was_measured_is_kept(f32, q4, tmp_path):
    file = ModelFile("net-q4_0", tmp_path / "net-q4_0.gguf")
    file.path.write_bytes(q4.path.read_bytes())
    first = Measured(tmp_path, f32, file)
    found = first.targets.texts(TEXT, N_TOKENS)
    spoil(file.path)
    again = Measured(tmp_path, f32, file)
    again.targets = replace(again.targets, facts=first.targets.facts)  # as if it were the same file still
    assert again.targets.texts(TEXT, N_TOKENS) == found
    assert (again.progress, again.messages) == ([], [])

    for text, n_tokens in ((f"a{TEXT}", N_TOKENS), (TEXT, N_TOKENS + 1)):
        asked = again.targets.texts(text, n_tokens)
        assert asked.keys() == {"net-f32"}, "the other one is nonsense now"
        assert "net-q4_0: llama.cpp cannot load it" in again.messages.pop()
    assert again.progress
    # What was kept of the first text is that of a whole group still: half of one is not kept.
    assert again.targets.texts(TEXT, N_TOKENS) == found


@pytest.mark.parametrize("data", [b"", b"[", b"[]", b'["key", {}]', b"\xff", b'{"a": 1}'])
def test_what_is_kept_and_damaged_is_measured_again(data, f32, tmp_path):
    kept = tmp_path / "accuracy-net-f32+kernels-off.json"
    kept.write_bytes(data)
    run = Measured(tmp_path, f32)
    assert run.targets.texts(TEXT, N_TOKENS).keys() == {"net-f32"}
    assert run.progress
    assert json.loads(kept.read_text())[1].keys() == {"net-f32"}


def test_a_file_of_another_name_or_content_is_measured_again(f32, q4, tmp_path):
    Measured(tmp_path, f32, q4).targets.texts(TEXT, N_TOKENS)
    renamed = Measured(tmp_path, f32, replace(q4, name="other"))
    assert renamed.targets.texts(TEXT, N_TOKENS).keys() == {"net-f32", "other"}
    assert renamed.progress


def test_where_the_best_cannot_be_read_the_next_is_the_reference(f32, q8, q4, tmp_path):
    best = ModelFile("best", tmp_path / "best.gguf")
    best.path.write_bytes(f32.path.read_bytes() + bytes(4096))
    spoil(best.path)
    run = Measured(tmp_path, best, f32, replace(q8, made_from=""))
    found = run.targets.texts(TEXT, N_TOKENS)
    assert {name: one.reference for name, one in found.items()} == {
        "net-f32": "net-f32",
        "net-q8_0": "net-f32",
    }
    assert found["net-f32"].kl is None
    assert found["net-q8_0"].kl > 0
    (message,) = run.messages
    assert message.startswith("accuracy of best: best: llama.cpp cannot load it")


def test_what_is_no_model_is_left_out(f32, tmp_path):
    cut = ModelFile("cut", tmp_path / "cut.gguf")
    cut.path.write_bytes(f32.path.read_bytes()[:-1000])
    run = Measured(tmp_path, cut, f32)
    assert run.targets.texts(TEXT, N_TOKENS).keys() == {"net-f32"}
    (message,) = run.messages
    assert message.startswith("accuracy of cut: cut: ")


def test_a_text_that_is_too_short(f32, tmp_path):
    run = Measured(tmp_path, f32)
    assert run.targets.texts("too short", N_TOKENS) == {}
    (message,) = run.messages
    assert "it must have at least 512" in message
    assert list(tmp_path.iterdir()) == []


# ---- problems ----


def test_problems_are_the_same_everywhere_and_their_answers_right():
    problems = arithmetic(40)
    assert arithmetic(12) == problems[:12]
    assert len({problem.prompt for problem in problems}) == 40
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for problem in problems:
        *examples, question = problem.prompt.splitlines()
        for line in (*examples, f"{question} {problem.answer}"):
            words = line.split()
            value = int(words[0])
            for sign, number in zip(words[1:-2:2], words[2:-2:2], strict=True):
                value = signs[sign](value, int(number))
            assert words[-2:] == ["=", str(value)], line


def test_an_answer_is_right_character_by_character(f32):
    with Engine(f32.path, drafter="none", n_threads=1, kernels="off", profile=False) as engine:
        (said,) = solve(engine, [Problem("the cat", "?")])
        known = Problem("the cat", said.text)
        answers = list(solve(engine, [known, replace(known, answer=f"{said.text}0")]))
    assert said.tokens > 0
    assert "\n" not in said.text
    assert [answer.right for answer in answers] == [True, False]


def test_problems_of_targets(f32, q4, tmp_path):
    run = Measured(tmp_path, f32, q4)
    accuracy = run.targets.texts(TEXT, N_TOKENS)
    run.progress.clear()
    found = run.targets.on_problems(accuracy, arithmetic(2))
    assert run.messages == []
    assert {name: (one.passed, one.n_problems) for name, one in found.items()} == {
        "net-f32": (0, 2),
        "net-q4_0": (0, 2),
    }
    assert found["net-q4_0"].kl == accuracy["net-q4_0"].kl
    assert run.progress == [
        (f"problems by {name}", n, 2) for name in ("net-f32", "net-q4_0") for n in (0, 1, 2)
    ]
    _, kept = json.loads((tmp_path / "problems-net-f32+kernels-off.json").read_text())
    assert [one["right"] for one in kept] == [False, False]

    run.progress.clear()
    assert run.targets.on_problems(accuracy, arithmetic(2)) == found
    assert run.progress == [], "it is kept"
    run.targets.on_problems(accuracy, arithmetic(3))
    assert {what for what, *_ in run.progress} == {"problems by net-f32", "problems by net-q4_0"}


def test_problems_of_variants_that_are_not_exact(f32, q4, tmp_path):
    run = Measured(tmp_path, f32, q4)
    cell = Cell("net-f32", "net-q4_0", STOCK, runs=(RUN,))
    alone, never = parse_variants("cascade@1,cascade@0")
    found = run.targets.variants(arithmetic(2), [cell, Cell("net-f32", None, STOCK)], (alone, never), [q4])
    assert [(one.variant, one.n_problems, one.target_share) for one in found] == [
        ("cascade@1", 2, 1.0),
        ("cascade@0", 2, 0.0),
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"problems-net-f32+net-q4_0+cascade@{t}+kernels-off.json" for t in (0, 1)
    ]


def test_problems_of_a_model_that_cannot_run(f32, tmp_path):
    file = ModelFile("net-f32", tmp_path / "net-f32.gguf")
    file.path.write_bytes(f32.path.read_bytes())
    run = Measured(tmp_path, file)
    accuracy = run.targets.texts(TEXT, N_TOKENS)
    file.path.write_bytes(b"GGUF")
    assert run.targets.on_problems(accuracy, arithmetic(2)) == accuracy
    (message,) = run.messages
    assert message.startswith("problems by net-f32: ")
    assert "\n" not in message
    assert not (tmp_path / "problems-net-f32+kernels-off.json").exists()
