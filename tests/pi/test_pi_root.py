"""The boards' file tree: real files and links; apt-get and dpkg are programs that do what they do."""

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from pi import console, needs
from pi import root as room

MIRROR = "http://mirror.invalid/debian/"

# Lists need a signature, packages need lists; what is downloaded is in Dir::Cache::archives.
APT_GET = """\
#!{python}
import os, pathlib, re, shutil, sys
here = pathlib.Path("{here}")
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "indextargets":
    print((here / "mirrors").read_text(), end="")
    sys.exit()
assert os.environ["LC_ALL"] == "C.UTF-8"
conf = pathlib.Path(sys.argv[sys.argv.index("-c") + 1]).read_text()
said = here / ("says-install" if "install" in sys.argv else "says-update")
if said.exists():
    sys.exit(print(said.read_text(), file=sys.stderr) or 100)
options = dict(re.findall(r'^([\\w:-]+) "(.*)";$', conf, re.M))
lists = pathlib.Path(options["Dir::State::lists"], "lists-of-" + options["APT::Architecture"])
if "update" in sys.argv:
    source = pathlib.Path(options["Dir::Etc::sourcelist"]).read_text()
    lists.write_text(source)
else:
    assert lists.exists() and "--download-only" in sys.argv
    assert pathlib.Path(options["Dir::State::status"]).read_text() == ""
    for deb in here.glob("*.deb"):
        shutil.copy(deb, options["Dir::Cache::archives"])
"""

DPKG = """\
#!/bin/sh
test "$1" = -x || exit 2
if [ -e '{here}/full' ]; then
    echo "dpkg-deb: error: tar: ./usr: Cannot write: No space left on device" >&2; exit 2
fi
exec tar -x -f "$2" -C "$3"
"""


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """A machine with apt-get, dpkg, a keyring and two packages; pi/ builds below it."""
    here = tmp_path / "debian"
    programs = here / "bin"
    programs.mkdir(parents=True)
    for name, text in (("apt-get", APT_GET), ("dpkg", DPKG)):
        (programs / name).write_text(text.format(python=sys.executable, here=here))
        (programs / name).chmod(0o755)
    for name in ("sh", "tar"):
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    (here / "mirrors").write_text(f"cdrom://disc/\n{MIRROR}\n{MIRROR}\n")
    (here / "keyring.gpg").write_bytes(b"keys")
    monkeypatch.setattr(room, "BUILD", tmp_path / "build")
    monkeypatch.setattr(needs, "_KEYRINGS", (str(here / "none.gpg"), str(here / "keyring.gpg")))
    package(here / "python3.11_3.11.2-6+deb12u8_arm64.deb", {"usr/bin/python3.11": "ELF"})
    links = {"usr/lib/libm.so": "/lib/libm.so.6", "usr/lib/libz.so": "libz.so.1", "usr/share/etc": "/etc"}
    package(here / "libc6_1%3a2.36-9_arm64.deb", {"lib/libm.so.6": "ELF", "etc/hosts": ""}, links)
    return here


def package(file, members, links=None):
    """A package's file: to `dpkg -x` of ours, it is its files alone."""
    content = file.with_suffix(".content")
    for name, text in members.items():
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).write_text(text)
    for name, target in (links or {}).items():
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).symlink_to(target)
    with tarfile.open(file, "w") as archive:
        archive.add(content, ".")
    shutil.rmtree(content)


def calls(debian):
    return (debian / "calls").read_text().splitlines()


def test_a_tree_with_links_that_stay_in_it(debian):
    tree = room.ensure_root()
    assert (tree / "usr/bin/python3.11").read_text() == "ELF"
    assert (tree / "usr/lib/libm.so").readlink() == Path("../../lib/libm.so.6")
    assert (tree / "usr/lib/libz.so").readlink() == Path("libz.so.1")
    assert (tree / "usr/share/etc").resolve() == tree.resolve() / "etc"
    stamp = json.loads((tree / "edgespec-root.json").read_text())
    assert stamp["packages"] == {"python3.11": "3.11.2-6+deb12u8", "libc6": "1:2.36-9"}
    assert stamp["architecture"] == "arm64"


def test_a_newer_suite_has_its_own_tree_with_a_merged_usr(debian, tmp_path):
    (debian / "libc6_1%3a2.36-9_arm64.deb").unlink()
    package(debian / "libc6_2.41-12_arm64.deb", {"usr/lib/ld-linux-aarch64.so.1": "ELF"})
    tree = room.ensure_root("trixie")
    assert tree == tmp_path / "build" / "root-trixie"
    assert (tree / "lib/ld-linux-aarch64.so.1").read_text() == "ELF"
    (asked,) = [call for call in calls(debian) if " install " in call]
    assert asked.split("--download-only ")[1] == "python3.13 python3.13-venv libstdc++6"
    sources = (tmp_path / "build" / "apt-trixie" / "sources.list").read_text()
    assert sources.endswith(f" {MIRROR} trixie main\n")


