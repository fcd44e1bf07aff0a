"""Accuracy of a comparison's targets: their groups, what is measured and kept. In processes, as in use."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import Engine
from edgespec.apps.bench.compare import LONGEST_ANSWER, NO_DRAFT, Comparison, TextTask, arithmetic, groups
from edgespec.apps.bench.measure import BenchSettings, generate
from edgespec.apps.bench.quantizations import ModelFile
from edgespec.apps.bench.runs import PLAIN_VARIANT, AccuracyScore, parse_variants
from edgespec.apps.bench.suites import Prompt, Suite
from edgespec.llama.kernels import STOCK
from edgespec.llama.quantize import quantize
from tiny_gguf import write_tiny_gguf

TEXT = "the cat and the other dog ran in the rain; on and on it went, as the sun was out. " * 20
N_TOKENS = 600  # a window and a rest

SUITE = Suite("mine", "", (Prompt("a", "words", "the cat and the other dog"),))


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


class Scored:
    """The scores of a group on a text, and what was told meanwhile."""

    def __init__(self, folder: Path, *files: ModelFile, text: str = TEXT, n_tokens: int = N_TOKENS) -> None:
        self.progress: list[tuple[str, int, int]] = []
        self.messages: list[str] = []
        (group,) = groups(files, self.messages.append)
        paths = {file.name: str(file.path) for file in group}
        task = TextTask(paths, text, n_tokens, "off", 1, str(folder))
        scores = task.scores(lambda *now: self.progress.append(now), self.messages.append)
        self.scores: dict[str, AccuracyScore] = {one.target: one for one in scores}


def spoil(path: Path) -> None:
    """Make a model's weights nonsense, and leave its header and its size as they are."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2))


# ---- groups ----


def test_the_largest_that_was_not_made_here_comes_first(f32, q8, q4):
    def names(*files):
        return [[file.name for file in group] for group in groups(files, print)]

    assert names(q4, q8, f32) == [["net-f32", "net-q4_0", "net-q8_0"]]
    assert names(q8, q4) == [["net-q4_0", "net-q8_0"]]
    assert names(q8, replace(q4, made_from="net-f32")) == [["net-q8_0", "net-q4_0"]]


def test_another_model_has_a_group_of_its_own(f32, q4, tmp_path):
    tuned = ModelFile("tuned", write_tiny_gguf(tmp_path / "tuned.gguf", n_ctx=1024, seed=4))
    small = ModelFile("small", write_tiny_gguf(tmp_path / "small.gguf", n_layer=1, name="tiny 3"))
    assert groups((q4, tuned, small, f32), print) == [[f32, q4], [tuned], [small]]


# ---- on a text ----


def test_texts(f32, q8, q4, tmp_path):
    run = Scored(tmp_path, q4, q8, f32)
    assert run.messages == []
    assert run.scores.keys() == {"net-f32", "net-q8_0", "net-q4_0"}
    best, fine, coarse = (run.scores[name] for name in ("net-f32", "net-q8_0", "net-q4_0"))
    assert {one.reference for one in run.scores.values()} == {"net-f32"}
    assert (best.kl, best.kl_error, best.top1) == (None, None, None)
    assert 0 < fine.kl < coarse.kl
    assert fine.kl_error > 0
    assert coarse.top1 <= fine.top1 <= 1
    assert {(one.kernels, one.n_tokens) for one in run.scores.values()} == {(STOCK, N_TOKENS - 2)}
    assert {one.passed for one in run.scores.values()} == {None}
    assert run.progress[-1][1:] == (N_TOKENS, N_TOKENS)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_was_measured_is_kept(f32, q4, tmp_path):
    found = Scored(tmp_path, f32, q4).scores
    again = Scored(tmp_path, f32, q4)
    assert (again.scores, again.progress) == (found, [])
    for changed in (
        Scored(tmp_path, f32, q4, text=f"a{TEXT}"),
        Scored(tmp_path, f32, q4, n_tokens=N_TOKENS + 1),
        Scored(tmp_path, f32, replace(q4, name="other")),
    ):
        assert changed.progress
        assert len(changed.scores) == 2
    assert Scored(tmp_path, f32, q4).progress == []


