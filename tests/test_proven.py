"""What CI may leave out: a hash follows what tests import, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import proven

TEST = "tests/app/test_a.py"
FILES = {
    TEST: 'from helper import x\nPAGE = "page.md"\ndef test_it(model): x("-m", "edgespec", "go")\n',
    "tests/conftest.py": (
        "import pytest\nfrom edgespec import fixed, unused\n"
        "@pytest.fixture\ndef model(kept): return fixed\n"
        "@pytest.fixture\ndef other(): return unused\n"
    ),
    "tests/app/conftest.py": "import pytest\n@pytest.fixture\ndef kept(): import edgespec.kept\n",
    "tests/support/helper.py": 'from edgespec import Thing\nP = "import sys; from edgespec.told import t"\n',
    "edgespec/__init__.py": '_HOMES = {"core.thing": ("Thing",)}\n',
    "edgespec/__main__.py": "from edgespec.cli.app import main\n",
    "edgespec/_core.pyi": "",
    "edgespec/cli/app.py": "",
    "edgespec/cli/go.py": 'import importlib\nimportlib.import_module("edgespec.named")\n',
    "edgespec/cli/stay.py": "",
    "edgespec/core/__init__.py": "import edgespec.around\ndef main(): import edgespec.uncalled\n",
    "edgespec/core/thing.py": "import numpy\nfrom edgespec import _core\nimport edgespec.asks\n",
    "edgespec/core/table.toml": "",
    "edgespec/core/pages/page.html": "",
    "edgespec/around.py": "",
    "edgespec/asks.py": 'part("an.app")\noffered("edgespec.meters")\ndef f():\n    import edgespec.lazy\n',
    "edgespec/app.py": "",
    "edgespec/fixed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import edgespec.typed\n",
    "edgespec/kept.py": "",
    "edgespec/lazy.py": 'library.load("edgespec_kernels.so")\n',
    "edgespec/meter.py": "",
    "edgespec/named.py": "",
    "edgespec/other.py": '"""As edgespec.asks does."""\n',
    "edgespec/told.py": "",
    "edgespec/typed.py": "",
    "edgespec/uncalled.py": "",
    "edgespec/unused.py": "",
    "csrc/core.c": "",
    "csrc/kernels/a.cpp": "",
    "csrc/whisper/a.cpp": "",
    "csrc/tests/test_core.c": "",
    "docs/page.md": "",
    "docs/other.md": "",
    ".ci/run": "",
    "pyproject.toml": (
        '[project.entry-points."edgespec.commands"]\ngo = "edgespec.cli.go:go"\n'
        'stay = "edgespec.cli.stay:stay"\n'
        '[project.entry-points."edgespec.parts"]\n"an.app" = "edgespec.app:part"\n'
        '[project.entry-points."edgespec.meters"]\nmeter = "edgespec.meter:M"\n'
    ),
}
NO_MATTER = {
    *("edgespec/cli/stay.py", "edgespec/other.py", "edgespec/typed.py", "edgespec/uncalled.py"),
    "edgespec/unused.py",
    *("csrc/whisper/a.cpp", "csrc/tests/test_core.c", "docs/other.md", ".ci/run", "pyproject.toml"),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(proven, "GROUPS", {"one": ("tests/app/test_*.py",)})
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
def test_what_a_test_depends_on_changes_its_hash(root, file):
    before = proven.fingerprints(root)
    with (root / file).open("a") as opened:
        opened.write("# changed\n")

    assert (proven.fingerprints(root) != before) == (file not in NO_MATTER)


def test_a_copy_elsewhere_at_another_time_has_the_same_hash(root, tmp_path_factory):
    copy = tmp_path_factory.mktemp("elsewhere") / "clone"
    shutil.copytree(root, copy)
    for file in copy.rglob("*"):
        os.utime(file, (1, 1))
    (copy / "edgespec/core/__pycache__").mkdir()
    (copy / "edgespec/core/__pycache__/thing.pyc").touch()
    (copy / "edgespec/_core.abi3.so").touch()

    assert proven.fingerprints(copy) == proven.fingerprints(root)


def test_versions_and_tools_count(root, monkeypatch):
    def now():
        return proven.Repository(root).fingerprint(TEST)

    before = now()
    monkeypatch.setattr(proven, "_TOOLS", ("go", "haproxy"))  # the test names `go`
    with_tool = now()
    assert with_tool != before
    monkeypatch.setattr(shutil, "which", lambda _tool: "/bin/go")
    assert now() != with_tool
    before = now()
    monkeypatch.setattr(proven, "version", lambda _name: "another")
    assert now() != before


def test_another_processor_counts_for_what_proves_something_of_it(root, monkeypatch):
    before = proven.fingerprints(root)
    monkeypatch.setattr(proven, "_instructions", lambda: ["avx9"])
    assert proven.fingerprints(root) == before

    monkeypatch.setattr(proven, "_OF_PROCESSORS", ("one",))
    there = proven.fingerprints(root)
    monkeypatch.setattr(proven, "_instructions", lambda: ["avx9", "avx10"])
    assert proven.fingerprints(root) != there != before


def test_a_file_holds_until_something_changes(root):
    assert proven.holding(root) == []

    proven.record(proven.fingerprints(root), root)
    assert proven.holding(root) == [TEST]

    (root / "edgespec/lazy.py").write_text("x = 1\n")
    assert proven.holding(root) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "null", f'["{TEST}"]', f'{{"{TEST}": null}}', "\xff", f'{{"{TEST}": "0"}}']
)
def test_nothing_holds_by_a_record_that_is_broken(root, text):
    (root / proven.RECORD).write_bytes(text.encode("latin-1"))
    assert proven.holding(root) == []

    proven.record(proven.fingerprints(root), root)
    assert proven.holding(root) == [TEST]


def test_files_that_are_gone_are_forgotten(root):
    proven.record({TEST: "1", "tests/app/test_gone.py": "2", proven.SANITIZE: "3"}, root)
    assert proven._read(root) == {TEST: "1", proven.SANITIZE: "3"}


def test_each_group_of_this_repository_has_its_files():
    for globs in proven.GROUPS.values():
        assert all(list(proven.ROOT.glob(pattern)) for pattern in globs)
