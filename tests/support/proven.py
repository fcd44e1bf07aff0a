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
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ".ci/proven.json"
SANITIZE = "sanitize"

GROUPS = {
    "forge": ("tests/apps/forge/test_*.py", "tests/cli/test_cli_draft*.py"),
    "pi": ("tests/pi/test_*.py",),
    "ray": ("tests/apps/batch/test_batch_ray.py",),
    "balancer": ("tests/apps/server/test_haproxy.py",),
    "clients": (
        "tests/apps/server/test_client_programs.py",
        "tests/apps/server/test_docs_integration.py",
        "tests/apps/server/test_server_schema.py",
    ),
    "kernels": ("tests/llama/test_kernel*.py", "tests/llama/test_eight_bit_matrix.py"),
    "architectures": ("tests/test_architecture_check.py", "tests/llama/test_architectures.py"),
    "counted texts": (
        "tests/drafting/test_tree_drafter.py",
        "tests/drafting/test_head_exact.py",
        "tests/drafting/foreign/test_translated.py",
        "tests/decoding/test_*lossless.py",
        "tests/decoding/test_thoughts.py",
    ),
    "comparisons": ("tests/cli/test_cli_compare.py", "tests/apps/bench/test_compare*.py"),
    "processes of models": ("tests/apps/server/test_server_models.py", "tests/cli/test_cli_serve.py"),
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
    "edgespec_whisper.so": "csrc/whisper/*",
}
"""Libraries beside `edgespec._core`, by the name with which a module loads them, and their sources."""

_TOOLS = (
    *("haproxy", "gcc", "chromium", "debootstrap", "curl", "readelf", "apt-get", "dpkg"),
    *("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64", "qemu-aarch64-static"),
)
"""Programs without which tests are skipped: whether one is here counts for tests that name it, and all for
the boards' tests, which put names together."""

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


