"""What make shows of its targets, and checks before it installs anything: one line, no venv was made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pi import ROOT

SOURCES = (
    "Makefile",
    "pyproject.toml",
    "pi/__init__.py",
    "pi/needs.py",
    "edgespec/__init__.py",
    "edgespec/errors.py",
)
CROSS = "no aarch64-linux-gnu-gcc on this machine: apt install g++-aarch64-linux-gnu"
NO_QEMU = "no qemu-aarch64-static on this machine: apt install qemu-user-static"


pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="packages have other names elsewhere")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone as far as make reads it, on a machine with gcc alone; programs are in bin/."""
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    add(tmp_path, "sh", "gcc", "cc", "c++", "uname")
    for name in ("gcc", "g++", "strip"):
        add(tmp_path, f"x86_64-linux-gnu-{name}", program="true")
    return tmp_path


def add(clone: Path, *names: str, program: str = "") -> None:
    """Let the machine have programs: its own, or another one under their names."""
    for name in names:
        (clone / "bin" / name).symlink_to(shutil.which(program or name) or "/nowhere")


def add_wheels(clone: Path, *machines: str) -> None:
    (clone / "dist").mkdir(exist_ok=True)
    for machine in machines:
        for package in ("edgespec-0.1.0-cp311-abi3", "llama_cpp_python-0.3.36+edgespec-py3-none"):
            (clone / "dist" / f"{package}-manylinux_2_34_{machine}.whl").touch()


def make(clone: Path, *arguments: str, **settings: str) -> tuple[int, str]:
    """Return what make ends with, and the one line of ours."""
    environment = {"PATH": str(clone / "bin"), "LC_ALL": "C", **settings}
    program = str(shutil.which("make"))
    ended = subprocess.run(
        [program, f"PYTHON={sys.executable}", *arguments],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("make:")]
    assert ended.stdout == ""
    assert not (clone / ".venv").exists()
    return ended.returncode, line.replace(str(clone), "")


@pytest.mark.parametrize("target", ["pi", "wheels"])
@pytest.mark.parametrize("parallel", [[], ["--jobs", "4"]], ids=["", "jobs"])
def test_a_cross_compiler_is_missed_before_anything_is_installed(
    clone: Path, target: str, parallel: list[str]
) -> None:
    assert make(clone, *parallel, target) == (2, f"edgespec: {CROSS}")


@pytest.mark.parametrize(
    ("programs", "machines", "line"),
    [
        ([], "x86_64", "no unshare on this machine: apt install util-linux"),
        ([], "aarch64", NO_QEMU),
        (["qemu-aarch64-static"], "aarch64", CROSS),
    ],
)
def test_what_trying_wheels_needs(clone: Path, programs: list[str], machines: str, line: str) -> None:
    add_wheels(clone, "x86_64", "aarch64")
    add(clone, *programs, program="true")
    assert make(clone, "wheels-test", f"MACHINES={machines}") == (2, f"edgespec: {line}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["forge", "HOURS=two"], "HOURS=two: not a number of hours; such as make forge HOURS=2"),
        (["wheels", "MACHINES=arm64"], "arm64: not a kind of processor; choose from x86_64, aarch64"),
        (["wheels-test", "MACHINES=arm64"], "arm64: not a kind of processor; choose from x86_64, aarch64"),
        (["wheels", "MACHINES="], "MACHINES is empty; choose from x86_64, aarch64"),
        (["sanitize", "CC=no-cc"], "no-cc has no libasan.so, which comes with gcc: apt install gcc g++"),
        (["sanitize-threads", "CC=tcc"], "tcc has no libtsan.so, which comes with gcc: apt install gcc g++"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(clone: Path, arguments: list[str], line: str) -> None:
    assert make(clone, *arguments) == (2, f"edgespec: {line}")


@pytest.mark.parametrize("target", ["run", "serve", "lint", "test", "bench", "forge", "models-supported"])
def test_no_compiler_and_no_wheels(clone: Path, target: str) -> None:
    (clone / "bin" / "c++").unlink()
    line = "no C and C++ compiler; apt install gcc g++ python3-dev, or bring dist/ of `make wheels`"
    assert make(clone, target) == (2, f"edgespec: {line}")


@pytest.mark.parametrize("target", ["lint", "test", "check", "bench"])
def test_what_develops_edgespec_compiles_it(clone: Path, target: str) -> None:
    (clone / "bin" / "cc").unlink()
    add_wheels(clone, "x86_64")
    line = f"no C and C++ compiler, and make {target} compiles edgespec; apt install gcc g++ python3-dev"
    assert make(clone, target) == (2, f"edgespec: {line}")


# ---- a release ----


def git(clone: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=me", "-c", "user.email=me@localhost", *arguments]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)


@pytest.fixture
def tagged(clone: Path) -> Path:
    """The clone at its tagged commit; CHANGELOG.md says when it was released."""
    (clone / ".gitignore").write_text("bin/\ndist/\n__pycache__/\n")
    (clone / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.1.0 - 2026-11-27\n\n- All of it.\n\n## 0.0.9 - 2026-10-01\n"
    )
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "v0.1.0"]):
        git(clone, *arguments)
    add(clone, "git")
    return clone


def test_a_release_is_of_a_tagged_commit(tagged: Path) -> None:
    assert make(tagged, "release") == (2, f"edgespec: {CROSS}")  # what is left to do on this machine
    git(tagged, "commit", "-q", "--allow-empty", "-m", "two")
    line = "this commit is not tagged v0.1.0; git tag v0.1.0, or change the version"
    assert make(tagged, "release") == (2, f"edgespec: {line}")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (["CHANGELOG.md"], "CHANGELOG.md: not as committed"),
        (["new", "Makefile"], "Makefile: not as committed"),
    ],
)
def test_a_tree_that_has_changed_is_not_released(tagged: Path, changed: list[str], line: str) -> None:
    for name in changed:
        with (tagged / name).open("a") as file:
            file.write("\n")
    cure = "a release is made of a commit: commit, or git stash -u"
    assert make(tagged, "release") == (2, f"edgespec: {line}; {cure}")


@pytest.mark.parametrize(
    ("heading", "line"),
    [
        ("## 0.1.0 - unreleased", "0.1.0 is unreleased there; write the day in its place"),
        ("## 0.2.0 - 2026-11-27", "has nothing of 0.1.0, which is pyproject.toml's version"),
    ],
)
def test_a_release_has_notes(tagged: Path, heading: str, line: str) -> None:
    (tagged / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- All of it.\n")
    git(tagged, "commit", "-q", "-a", "--amend", "-m", "one")
    git(tagged, "tag", "-f", "v0.1.0")
    assert make(tagged, "release") == (2, f"edgespec: /CHANGELOG.md: {line}")


def test_help_names_every_target_in_80_columns() -> None:
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= 80
    named = {name for line in re.findall(r"^  make (.*?)  ", shown, re.MULTILINE) for name in line.split()}
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(targets.split()) - named == {"needs", "sanitize-memory", "sanitize-threads"}
