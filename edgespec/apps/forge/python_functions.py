"""Prompts about functions of this machine's Python library, which is parsed, not run."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LEFT_OUT = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}
_LEAST_LINES, _MOST_LINES = 4, 40
_MOST_CODE = 1200  # characters
_MOST_DOC = 400
_PART = re.compile("<(NAME|SIGNATURE|DOC|CODE|HALF)>")
_PER_FILE = 12  # functions: some modules have hundreds that look alike


@dataclass(frozen=True, slots=True)
class LibraryFunction:
    """A function of the library."""

    name: str
    signature: str
    doc: str
    """First paragraph of the docstring, on one line; "": none."""
    code: str


@cache
def library() -> tuple[Path, ...]:
    """Return the files of the Python library, but for tests and the like."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return tuple(sorted(found))


def functions_of(path: Path) -> Iterator[LibraryFunction]:
    """Yield the functions of a file that are neither tiny nor long; none if it cannot be parsed."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    all_lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.end_lineno is None:
            continue
        if not _LEAST_LINES <= node.end_lineno - node.lineno <= _MOST_LINES:
            continue
        code = textwrap.dedent("\n".join(all_lines[node.lineno - 1 : node.end_lineno]))
        if len(code) > _MOST_CODE or not code.startswith("def "):
            continue
        lines = code.splitlines()
        signature = "\n".join(lines[: node.body[0].lineno - node.lineno]) or lines[0]
        doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        yield LibraryFunction(node.name, signature.rstrip(), doc[:_MOST_DOC], code)


class FunctionPrompts:
    """Draws prompts about the library's functions."""

    def __init__(
        self,
        described: Sequence[str],
        code: Sequence[str],
        fill: Callable[[str, random.Random], str],
        rng: random.Random,
    ) -> None:
        """Use the templates `described` for functions with a docstring, `code` for any.

        A function's parts fill <NAME>, <SIGNATURE>, <DOC>, <CODE> and <HALF>; `fill` fills other slots.
        """
        self._described, self._code, self._fill = described, code, fill
        self._files = list(library())
        rng.shuffle(self._files)
        self._functions: list[LibraryFunction] = []

    def draw(self, rng: random.Random) -> str:
        """Return a prompt; "" when there are none."""
        # Files are parsed as they are needed: all take some seconds.
        n_before = len(self._functions)
        while self._files and len(self._functions) <= n_before:
            found = list(functions_of(self._files.pop()))
            self._functions += rng.sample(found, min(_PER_FILE, len(found)))
        if not self._functions:
            return ""
        function = rng.choice(self._functions)
        templates = self._described if function.doc and rng.random() < 0.5 else self._code
        lines = function.code.splitlines()
        parts = {
            "NAME": function.name,
            "SIGNATURE": function.signature,
            "DOC": function.doc,
            "CODE": function.code.rstrip(),
            "HALF": "\n".join(lines[: len(lines) // 2 + 1]),
        }
        return _PART.sub(lambda part: parts[part[1]], self._fill(rng.choice(templates), rng))
