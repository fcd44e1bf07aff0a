"""What CI may leave out: a hash follows what tests import, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import proven

GROUP = proven.Group(("tests/test_a.py",), starts=("edgespec.started",), reads=("data/*.toml",))
FILES = {
    "tests/test_a.py": "from helper import x\n",
    "tests/support/helper.py": "from edgespec.core import thing\n",
    "edgespec/__init__.py": "",
    "edgespec/core/__init__.py": "",
    "edgespec/core/thing.py": "import numpy\n",
    "edgespec/started.py": "def f():\n    import edgespec.lazy\n",
    "edgespec/lazy.py": "",
    "edgespec/other.py": "",
    "csrc/core.c": "",
    "data/prompts.toml": "",
    ".ci/run": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
def test_what_a_test_depends_on_changes_its_hash(root, file):
    before = proven.fingerprint(GROUP, root)
    with (root / file).open("a") as opened:
        opened.write("# changed\n")

    assert (proven.fingerprint(GROUP, root) != before) == (file not in ("edgespec/other.py", ".ci/run"))


def test_a_group_holds_until_something_changes(root, monkeypatch):
    monkeypatch.setattr(proven, "GROUPS", {"one": GROUP})
    assert list(proven.holding(root)) == []

    proven.record({"one": proven.fingerprint(GROUP, root)}, root)
    assert list(proven.holding(root)) == ["one"]

    (root / "edgespec/lazy.py").write_text("x = 1\n")
    assert list(proven.holding(root)) == []


def test_each_group_of_this_repository_has_its_files():
    for group in proven.GROUPS.values():
        assert all(list(proven.ROOT.glob(pattern)) for pattern in (*group.tests, *group.reads))
        assert all(proven._modules(proven.ROOT, name) for name in group.starts)
