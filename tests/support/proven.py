"""Tests that need not run again: what they depend on is as it was when they passed.

    python tests/support/proven.py              prints pytest's options that leave them out, for .ci/run
    python tests/support/proven.py sanitize     exit code 0 if the sanitizers' last run still holds
    python tests/support/proven.py --record sanitize

`.ci/proven.json` has a hash for each group below: of its tests and all that they import, the C sources, the
versions of packages that are imported, and which tools are here. `make sanitize` and a whole `make test`
write it; `make test` itself leaves nothing out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ".ci/proven.json"

_SOURCES = ("", "tests/support", "bench")  # folders that modules are imported from
_COMPILED = ("csrc/**/*", "CMakeLists.txt", "llama_cpp.cmake", "Makefile")
_TOOLS = ("haproxy", "sshd", "gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64-static", "chromium", "debootstrap")
"""Programs without which tests are skipped."""


@dataclass(frozen=True)
class Group:
    """Tests that depend on one part of edgespec, and what they start that they do not import."""

    tests: tuple[str, ...]
    """Globs of test files."""
    starts: tuple[str, ...] = ()
    """Modules that run in processes of their own, or that entry points name."""
    reads: tuple[str, ...] = ()
    """Globs of other files."""


_SERVE = "edgespec.apps.server.commands.serve"

GROUPS = {
    "forge": Group(
        ("tests/apps/forge/test_*.py", "tests/cli/test_cli_draft*.py"),
        ("edgespec.apps.forge.commands.draft", "edgespec.apps.forge.evaluation_process"),
        ("edgespec/apps/forge/*.toml",),
    ),
    "pi": Group(("tests/pi/test_*.py",), ("edgespec.apps.nodes.commands.node",), ("pi/**/*", "install.py")),
    "ray": Group(("tests/apps/batch/test_batch_ray.py",), ("edgespec.apps.batch.commands.batch",)),
    "balancer": Group(("tests/apps/server/test_haproxy.py",), (_SERVE,), ("docs/many-machines.md",)),
    "clients": Group(
        ("tests/apps/server/test_client_programs.py", "tests/apps/server/test_docs_integration.py"),
        (_SERVE,),
        ("docs/integration.md",),
    ),
}


def files_of(group: Group, root: Path = ROOT) -> list[str]:
    """Return the group's test files, relative to the root."""
    return [str(file.relative_to(root)) for file in _found(root, group.tests)]


def fingerprint(group: Group, root: Path = ROOT) -> str:
    """Return the hash of what the group's tests depend on."""
    tests = [root / file for file in files_of(group, root)]
    modules, foreign = _imported(root, tests, group.starts)
    used = {*tests, *modules, *_found(root, _COMPILED), *_found(root, group.reads)}
    used |= {file for test in tests for file in test.parent.glob("conftest.py")}
    return _hash(root, used, [*_versions(foreign), *(f"{tool} {_is_here(tool)}" for tool in _TOOLS)])


def sanitized(root: Path = ROOT) -> str:
    """Return the hash of what the sanitizers cover: C sources, flags, compiler, tests."""
    recipe = (root / "Makefile").read_text().partition("\nsanitize-memory:")[2].partition("\nbench:")[0]
    tests = [root / word for word in recipe.split() if word.startswith("tests/")]
    compiler = subprocess.run(["cc", "--version"], check=True, capture_output=True, text=True).stdout
    pinned = [
        line.strip()
        for line in (root / "pyproject.toml").read_text().splitlines()
        if "llama-cpp-python==" in line
    ]
    used = {*_found(root, ("csrc/**/*", "CMakeLists.txt", "llama_cpp.cmake")), *tests}
    return _hash(root, used, [recipe, compiler.splitlines()[0], *pinned])


def holding(root: Path = ROOT) -> Iterator[str]:
    """Yield the names of the groups whose last run still holds."""
    proven = _read(root)
    for name, group in GROUPS.items():
        if name in proven and proven[name] == fingerprint(group, root):
            yield name


def record(hashes: dict[str, str], root: Path = ROOT) -> None:
    """Note that these groups passed."""
    proven = _read(root) | hashes
    (root / RECORD).write_text(json.dumps(dict(sorted(proven.items())), indent=2) + "\n")


def _read(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / RECORD).read_text()))
    except (OSError, ValueError):
        return {}


def _found(root: Path, globs: Iterable[str]) -> list[Path]:
    found = {file for pattern in globs for file in root.glob(pattern) if file.is_file()}
    return sorted(file for file in found if "__pycache__" not in file.parts)


def _hash(root: Path, files: Iterable[Path], more: Iterable[str]) -> str:
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for line in more:
        total.update(f"{line}\n".encode())
    return total.hexdigest()


def _imported(root: Path, tests: Sequence[Path], starts: Iterable[str]) -> tuple[set[Path], set[str]]:
    """Return the files of our modules that these import, and the names of others' packages."""
    ours: set[Path] = set()
    foreign: set[str] = set()
    todo = list(tests)
    for name in starts:
        todo += _modules(root, name)
    while todo:
        file = todo.pop()
        if file in ours:
            continue
        ours.add(file)
        for name in _names(file):
            if modules := _modules(root, name):
                todo += modules
            else:
                foreign.add(name.partition(".")[0])
    return ours, foreign - set(sys.stdlib_module_names)


def _names(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and the names in them that may be modules too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(root: Path, name: str) -> list[Path]:
    """Return the file of one of our modules, and of the packages around it."""
    for source in _SOURCES:
        path = root / source / name.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                base = root / source
                around = [parent / "__init__.py" for parent in file.parents if base in parent.parents]
                return [file, *(one for one in around if one.is_file() and one != file)]
    return []


def _versions(packages: Iterable[str]) -> list[str]:
    known = _distributions()
    names = {name for package in packages for name in known.get(package, ()) if name != "edgespec"}
    return [f"{name} {version(name)}" for name in sorted(names)] + [sys.version]


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _is_here(tool: str) -> bool:
    return shutil.which(tool) is not None


def main(words: Sequence[str]) -> int:
    """Do what the first lines of this file say."""
    if words[:1] == ["--record"]:
        record({"sanitize": sanitized()})
        return 0
    if words:
        return 0 if _read(ROOT).get("sanitize") == sanitized() else 1
    names = list(holding())
    for name in names:
        sys.stderr.write(f"{name}: nothing has changed that these tests depend on; left out\n")
    sys.stdout.write(" ".join(f"--ignore={file}" for name in names for file in files_of(GROUPS[name])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
