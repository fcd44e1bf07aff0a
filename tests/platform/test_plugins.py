"""What other packages offer by entry points, from a package made up for the test."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from command_line import python_path
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform import plugins

ENTRIES = """[edgespec.commands]
hello = hello_plugin:hello
run = hello_plugin:hello
broken = no_such_module:command
without = hello_plugin:nothing
"""
SOURCE = '''def hello(name: str = "you") -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package of somebody else's."""
    found = tmp_path / "hello_plugin-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: hello-plugin\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "hello_plugin.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{python_path()}")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.offered.cache_clear()
    return tmp_path


def edgespec(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words], check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.usefixtures("package")
def test_a_command_of_another_package_is_a_command():
    assert edgespec("hello", "--name", "Ada").stdout == "hello Ada\n"


@pytest.mark.usefixtures("package")
def test_help_shows_it_and_names_what_cannot_be_loaded():
    shown = edgespec("--help")

    assert shown.returncode == 0
    assert "Greet somebody." in shown.stdout
    for name in ("broken", "without"):
        assert f"{name} of hello-plugin" in shown.stderr
        assert f"│ {name} " not in shown.stdout


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["broken", "without"])
def test_one_that_cannot_be_loaded_is_one_line(name):
    ended = edgespec(name)

    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "hello-plugin" in ended.stderr


@pytest.mark.usefixtures("package")
def test_no_other_package_takes_a_name_of_ours():
    assert plugins.is_ours(plugins.offered("edgespec.commands")["run"])


def test_what_nobody_offers_is_named():
    with pytest.raises(UsageError, match=r"no-such-part.*edgespec\.parts"):
        plugins.load("edgespec.parts", "no-such-part")


def test_all_that_we_offer_can_be_loaded():
    groups = ("edgespec.commands", "edgespec.parts")
    ours = [point for group in groups for point in plugins.offered(group).values() if plugins.is_ours(point)]

    assert len(ours) > 20
    assert all(point.load() for point in ours)


def test_a_folder_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(plugins, "distribution", missing)
    plugins.offered.cache_clear()

    with pytest.raises(EdgespecError, match="edgespec is not installed"):
        plugins.offered("edgespec.commands")


def missing(name: str) -> None:
    raise PackageNotFoundError(name)