_Part = tuple[Path, bool]  # a file, and whether its functions are called, or it is only imported


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
        self._needed: dict[_Part, frozenset[_Part]] = {}
        self._found: dict[str, tuple[_Part, ...]] = {}

    def fingerprint(self, test: str) -> str:
        """Return the hash of all that a test file depends on: contents, versions of packages, tools."""
        files = self.dependencies(test)
        needs = [_needs(file.read_text()) for file in files if file.suffix == ".py"]
        words = frozenset[str]().union(*(one.strings for one in needs))
        packages = {
            name.partition(".")[0] for one in needs for name in one.modules if not self._modules(name)
        }
        packages |= {word.partition(".")[0] for word in words}  # imported, or looked for, by its name
        compiled = [*_CORE] if self.root / "edgespec/_core.pyi" in files else []
        compiled += [source for library, source in _LIBRARIES.items() if library in words]
        if "-DEDGESPEC_TESTS=ON" in words:  # it compiles the C tests
            compiled.append("csrc/**/*")
        named = [tool for tool in _TOOLS if tool in words or "/pi/" in test]
        tools = [f"{tool} {shutil.which(tool) is not None}" for tool in named]
        more = [*_versions(packages), *tools, *(_instructions() if self._is_of_processor(test) else ())]
        return _hash(self.root, {*files, *_found(self.root, compiled)}, more)

    def dependencies(self, test: str) -> set[Path]:
        """Return all files that a test file, named relative to the root, depends on, itself with them."""
        found = self._closure(self._of_test(self.root / test))
        files = {file for file, _ in found}
        if self.root / "edgespec/cli/app.py" not in files:
            return files
        outside = [file for file in files if file.suffix == ".py" and not self._is_ours(file)]
        said = frozenset[str]().union(*(_needs(file.read_text()).strings for file in outside))
        commands = self._points.get("edgespec.commands", {})
        called = [one for name in said & commands.keys() for one in self._modules(commands[name])]
        return {file for file, _ in self._closure({*found, *called})}

    def _closure(self, start: Iterable[_Part]) -> set[_Part]:
        found: set[_Part] = set()
        todo = [*start]
        while todo:
            part = todo.pop()
            if part not in found:
                found.add(part)
                todo += self._needed_by(*part)
        return found

    def _needed_by(self, file: Path, is_whole: bool) -> frozenset[_Part]:
        if file.suffix != ".py":
            return frozenset()
        if (file, is_whole) not in self._needed:
            needs = _needs(file.read_text(), is_whole=is_whole)
            beside = {(one, True) for one in self._beside(file)}
            self._needed[file, is_whole] = frozenset(self._parts(needs, is_ours=self._is_ours(file)) | beside)
        return self._needed[file, is_whole]

    def _parts(self, needs: Needs, *, is_ours: bool) -> set[_Part]:
        offered = self._points.get("edgespec.parts", {})
        names = {*needs.modules, *(offered[name] for name in needs.strings & offered.keys())}
        for group in needs.strings & _SMALL_GROUPS:
            names |= {*self._points.get(group, {}).values()}
        found = {one for name in names for one in self._modules(name)}
        return found if is_ours else found | {one for text in needs.strings for one in self._named(text)}

    def _of_test(self, test: Path) -> set[_Part]:
        """Return the test, the conftest.py files above it, and what the fixtures need that it takes."""
        files = [folder / "conftest.py" for folder in test.parents if self.root in folder.parents]
        files = [file for file in files if file.is_file()]
        for file in files:  # what the rest of such a file needs is not the test's
            self._needed[file, True] = frozenset()
        fixtures = [one for file in files for one in _fixtures(file.read_text())]
        found, taken = {(file, True) for file in (test, *files)}, set[str]()
        todo = {_ALWAYS, *_needs(test.read_text()).identifiers}
        while todo:
            taken |= todo
            asked = [needs for name, needs in fixtures if name in todo]
            found = found.union(*(self._parts(needs, is_ours=False) for needs in asked))
            todo = {name for needs in asked for name in needs.identifiers} - taken
        return found

    def _named(self, text: str) -> list[_Part]:
        if not _FILE.fullmatch(text):
            return []
        found = (self.root / folder / text for folder in _READ_FROM)
        return [(file, True) for file in found if file.is_file()]

    def _modules(self, name: str) -> tuple[_Part, ...]:
        """Return the file of one of our modules, and the packages around it, which are only imported."""
        if name not in self._found:
            self._found[name] = tuple(self._look_for(self._public.get(name, name)))
        return self._found[name]

    def _look_for(self, name: str) -> list[_Part]:
        for source in _SOURCES:
            base = self.root / source
            path = base / name.replace(".", "/")
            for file in (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py"):
                if file.is_file():
                    around = [folder / "__init__.py" for folder in file.parents if base in folder.parents]
                    return [(file, True), *((one, False) for one in around if one.is_file() and one != file)]
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
def _needs(text: str, *, is_whole: bool = True) -> Needs:
    return _needs_of(ast.parse(text), is_whole=is_whole)


def _needs_of(tree: ast.AST, *, is_whole: bool = True) -> Needs:
    modules, strings, identifiers = set[str](), set[str](), set[str]()
    for node in _nodes(tree, is_whole=is_whole):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, ast.Name):
            identifiers.add(node.id)
        elif isinstance(node, ast.arg):
            identifiers.add(node.arg)
        elif isinstance(node, ast.Tuple | ast.List | ast.Call):
            words = [one.value for one in ast.iter_child_nodes(node) if isinstance(one, ast.Constant)]
            modules |= {f"{name}.__main__" for option, name in pairwise(words) if option == "-m"}
        else:
            modules.update(module for _, module in _imported_by(node))
    for text in strings:
        modules.update(_MODULE.findall(text))
        if "-m edgespec" in text:
            modules.add("edgespec.__main__")
        if "import " in text:  # a program
            for line in re.split(r"[\n;]", text):
                with suppress(SyntaxError):
                    modules |= _needs_of(ast.parse(line.strip())).modules
    identifiers |= {text for text in strings if text.isidentifier()}
    return Needs(frozenset(modules), frozenset(strings), frozenset(identifiers))


@cache
def _fixtures(text: str) -> list[tuple[str, Needs]]:
    """Return fixtures and helpers of a conftest.py, with what each uses of the file's imports and its own."""
    tree = ast.parse(text)
    imported = [one for node in _nodes(tree) for one in _imported_by(node)]
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


def _nodes(tree: ast.AST, *, is_whole: bool = True) -> Iterator[ast.AST]:
    """Yield the nodes of a tree, or those outside of functions, without docstrings and types of checkers."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
        elif isinstance(node, ast.FunctionDef) and not is_whole:
            continue
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            todo += ast.iter_child_nodes(node)


def _imported_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds and the modules they come from.

    What is imported from a module may be one itself: both are yielded.
    """
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, node.module
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


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
