"""File trees of Debian for arm64: Python and the C libraries, for building also Python's headers and OpenMP.

    build/pi/apt     apt's lists, state, cache and configuration; the system's own are not touched
    build/pi/root    the tree: packages unpacked, not installed (none of their scripts has run)
    build/pi/apt-SUITE, build/pi/root-SUITE   a suite's without headers and OpenMP

Raspberry Pi OS bookworm has the same Python and C library. Wheels are built against the headers, and the
emulator finds its libraries here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from pi import BUILD
from pi.console import run
from pi.needs import keyring, mirror, packages_of_debian

SUITES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}
"""Debian's suites, and the version of Python in each."""

_BOARDS_SUITE, _ARCHITECTURE = "bookworm", "arm64"
_PACKAGES = ("python3.11", "python3.11-venv", "libpython3.11-dev", "libgomp1", "libstdc++6")
"""Packages asked for; apt-get adds those they depend on, the C library among them."""
_TO_BUILD = ("libpython3.11-dev", "libgomp1")
"""Packages left out of other suites' trees, where wheels are only tried."""
_STAMP = "edgespec-root.json"

_NO_NETWORK = "the Debian mirror cannot be reached; check the network, or apt's proxy"
_CAUSES = {
    "Could not resolve": _NO_NETWORK,
    "Temporary failure resolving": _NO_NETWORK,
    "Could not connect": _NO_NETWORK,
    "Connection failed": _NO_NETWORK,
    "connection timed out": _NO_NETWORK,
    "Network is unreachable": _NO_NETWORK,
    "NO_PUBKEY": "the mirror's signature is not by a key in the keyring; update debian-archive-keyring",
    "is not signed": "the mirror's lists are not signed; use another mirror",
    "Release file for": "the mirror's lists are out of date; check this machine's clock",
    "don't have enough free space": "the disk is full",
}
"""Signs in apt-get's output, and what a user is told."""


def ensure_root(suite: str = "") -> Path:
    """Return the tree of a suite, made on first use: 33 MB are downloaded, 140 MB on disk.

    "" is bookworm's, with what wheels are built against; the other trees have only what Python needs.

    Raises EdgespecError if this is not Debian, without a network, keyring or space.
    """
    root = BUILD / f"root{_ending(suite)}"
    if not _is_current(root, suite):
        BUILD.mkdir(parents=True, exist_ok=True)
        with (BUILD / "root.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_current(root, suite):  # another process may have made it in the meantime
                _make(root, suite)
    return root


def _ending(suite: str) -> str:
    return suite and f"-{suite}"


def _asked(suite: str) -> list[str]:
    if not suite:
        return list(_PACKAGES)
    version = SUITES[_BOARDS_SUITE], SUITES[suite]
    return [name.replace(*version) for name in _PACKAGES if name not in _TO_BUILD]


def _is_current(root: Path, suite: str) -> bool:
    try:
        stamp = json.loads((root / _STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(stamp["suite"] == (suite or _BOARDS_SUITE) and stamp["asked"] == _asked(suite))


def _make(root: Path, suite: str) -> None:
    packages_of_debian()
    packages = _download(BUILD / f"apt{_ending(suite)}", suite or _BOARDS_SUITE, _asked(suite))
    new = root.with_name(f"{root.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        run(
            f"unpacking {len(packages)} packages for {_ARCHITECTURE}",
            ["sh", "-ec", 'root=$1; shift; for file; do dpkg -x "$file" "$root"; done', "sh", new, *packages],
            BUILD / "unpack.log",
        )
        _make_links_relative(new)
        _merge_usr(new)
        versions = dict(unquote(file.name).split("_")[:2] for file in packages)
        stamp = {
            "suite": suite or _BOARDS_SUITE,
            "architecture": _ARCHITECTURE,
            "asked": _asked(suite),
            "packages": versions,
        }
        (new / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        shutil.rmtree(root, ignore_errors=True)
        new.rename(root)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # half a tree only fills the disk
    for file in packages:
        file.unlink()


def _download(state: Path, suite: str, asked: Sequence[str]) -> list[Path]:
    """Return the packages' files, downloaded by apt-get with all of its state in a folder of our own."""
    archives = state / "archives"
    shutil.rmtree(archives, ignore_errors=True)  # so that no older version is unpacked too
    for folder in (archives / "partial", state / "lists" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").write_text("")  # nothing is installed: everything is downloaded
    (state / "sources.list").write_text(
        f"deb [arch={_ARCHITECTURE} signed-by={keyring()}] {mirror()} {suite} main\n"
    )
    (state / "apt.conf").write_text(_configuration(state))
    apt = ["apt-get", "-q", "-y", "-c", str(state / "apt.conf")]
    what = f"Debian {suite} for {_ARCHITECTURE}"
    log = BUILD / "apt.log"
    none = f"the mirror that this machine's apt uses has no Debian {suite}"
    causes = {**_CAUSES, "does not have a Release file": none}
    english = {**os.environ, "LC_ALL": "C.UTF-8"}
    run(f"{what}: lists", [*apt, "update"], log, env=english, causes=causes)
    command = [*apt, "install", "--download-only", *asked]
    run(f"{what}: packages", command, log, env=english, causes=causes)
    return sorted(archives.glob("*.deb"))


def _configuration(state: Path) -> str:
    """Return apt's configuration; what the machine's own says of proxies and the like stays."""
    return f"""\
#clear APT::Architectures;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
APT::Architecture "{_ARCHITECTURE}";
APT::Architectures {{ "{_ARCHITECTURE}"; }};
APT::Get::AllowUnauthenticated "false";
APT::Install-Recommends "false";
APT::Sandbox::User "{"root" if os.geteuid() == 0 else ""}";
APT::Update::Error-Mode "any";
Acquire::AllowInsecureRepositories "false";
Acquire::Languages "none";
Acquire::Retries "3";
Dir::Cache "{state}";
Dir::Cache::archives "{state}/archives";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::Etc::sourcelist "{state}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Log "{state}";
Dir::State "{state}";
Dir::State::lists "{state}/lists";
Dir::State::status "{state}/status";
"""


def _make_links_relative(root: Path) -> None:
    """Make absolute links point into the tree: the system would follow them out of it."""
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            link = Path(folder, name)
            if link.is_symlink() and (target := link.readlink()).is_absolute():
                link.unlink()
                link.symlink_to(os.path.relpath(f"{root}{target}", folder))


def _merge_usr(root: Path) -> None:
    """Let /lib be /usr/lib, as the scripts of newer suites do, whose packages have nothing in /lib itself."""
    if not (root / "lib").exists() and (root / "usr" / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
