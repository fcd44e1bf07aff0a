"""File trees of Debian, made by mmdebstrap: to build and to try wheels in.

    build/pi/root         bookworm for arm64, with what wheels are built against: Python's headers and OpenMP
    build/pi/root-SUITE   a suite for arm64 with Python alone
    build/pi/debian-SUITE-MACHINE   Debian's smallest system of this machine's kind with Python, for chroot

Those for arm64 are unpacked, not installed: none of their scripts has run. qemu finds its libraries there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pi import BUILD
from pi.console import run
from pi.needs import BOARDS, keyring, mirror, packages_of_debian

SUITES = {"bookworm": "3.11", "trixie": "3.13", "forky": "3.14"}
"""Debian's suites, and the version of Python in each."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # Debian's names
_NO_NETWORK = "the Debian mirror cannot be reached; check the network, or apt's proxy"
_CAUSES = {
    **dict.fromkeys(("Could not resolve", "Temporary failure resolving", "Could not connect"), _NO_NETWORK),
    **dict.fromkeys(("Connection failed", "connection timed out", "Network is unreachable"), _NO_NETWORK),
    "NO_PUBKEY": "the mirror's signature is not by a key in the keyring; update debian-archive-keyring",
    "is not signed": "the mirror's lists are not signed; use another mirror",
    "Release file for": "the mirror's lists are out of date; check this machine's clock",
    "does not have a Release file": "the mirror that this machine's apt uses has no such suite",
    "don't have enough free space": "the disk is full",
}
"""Signs in mmdebstrap's output, and what a user is told."""


def ensure_root(suite: str = "") -> Path:
    """Return the tree of a suite for arm64, made on first use: 33 MB are downloaded, 140 MB on disk.

    "" is bookworm's, with what wheels are built against.

    Raises EdgespecError if this is not Debian, without a network, keyring or space.
    """
    python = f"python{SUITES[suite or 'bookworm']}"
    asked = [python, f"{python}-venv", "libstdc++6", *([] if suite else [f"lib{python}-dev", "libgomp1"])]
    tree = BUILD / f"root{suite and f'-{suite}'}"
    return _tree(tree, suite or "bookworm", BOARDS, asked, "extract")


def debian(suite: str, machine: str) -> Path:
    """Return a root of Debian's smallest system with Python, for machines of this one's kind."""
    return _tree(BUILD / f"debian-{suite}-{machine}", suite, machine, ["python3", "python3-venv"], "minbase")


def _tree(tree: Path, suite: str, machine: str, packages: Sequence[str], variant: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "root.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if tree.is_dir():
            return tree
        packages_of_debian()
        new = tree.with_name(f"{tree.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        command: list[str | Path] = ["mmdebstrap", f"--variant={variant}", f"--keyring={keyring()}"]
        command += [f"--architectures={_ARCHITECTURES[machine]}", f"--include={','.join(packages)}"]
        command += [suite, new, mirror()]
        english = {**os.environ, "LC_ALL": "C.UTF-8"}
        try:
            what = f"making a tree of Debian {suite} for {machine}"
            run(what, command, BUILD / f"{tree.name}.log", env=english, causes=_CAUSES)
            _make_links_relative(new)
            for name in ("bin", "lib", "sbin"):  # from trixie on, a script of base-files would link them
                if not (new / name).exists():
                    (new / name).symlink_to(f"usr/{name}")
            new.rename(tree)
        finally:
            shutil.rmtree(new, ignore_errors=True)  # half a tree only fills the disk
    return tree


def _make_links_relative(root: Path) -> None:
    """Make absolute links point into the tree: qemu and compilers would follow them out of it."""
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            link = Path(folder, name)
            if link.is_symlink() and (target := link.readlink()).is_absolute():
                link.unlink()
                link.symlink_to(os.path.relpath(f"{root}{target}", folder))