@pytest.mark.parametrize("data", [b"", b"[", b"[]", b'["key", {}]', b"\xff", b'{"a": 1}'])
def test_what_is_kept_and_damaged_is_measured_again(data, f32, tmp_path):
    found = Scored(tmp_path, f32).scores
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(data)
    run = Scored(tmp_path, f32)
    assert run.progress
    assert run.scores == found


def test_where_the_best_cannot_be_read_the_next_is_the_reference(f32, q8, tmp_path):
    best = ModelFile("best", tmp_path / "best.gguf")
    best.path.write_bytes(f32.path.read_bytes() + bytes(4096))
    spoil(best.path)
    run = Scored(tmp_path / "out", best, f32, replace(q8, made_from=""))
    assert {name: one.reference for name, one in run.scores.items()} == {
        "net-f32": "net-f32",
        "net-q8_0": "net-f32",
    }
    assert run.scores["net-f32"].kl is None
    assert run.scores["net-q8_0"].kl > 0
    (message,) = run.messages
    assert message.startswith("accuracy of best: best: llama.cpp cannot load it")
    assert not list((tmp_path / "out").iterdir()), "half of a group is not kept"


# ---- problems ----


def test_problems_are_the_same_everywhere_and_their_answers_right():
    problems = arithmetic(40)
    assert arithmetic(12) == problems[:12]
    assert len({problem.text for problem in problems}) == len({problem.id for problem in problems}) == 40
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for problem in problems:
        *examples, question = problem.text.splitlines()
        for line in (*examples, f"{question} {problem.answer}"):
            words = line.split()
            value = int(words[0])
            for sign, number in zip(words[1:-2:2], words[2:-2:2], strict=True):
                value = signs[sign](value, int(number))
            assert words[-2:] == ["=", str(value)], line


def test_an_answer_is_right_character_by_character(f32):
    settings = BenchSettings((), LONGEST_ANSWER)
    with Engine(f32.path, drafter="none", n_threads=1, kernels="off", profile=False) as engine:
        said = engine.generate(
            "the cat", chat=False, stop=("\n",), n_predict=LONGEST_ANSWER, params=settings.params
        )
        answers = [said.text.strip(), f"{said.text.strip()}0"]
        prompts = [Prompt("a", "words", "the cat", answer=answer) for answer in answers]
        runs = [generate(engine, prompt, PLAIN_VARIANT, settings) for prompt in prompts]
        assert generate(engine, replace(prompts[0], answer=""), PLAIN_VARIANT, settings).right is None
    assert answers[0]
    assert [run.right for run in runs] == [True, False]


def compared(folder, targets, drafts, *, variants="auto", n=2) -> Comparison:
    """A comparison whose cells are not measured, with scores and problems."""
    comparison = Comparison(
        {file.name: file for file in targets},
        drafts,
        {},
        ["off"],
        SUITE,
        BenchSettings(parse_variants(variants), 12),
        rounds=1,
        n_threads=1,
        assume_watts=None,
        machine={},
        folder=folder,
    )
    comparison.score(TEXT, N_TOKENS, lambda *_: None)
    comparison.solve(n, lambda *_: None)
    return comparison


def test_problems_of_targets(f32, q4, tmp_path, monkeypatch):
    first = compared(tmp_path, [f32, q4], {NO_DRAFT: None})
    assert first.warnings == []
    assert {one.target: (one.passed, one.n_problems) for one in first.accuracy} == {
        "net-f32": (0, 2),
        "net-q4_0": (0, 2),
    }
    assert first.solved == []
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json")}
    again = compared(tmp_path, [f32, q4], {NO_DRAFT: None})
    assert again.accuracy == first.accuracy
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json")} == kept
    more = compared(tmp_path, [f32, q4], {NO_DRAFT: None}, n=3)
    assert {one.n_problems for one in more.accuracy} == {3}


def test_problems_of_variants_that_are_not_exact(f32, q4, tmp_path):
    drafts = {"net-q4_0": q4, NO_DRAFT: None}
    found = compared(tmp_path, [f32], drafts, variants="auto,cascade@1,cascade@0").solved
    assert [(one.draft, one.variant, one.n_problems, one.target_share) for one in found] == [
        ("net-q4_0", "cascade@1", 2, 1.0),
        ("net-q4_0", "cascade@0", 2, 0.0),
    ]
