"""The boards' file tree: real files and links, which a program in mmdebstrap's place makes."""

import shutil
import sys
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from pi import needs
from pi import root as room

MIRROR = "http://mirror.invalid/debian/"

APT_GET = """\
#!/bin/sh
test "$1" = indextargets && cat '{here}/mirrors'
"""
MMDEBSTRAP = """\
#!{python}
import os, pathlib, sys
here = pathlib.Path("{here}")
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
tree = pathlib.Path(sys.argv[-2], "usr/lib")
tree.mkdir(parents=True)
if (here / "says").exists():
    sys.exit(print((here / "says").read_text(), file=sys.stderr) or 100)
(tree / "libm.so").symlink_to("/usr/lib/libm.so.6")
(tree / "libm.so.6").write_text("ELF")
(tree / "libz.so").symlink_to("libz.so.1")
"""


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """A machine with apt-get, mmdebstrap and a keyring; pi/ builds below it."""
    here = tmp_path / "debian"
    programs = here / "bin"
    programs.mkdir(parents=True)
    for name, text in (("apt-get", APT_GET), ("mmdebstrap", MMDEBSTRAP)):
        (programs / name).write_text(text.format(python=sys.executable, here=here))
        (programs / name).chmod(0o755)
    for name in ("sh", "cat"):
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    (here / "mirrors").write_text(f"cdrom://disc/\n{MIRROR}\n{MIRROR}\n")
    (here / "keyring.gpg").write_bytes(b"keys")
    monkeypatch.setattr(room, "BUILD", tmp_path / "build")
    monkeypatch.setattr(needs, "_KEYRINGS", (str(here / "none.gpg"), str(here / "keyring.gpg")))
    return here


def test_a_tree_with_links_that_stay_in_it_is_made_once(debian):
    tree = room.ensure_root()
    assert (tree / "usr/lib/libm.so").readlink() == Path("libm.so.6")
    assert (tree / "usr/lib/libz.so").readlink() == Path("libz.so.1")
    assert room.ensure_root() == tree
    (call,) = (debian / "calls").read_text().splitlines()
    packages = "--include=python3.11,python3.11-venv,libstdc++6,libpython3.11-dev,libgomp1"
    assert f"--keyring={debian}/keyring.gpg --architectures=arm64 {packages} bookworm " in call
    assert call.endswith(f"/root.new {MIRROR}")


def test_a_newer_suite_has_its_own_tree(debian, tmp_path):
    assert room.ensure_root("trixie") == tmp_path / "build" / "root-trixie"
    assert "--include=python3.13,python3.13-venv,libstdc++6 trixie" in (debian / "calls").read_text()
    assert (tmp_path / "build" / "root-trixie" / "lib").readlink() == Path("usr/lib"), "its loader is there"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("E: Failed to fetch ...  Temporary failure resolving 'mirror.invalid'", "cannot be reached"),
        ("W: GPG error: ... public key is not available: NO_PUBKEY 0E98404D", "not by a key"),
        ("E: The repository ... does not have a Release file.", "has no such suite"),
        ("E: Write error - write (28: No space left on device)", "the disk is full"),
        ("E: Unable to locate package python3.11", "failed (exit code 100)"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_half_of_a_tree(debian, tmp_path, said, line):
    (debian / "says").write_text(said)
    with pytest.raises(EdgespecError, match=r"^making a tree of Debian bookworm for aarch64: ") as error:
        room.ensure_root()
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not [file.name for file in (tmp_path / "build").glob("root*") if file.is_dir()]
    (debian / "says").unlink()
    assert room.ensure_root().exists()