def test_a_second_call_asks_nobody(debian):
    tree = room.ensure_root()
    before = calls(debian)
    assert room.ensure_root() == tree
    assert calls(debian) == before


def test_apt_keeps_to_its_own_folder(debian, tmp_path):
    room.ensure_root()
    state = tmp_path / "build" / "apt"
    keyring = debian / "keyring.gpg"
    assert (state / "lists" / "lists-of-arm64").read_text() == (
        f"deb [arch=arm64 signed-by={keyring}] {MIRROR} bookworm main\n"
    )
    paths = [
        line.split('"')[1] for line in (state / "apt.conf").read_text().splitlines() if line[:5] == "Dir::"
    ]
    assert len(paths) >= 10
    assert all(path == "/dev/null" or path.startswith(str(state)) for path in paths)


def test_another_list_of_packages_makes_another_tree(debian, monkeypatch):
    tree = room.ensure_root()
    (tree / "mine").touch()
    monkeypatch.setattr(room, "_PACKAGES", (*room._PACKAGES, "libssl3"))
    assert room.ensure_root() == tree
    assert not (tree / "mine").exists()
    assert calls(debian)[-1].endswith("libssl3")


@pytest.mark.parametrize(
    ("step", "said", "line"),
    [
        (
            "update",
            "E: Failed to fetch ...  Temporary failure resolving 'mirror.invalid'",
            "cannot be reached",
        ),
        ("install", "E: Failed to fetch ...  Could not connect to mirror.invalid:80", "cannot be reached"),
        ("update", "W: GPG error: ... public key is not available: NO_PUBKEY 0E98404D", "not by a key"),
        ("update", "E: The repository ... does not have a Release file.", "has no Debian bookworm"),
        ("update", "E: Write error - write (28: No space left on device)", "the disk is full"),
        ("install", "E: You don't have enough free space in /x/archives/.", "the disk is full"),
        ("install", "E: Unable to locate package python3.11", "failed (exit code 100)"),
    ],
)
def test_what_apt_says_becomes_one_line(debian, tmp_path, step, said, line):
    (debian / f"says-{step}").write_text(said)
    with pytest.raises(EdgespecError, match=r"^Debian bookworm for arm64: ") as error:
        room.ensure_root()
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "build") in str(error.value)  # the log
    assert not (tmp_path / "build" / "root").exists()
    (debian / f"says-{step}").unlink()
    assert room.ensure_root().exists()


def test_a_disk_that_fills_up_leaves_no_half_of_a_tree(debian, tmp_path):
    (debian / "full").touch()
    with pytest.raises(EdgespecError, match="unpacking 2 packages for arm64: the disk is full"):
        room.ensure_root()
    assert not [file.name for file in (tmp_path / "build").glob("root*") if file.is_dir()]


@pytest.mark.parametrize("name", ["apt-get", "dpkg"])
def test_not_debian(debian, name):
    (debian / "bin" / name).unlink()
    with pytest.raises(EdgespecError, match=rf"^no {name}: .* run this on Debian"):
        room.ensure_root()


def test_no_mirror_of_debian(debian):
    (debian / "mirrors").write_text("cdrom://disc/\n")
    with pytest.raises(EdgespecError, match="no lists of a Debian mirror; on Debian run `apt-get update`"):
        room.ensure_root()


def test_no_keyring(debian):
    (debian / "keyring.gpg").unlink()
    with pytest.raises(EdgespecError, match="apt install debian-archive-keyring"):
        room.ensure_root()
    assert not (debian / "calls").exists() or "update" not in (debian / "calls").read_text()


def test_mistakes_are_one_line_and_an_exit_code(debian, capfd):
    (debian / "bin" / "dpkg").unlink()
    assert console.main(lambda: room.ensure_root() and 0) == 1
    assert capfd.readouterr().err.startswith("edgespec: no dpkg: ")


@pytest.mark.slow
def test_a_real_tree_from_this_machines_mirror(tmp_path, monkeypatch):
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("no apt-get and dpkg: not Debian")
    try:
        needs.keyring(), needs.mirror()
    except EdgespecError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(room, "BUILD", tmp_path)
    try:
        tree = room.ensure_root()
    except EdgespecError as error:
        if "cannot be reached" in str(error):
            pytest.skip(str(error))
        raise
    assert (tree / "usr/bin/python3.11").read_bytes()[:4] == b"\x7fELF"
    assert (tree / "usr/include/python3.11/Python.h").exists()
    assert list((tree / "usr/share/python-wheels").glob("pip-*.whl"))
    for name in ("libc.so.6", "libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1"):
        assert list(tree.glob(f"**/{name}")), name
    assert not [link for link in tree.glob("**/*") if link.is_symlink() and link.readlink().is_absolute()]
