"""HumanEval: lets a model write functions and runs their tests in the sandbox.

    problem  -> instruction -> a model's answer -> extract_program -> with the tests -> run_sandboxed

The problems are Chen et al.'s, "Evaluating Large Language Models Trained on Code" (2021), which also
define pass@1: here the share of problems whose one greedy answer passes.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgespec.apps.bench.sandbox import TIMEOUT_S, SandboxResult, run_sandboxed
from edgespec.decoding.choices import DrafterChoice
from edgespec.decoding.options import Waking
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import human_eval_file, numbered_lines, read_contents

N_PREDICT = 512
"""Most tokens of an answer; the longest of HumanEval's own solutions has 240 (Qwen2.5's tokenizer)."""

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([^\n]*)\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)  # a language, code
_PYTHON = ("", "python", "python3", "py")
# A model without a chat template goes on writing after the function. It is cut here, as in Chen et al.
_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")


@dataclass(frozen=True, slots=True)
class Problem:
    """A function that the model must write, and its tests."""

    task_id: str
    prompt: str
    """Imports, sometimes other functions, then the function's head and docstring."""
    entry_point: str
    """The function's name."""
    test: str
    """Defines `check`, which takes the function."""


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """Whether a model solved one problem."""

    task_id: str
    passed: bool
    reason: str
    """Why it did not pass, in one line; "" if it passed."""
    seconds: float
    """Time of writing the answer and running its tests."""
    tokens: int = 0
    """Tokens of the answer."""
    target_share: float = 1.0
    """Share of the answer's tokens that the target wrote or judged."""


def load_problems(path: str | Path | None = None) -> list[Problem]:
    """Return the problems of a HumanEval.jsonl or .jsonl.gz; None: of the installed package human-eval.

    The package's code is not run. Raises UsageError if the file is missing or holds something else.
    """
    file = human_eval_file() if path is None else Path(path)
    problems = []
    for number, line in numbered_lines(read_contents(file)[1]):
        try:
            problem = msgspec.json.decode(line, type=Problem)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: line {number} is no problem of HumanEval: {error}") from None
        if not problem.entry_point.isidentifier():
            raise UsageError(f"{file}: line {number}: {problem.entry_point!r} is no name of a function")
        problems.append(problem)
    if not problems:
        raise UsageError(f"{file}: holds no problems; give HumanEval.jsonl.gz")
    return problems


def instruction(problem: Problem) -> str:
    """Return the message that asks a chat model for the function."""
    return (
        "Complete this Python function. Answer with the whole function, and the imports it needs, in one "
        f"```python block, without tests or examples.\n\n```python\n{problem.prompt.rstrip()}\n```"
    )


def extract_program(problem: Problem, answer: str) -> str:
    """Return the program made of the problem's prompt and `answer`, without the tests.

    The code is the first fenced block of Python that defines the function, else the first block, else
    the whole answer. If the code defines the function, it follows what the prompt has above that (imports,
    other functions); if not, it continues the prompt.
    """
    head = re.compile(rf"^(?:async +)?def +{re.escape(problem.entry_point)}\b", re.M)
    blocks = [code for name, code in _BLOCK.findall(answer) if name.strip().lower() in _PYTHON]
    defining = [code for code in map(textwrap.dedent, blocks) if head.search(code)]
    code = (defining or blocks or [answer])[0]
    if not head.search(code):
        return problem.prompt + code
    asked = head.search(problem.prompt)
    above = problem.prompt[: asked.start()] if asked else ""
    return f"{above}\n{code}"


def check(problem: Problem, answer: str, *, timeout_s: float = TIMEOUT_S) -> SandboxResult:
    """Run the problem's tests on `answer`; see run_sandboxed."""
    program = f"{extract_program(problem, answer)}\n{problem.test}\ncheck({problem.entry_point})\n"
    return run_sandboxed(program, timeout_s=timeout_s)


def pass_at_1(
    engine: Engine,
    problems: Sequence[Problem],
    *,
    drafter: DrafterChoice | None = None,
    n_predict: int = N_PREDICT,
    cascade: Waking | None = None,
    lenience: float = 1.0,
) -> Iterator[ProblemResult]:
    """Write the greedy answer to each problem, test it, and yield the results in the order of `problems`.

    A model with a chat template is asked for the function (`instruction`); a model without one continues
    the prompt until the function ends. `drafter`, `cascade`, `lenience`: as for Engine.stream. Raises
    EdgespecError before the first answer if programs cannot be run safely here.
    """
    if not run_sandboxed("").passed:
        raise EdgespecError("programs cannot be run safely here: an empty one failed")
    for problem in problems:
        began = time.perf_counter()
        chat = engine.target.chat_template is not None
        result = engine.generate(
            instruction(problem) if chat else problem.prompt,
            params=SamplingParams(temperature=0.0),
            n_predict=n_predict,
            drafter=drafter,
            stop=() if chat else _ENDS,
            chat=chat,
            cascade=cascade,
            lenience=lenience,
        )
        outcome = check(problem, result.text)
        reason = outcome.reason
        if reason and result.stop_reason == "length":
            reason = f"the answer was cut at {n_predict} tokens: {reason}"
        seconds = time.perf_counter() - began
        n_tokens = len(result.token_ids)
        yield ProblemResult(problem.task_id, outcome.passed, reason, seconds, n_tokens, result.target_share)
