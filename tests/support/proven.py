"""Tests that need not run again: what they depend on is as it was when they passed.

    python tests/support/proven.py              prints pytest's options that leave them out, for .ci/run
    python tests/support/proven.py sanitize     exit code 0 if the sanitizers' last run still holds
    python tests/support/proven.py --record sanitize

`.ci/proven.json` has a hash for each test file of the groups below, and for the sanitizers. `Repository`
finds what a file depends on; where that is in doubt it depends on too much. `make sanitize` and a whole
`make test` write the hashes; `make test` itself leaves nothing out. A hash is of contents and versions, of no
times and no places; of the processor where its kernels are what is proved.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ".ci/proven.json"
SANITIZE = "sanitize"

GROUPS = {
    "forge": ("tests/apps/forge/test_*.py", "tests/cli/test_cli_draft*.py"),
    "pi": ("tests/pi/test_*.py",),
    "ray": ("tests/apps/batch/test_batch_ray.py",),
    "balancer": ("tests/apps/server/test_haproxy.py",),
    "clients": ("tests/apps/server/test_client_programs.py", "tests/apps/server/test_docs_integration.py"),
    "kernels": ("tests/llama/test_kernel*.py", "tests/llama/test_eight_bit_matrix.py"),
    "architectures": ("tests/test_architecture_check.py", "tests/llama/test_architectures.py"),
    "counted texts": (
        "tests/drafting/test_tree_drafter.py",
        "tests/drafting/test_head_exact.py",
        "tests/drafting/foreign/test_translated.py",
        "tests/decoding/test_*lossless.py",
        "tests/decoding/test_thoughts.py",
    ),
    "installation": ("tests/test_install.py",),
}
"""Globs of long tests, whose files CI leaves out while nothing that they depend on has changed."""

_OF_PROCESSORS = ("kernels", "architectures")
"""Groups that prove something of the processor: another one has another hash."""

_SOURCES = ("", "tests/support", "bench")  # folders that modules are imported from
_READ_FROM = (*_SOURCES, "docs", "tests", "pi")  # folders of files that tests name
_CORE = ("csrc/*.[ch]", "CMakeLists.txt", "llama_cpp.cmake")
_LIBRARIES = {
    "edgespec_kernels.so": "csrc/kernels/*",
    "rpc_transport.so": "csrc/rpc_transport/*",
    "edgespec_whisper.so": "csrc/whisper/*",
}
"""Libraries beside `edgespec._core`, by the name with which a module loads them, and their sources."""

_TOOLS = ("haproxy", "sshd", "gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64-static", "chromium", "debootstrap")
"""Programs without which tests are skipped: whether one is here counts for tests that name it."""

_SMALL_GROUPS = frozenset({"edgespec.drafters", "edgespec.meters"})
"""Entry points of which all are loaded where one is asked for."""

_ALWAYS = ""  # the name of fixtures that every test takes
_MODULE = re.compile(r"\bedgespec(?:\.\w+)+")
_FILE = re.compile(r"([\w.-]+/)*(Makefile|[\w.-]*\w\.\w+)")


@dataclass(frozen=True)
class Needs:
    """What a file of Python, or a fixture, needs at once."""

    modules: frozenset[str]
    """Names of modules, and names in modules that may be modules too."""
    strings: frozenset[str]
    """Its strings but for docstrings."""
    identifiers: frozenset[str]
    """Names, parameters and short strings: by one of these a test takes a fixture."""


class Repository:
    """Finds what test files depend on: the files that they and all that they import import, wherever in them.

    Imports for type checkers alone do not count. Beside imports these do: modules and files of this project
    named in strings (programs for `python -c`, children, pages), parts and plug-ins that are asked for by the
    name of an entry point, commands that tests name, what the fixtures that a test takes need, and whatever
    lies beside a module without being one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._points = _entry_points(root / "pyproject.toml")
        self._public = _public_names(root / "edgespec/__init__.py")
        self._needed: dict[Path, frozenset[Path]] = {}
        self._found: dict[str, tuple[Path, ...]] = {}

    def fingerprint(self, test: str) -> str:
        """Return the hash of all that a test file depends on: contents, versions of packages, tools."""
        files = self.dependencies(test)
        needs = [_needs(file.read_text()) for file in files if file.suffix == ".py"]
        words = frozenset[str]().union(*(one.strings for one in needs))
        packages = {
            name.partition(".")[0] for one in needs for name in one.modules if not self._modules(name)
        }
        compiled = [*_CORE] if self.root / "edgespec/_core.pyi" in files else []
        compiled += [source for library, source in _LIBRARIES.items() if library in words]
        tools = [f"{tool} {shutil.which(tool) is not None}" for tool in _TOOLS if tool in words]
        more = [*_versions(packages), *tools, *(_instructions() if self._is_of_processor(test) else ())]
        return _hash(self.root, {*files, *_found(self.root, compiled)}, more)

    def dependencies(self, test: str) -> set[Path]:
        """Return all files that a test file, named relative to the root, depends on, itself with them."""
        found = self._closure([self.root / test, *self._of_fixtures(self.root / test)])
        if self.root / "edgespec/cli/app.py" not in found:
            return found
        outside = [file for file in found if file.suffix == ".py" and not self._is_ours(file)]
        said = frozenset[str]().union(*(_needs(file.read_text()).strings for file in outside))
        commands = self._points.get("edgespec.commands", {})
        called = [file for name in said & commands.keys() for file in self._modules(commands[name])]
        return self._closure([*found, *called])

    def _closure(self, todo: list[Path]) -> set[Path]:
        found: set[Path] = set()
        while todo:
            file = todo.pop()
            if file not in found:
                found.add(file)
                todo += self._needed_by(file)
        return found

    def _needed_by(self, file: Path) -> frozenset[Path]:
        if file.suffix != ".py":
            return frozenset()
        if file not in self._needed:
            needs = _needs(file.read_text())
            found = self._files(needs, is_ours=self._is_ours(file)) | self._beside(file)
            self._needed[file] = frozenset(found)
        return self._needed[file]

    def _files(self, needs: Needs, *, is_ours: bool) -> set[Path]:
        parts = self._points.get("edgespec.parts", {})
        names = {*needs.modules, *(parts[name] for name in needs.strings & parts.keys())}
        for group in needs.strings & _SMALL_GROUPS:
            names |= {*self._points.get(group, {}).values()}
        if not is_ours and "edgespec" in needs.strings:  # python -m edgespec
            names.add("edgespec.__main__")
        found = {file for name in names for file in self._modules(name)}
        return found if is_ours else found | {file for text in needs.strings for file in self._named(text)}

    def _of_fixtures(self, test: Path) -> set[Path]:
        """Return the conftest.py files above a test, and what those of their fixtures need that it takes."""
        files = [folder / "conftest.py" for folder in test.parents if self.root in folder.parents]
        files = [file for file in files if file.is_file()]
        fixtures = [one for file in files for one in _fixtures(file.read_text())]
        found, taken = {test}, set[str]()
        todo = {_ALWAYS, *_needs(test.read_text()).identifiers}
        while todo:
            taken |= todo
            asked = [needs for name, needs in fixtures if name in todo]
            found = found.union(*(self._files(needs, is_ours=False) for needs in asked))
            todo = {name for needs in asked for name in needs.identifiers} - taken
        self._needed.update(
            (file, frozenset()) for file in files
        )  # the rest of such a file is not the test's
        return {*found, *files}

    def _named(self, text: str) -> list[Path]:
        if not _FILE.fullmatch(text):
            return []
        found = (self.root / folder / text for folder in _READ_FROM)
        return [file for file in found if file.is_file()]

    def _modules(self, name: str) -> tuple[Path, ...]:
        """Return the file of one of our modules, and of the packages around it."""
        if name not in self._found:
            self._found[name] = tuple(self._look_for(self._public.get(name, name)))
        return self._found[name]

    def _look_for(self, name: str) -> list[Path]:
        for source in _SOURCES:
            base = self.root / source
            path = base / name.replace(".", "/")
            for file in (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py"):
                if file.is_file():
                    around = [folder / "__init__.py" for folder in file.parents if base in folder.parents]
                    return [file, *(one for one in around if one.is_file())]
        return []

    def _beside(self, file: Path) -> set[Path]:
        """Return what lies beside a module of ours without being one, and in folders that are no packages."""
        if not self._is_ours(file):
            return set()
        folders = [
            one for one in file.parent.iterdir() if one.is_dir() and not (one / "__init__.py").exists()
        ]
        found = [one for folder in (file.parent, *folders) for one in folder.iterdir() if one.is_file()]
        return {one for one in found if one.suffix not in (".py", ".pyi", ".so", ".pyc", ".typed")}

    def _is_of_processor(self, test: str) -> bool:
        return any(test in files_of(group, self.root) for group in _OF_PROCESSORS if group in GROUPS)

    def _is_ours(self, file: Path) -> bool:
        return self.root / "edgespec" in file.parents


def files_of(group: str, root: Path = ROOT) -> list[str]:
    """Return the group's test files, relative to the root."""
    return [str(file.relative_to(root)) for file in _found(root, GROUPS[group])]


def fingerprints(root: Path = ROOT) -> dict[str, str]:
    """Return the hash of each test file of the groups, by its name relative to the root."""
    repository = Repository(root)
    return {name: repository.fingerprint(name) for group in GROUPS for name in files_of(group, root)}


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


def holding(root: Path = ROOT) -> list[str]:
    """Return the test files whose last run still holds."""
    proven = _read(root)
    return [name for name, now in fingerprints(root).items() if proven.get(name) == now]


def record(hashes: dict[str, str], root: Path = ROOT) -> None:
    """Note that these passed; what is no test file of the groups any more is forgotten."""
    known = {SANITIZE, *(name for group in GROUPS for name in files_of(group, root))}
    proven = {name: one for name, one in (_read(root) | hashes).items() if name in known}
    (root / RECORD).write_text(json.dumps(dict(sorted(proven.items())), indent=2) + "\n")


def _read(root: Path) -> dict[str, str]:
    try:
        read = json.loads((root / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


@cache
def _needs(text: str) -> Needs:
    return _needs_of(ast.parse(text))


def _needs_of(tree: ast.AST) -> Needs:
    strings = frozenset(_strings(tree))
    modules = {module for _, module in _imports(tree)}
    for text in strings:
        modules |= {*_MODULE.findall(text)}
        if "import " in text:  # a program
            modules |= {module for _, module in _imports_of_lines(text)}
    return Needs(frozenset(modules), strings, frozenset(_identifiers(tree)))


@cache
def _fixtures(text: str) -> list[tuple[str, Needs]]:
    """Return fixtures and helpers of a conftest.py, with what each uses of the file's imports and its own."""
    tree = ast.parse(text)
    imported = [*_imports(tree)]
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own = _needs_of(node)
            used = {module for name, module in imported if name in own.identifiers}
            needs = Needs(own.modules | used, own.strings, own.identifiers)
            is_taken = any("autouse" in ast.unparse(decorator) for decorator in node.decorator_list)
            found.append((_ALWAYS if is_taken else node.name, needs))
    return found


def _entry_points(file: Path) -> dict[str, dict[str, str]]:
    """Return the modules of our entry points: group -> name -> module."""
    groups = tomllib.loads(file.read_text())["project"]["entry-points"]
    return {
        group: {name: value.partition(":")[0] for name, value in points.items()}
        for group, points in groups.items()
    }


def _public_names(file: Path) -> dict[str, str]:
    """Return the homes of the names that `import edgespec` finds when they are used."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes = ast.literal_eval(node.value)
            return {f"edgespec.{name}": f"edgespec.{home}" for home, names in homes.items() for name in names}
    return {}


def _imports_of_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in re.split(r"[\n;]", text):
        with suppress(SyntaxError):
            yield from _imports(ast.parse(line.strip()))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind and the modules they come from, those for type checkers left out.

    What is imported from a module may be one itself: both are yielded.
    """
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, node.module
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def _strings(tree: ast.AST) -> Iterator[str]:
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def _found(root: Path, globs: Iterable[str]) -> list[Path]:
    found = {file for pattern in globs for file in root.glob(pattern) if file.is_file()}
    return sorted(file for file in found if "__pycache__" not in file.parts)


def _hash(root: Path, files: Iterable[Path], more: Iterable[str]) -> str:
    total = hashlib.sha256()
    for name, file in sorted((file.relative_to(root).as_posix(), file) for file in files):
        total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for line in more:
        total.update(f"{line}\n".encode())
    return total.hexdigest()


def _versions(packages: Iterable[str]) -> list[str]:
    known = _distributions()
    names = {name for package in packages for name in known.get(package, ()) if name != "edgespec"}
    return [f"{name} {version(name)}" for name in sorted(names)] + [f"python {platform.python_version()}"]


@cache
def _instructions() -> list[str]:
    """Return what kernels ask for of this processor's features."""
    with suppress(OSError):
        words = {*Path("/proc/cpuinfo").read_text().split()}
        return sorted(word for word in words if re.match(r"avx|amx|fma|f16c|asimd|i8mm|bf16|sve", word))
    return []


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def main(words: Sequence[str]) -> int:
    """Do what the first lines of this file say."""
    if words[:1] == ["--record"]:
        record({SANITIZE: sanitized()})
        return 0
    if words:
        return 0 if _read(ROOT).get(SANITIZE) == sanitized() else 1
    left_out = {*holding()}
    for group in GROUPS:
        files = files_of(group)
        n = len(left_out.intersection(files))
        sys.stderr.write(
            f"{group}: {n} of {len(files)} test files depend on nothing that has changed; left out\n"
        )
    sys.stdout.write(" ".join(f"--ignore={name}" for name in sorted(left_out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
