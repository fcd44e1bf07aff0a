"""The house rules that ruff, mypy and import-linter have no rule for, as `make lint` runs them.

Each finding is one line: where, what, and what to do. docs/development.md lists the rules.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_MODULE_LINES = 800
MAX_FUNCTION_LINES = 59

LOOSE_MODULES = ("__init__.py", "__main__.py", "errors.py", "testing.py", "_core.pyi")
"""The modules that lie in edgespec/ itself, in no package."""

OUR_NOTICE = "The edgespec authors"

ATTRIBUTIONS = ("LICENSE", "edgespec/models/packed/README.md")
"""Files that name other holders: the licence, and the origin of the weights that come with edgespec."""

NOTICE = re.compile(
    r"copyright\s*(\(c\)|©|\d)|©\s*\d|SPDX-\w+-Identifier:|permission is hereby grante[d]"
    r"|redistribution and use in sourc[e]|licensed under the [A-Z]",
    re.IGNORECASE,
)
"""A licence header or a line that claims copyright; the bare word is none."""


@dataclass(frozen=True, order=True)
class Finding:
    """One line about what breaks a rule."""

    path: str
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.advice}"


def is_checked(path: str) -> bool:
    """Whether the rules for Python code hold for this file: all but tests."""
    return path.endswith(".py") and not path.startswith("tests/")


def loose_modules(path: str) -> Iterator[Finding]:
    """Find a module of edgespec/ that is in no package."""
    folder, _, name = path.rpartition("/")
    if folder == "edgespec" and name.endswith((".py", ".pyi")) and name not in LOOSE_MODULES:
        yield Finding(path, 1, "loose module", "move it into one of edgespec's packages")


def long_sources(path: str, text: str) -> Iterator[Finding]:
    """Find a file of code, tests aside, of more than 800 lines."""
    is_source = path.endswith((".c", ".cpp", ".h", ".js")) and "tests/" not in path
    if not (is_source or is_checked(path)):
        return
    n_lines = text.count("\n")
    if n_lines > MAX_MODULE_LINES:
        advice = f"{n_lines} lines, {MAX_MODULE_LINES} at the most: make two of it"
        yield Finding(path, n_lines, "long module", advice)


def long_functions(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Find functions of 60 lines or more, from `def` to the last line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_FUNCTION_LINES:
                advice = f"{node.name} has {n_lines} lines, {MAX_FUNCTION_LINES} at the most: take a part out"
                yield Finding(path, node.lineno, "long function", advice)


def foreign_notices(path: str, text: str) -> Iterator[Finding]:
    """Find lines that claim copyright or state a licence for somebody else."""
    if path in ATTRIBUTIONS:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if NOTICE.search(line) and OUR_NOTICE not in line:
            advice = "nothing here is a copy of others' work: depend on it, or write it anew"
            yield Finding(path, number, "foreign copyright", advice)


def repeated_classes(places: dict[str, list[tuple[str, int]]]) -> Iterator[Finding]:
    """Find classes of edgespec that have one name; each place but the first is a finding."""
    for name, found in places.items():
        first, *others = sorted(found)
        for path, line in others:
            advice = f"{name} is also in {first[0]}: give one of them a name that says which it is"
            yield Finding(path, line, "class name twice", advice)


def repeated_test_files(paths: list[str]) -> Iterator[Finding]:
    """Find test files of one name, of which pytest takes only one."""
    first: dict[str, str] = {}
    for path in sorted(paths):
        name = path.rpartition("/")[2]
        if path.startswith("tests/") and name.startswith("test_") and first.setdefault(name, path) != path:
            yield Finding(path, 1, "test file twice", f"{first[name]} has the same name: rename one of them")


def check(root: Path, paths: list[str]) -> list[Finding]:
    """Check these files, given relative to the root; sorted findings."""
    findings: list[Finding] = []
    classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path in paths:
        findings += loose_modules(path)
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # data: weights, images
        findings += foreign_notices(path, text)
        findings += long_sources(path, text)
        if not is_checked(path):
            continue
        tree = ast.parse(text)
        findings += long_functions(path, tree)
        if path.startswith("edgespec/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append((path, node.lineno))
    return sorted([*findings, *repeated_classes(classes), *repeated_test_files(paths)])


def repository_files(root: Path) -> list[str]:
    """Return the files that git tracks, and new ones that it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in listed.split("\0") if path and (root / path).is_file())


def main() -> int:
    """Print what breaks the rules in this repository, and how often each; return the exit code."""
    root = Path(__file__).parent
    findings = check(root, repository_files(root))
    for finding in findings:
        print(finding)  # noqa: T201
    counts: dict[str, int] = defaultdict(int)
    for finding in findings:
        counts[finding.rule] += 1
    said = ", ".join(f"{counts[rule]} {rule}" for rule in sorted(counts)) or "all rules hold"
    print(f"house: {said}")  # noqa: T201
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
