"""Checks what make's targets need, before anything is installed: `python3 -m pi.needs TARGET...`.

It imports nothing that would have to be installed first. The tools of pi/ call the same functions, for who
starts them without make.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from pi import BUILD, DIST, ROOT

MACHINES = ("x86_64", "aarch64")
"""Kinds of processors that wheels are made for, by Linux's names."""
BOARDS = "aarch64"
"""The kind that the Raspberry Pi's processors are of."""
QEMU = "qemu-aarch64-static"
TO_COMPILE = "apt install gcc g++ python3-dev"
"""The cure where `compiler_lacking` returns something."""

_KEYRINGS = tuple(f"/usr/share/keyrings/debian-archive-keyring.{end}" for end in ("gpg", "pgp"))
_VENV = ROOT / ".venv"


def program(name: str, package: str) -> None:
    """Raise EdgespecError, which names Debian's package, if this machine does not have a program."""
    if not shutil.which(name):
        raise EdgespecError(f"no {name} on this machine: apt install {package}")


def triple(machine: str) -> str:
    """Return the platform that the compilers make code for: "aarch64-linux-gnu"."""
    return f"{machine}-linux-gnu"


def compilers(machine: str) -> None:
    """Raise EdgespecError, with what to do, if this machine cannot compile for that one."""
    if sys.platform != "linux":
        raise EdgespecError("wheels are built on Linux; this is another system")
    if found := re.search(r"[\s;\"'$\\]", str(ROOT)):
        raise EdgespecError(f"{ROOT}: compilers' flags cannot hold {found[0]!r}; move the repository")
    prefix = triple(machine)
    for tool in ("gcc", "g++", "strip"):
        package = "g++" if machine == platform.machine() else f"g++-{prefix.replace('_', '-')}"
        program(f"{prefix}-{tool}", package)


# ---- Debian ----


def keyring() -> str:
    """Return the file with the keys of Debian's archive."""
    for file in _KEYRINGS:
        if Path(file).exists():
            return file
    raise EdgespecError(
        f"{_KEYRINGS[0]}: not here, and Debian's packages cannot be checked without; "
        "apt install debian-archive-keyring"
    )


def mirror() -> str:
    """Return the mirror from which this machine's own apt takes Debian."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    command += ["Created-By: Packages", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    mirrors = [uri for uri in found if not uri.startswith("cdrom:")]
    if not mirrors:
        raise EdgespecError(
            "this machine's apt has no lists of a Debian mirror; on Debian run `apt-get update`, "
            "elsewhere use a container with Debian"
        )
    return mirrors[0]


def packages_of_debian() -> None:
    """Raise EdgespecError, with what to do, if packages for the boards cannot be had from a mirror."""
    if not shutil.which("apt-get"):
        raise EdgespecError(
            "no apt-get: Python for other machines is taken from Debian's packages; "
            "run this on Debian, a container will do"
        )
    program("mmdebstrap", "mmdebstrap")
    keyring()
    mirror()


def _tree() -> None:
    if not (BUILD / "root").is_dir():  # pi/root.py makes it once
        packages_of_debian()


# ---- wheels ----


def wheels_of(machine: str) -> list[Path]:
    """Return the wheels of dist/ for such machines. Raises EdgespecError unless there is one of each."""
    found = []
    for package in ("edgespec", "llama_cpp_python"):
        wheels = list(DIST.glob(f"{package}-*{machine}.whl"))
        if len(wheels) != 1:
            raise EdgespecError(f"{DIST}: {len(wheels)} wheels of {package} for {machine}; make wheels first")
        found += wheels
    return found


def known_machines(machines: Sequence[str]) -> None:
    """Raise UsageError for a kind of processor that there are no wheels for, or for none at all."""
    choice = f"choose from {', '.join(MACHINES)}"
    for machine in machines:
        if machine not in MACHINES:
            raise UsageError(f"{machine}: not a kind of processor; {choice}")
    if not machines:
        raise UsageError(f"MACHINES is empty; {choice}")


# ---- a release ----


def version() -> str:
    """Return edgespec's version, as pyproject.toml has it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: str = tomllib.load(file)["project"]["version"]
    return found


def notes() -> str:
    """Return what CHANGELOG.md says of this version. Raises EdgespecError if that is nothing or no date."""
    file, wanted = ROOT / "CHANGELOG.md", version()
    for section in re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        name, _, date = heading.partition(" - ")
        if name.strip("[] ") == wanted:
            if "unreleased" in date.lower():
                raise EdgespecError(f"{file}: {wanted} is unreleased there; write the day in its place")
            return text.strip()
    raise EdgespecError(f"{file}: has nothing of {wanted}, which is pyproject.toml's version")


def sources_of_release() -> None:
    """Raise EdgespecError unless this is the commit tagged with the version, unchanged, and has notes."""
    program("git", "git")
    if changed := _git("status", "--porcelain"):
        raise EdgespecError(
            f"{changed[0][3:]}: not as committed; a release is made of a commit: commit, or git stash -u"
        )
    notes()
    if (tag := f"v{version()}") not in _git("tag", "--points-at", "HEAD"):
        raise EdgespecError(f"this commit is not tagged {tag}; git tag {tag}, or change the version")


def _git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none if it fails."""
    ended = subprocess.run(
        ["git", *arguments],  # noqa: S607 - whichever git the user has
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if ended.returncode else ended.stdout.splitlines()


# ---- targets ----


def wheels(machines: Sequence[str]) -> None:
    """Raise EdgespecError or UsageError for what building wheels for these machines needs."""
    known_machines(machines)
    for machine in machines:
        if machine == "x86_64" != platform.machine():
            raise EdgespecError(
                f"wheels for {machine} are built there; this machine is {platform.machine()}: "
                f"make wheels MACHINES={platform.machine()}"
            )
        compilers(machine)
        if machine != platform.machine():
            _tree()


def release(machines: Sequence[str]) -> None:
    """Raise EdgespecError or UsageError for what building a release needs."""
    known_machines(machines)
    sources_of_release()
    wheels(machines)


def wheels_test(machines: Sequence[str]) -> None:
    """Raise EdgespecError or UsageError for what trying the wheels for these machines needs."""
    known_machines(machines)
    for machine in machines:
        wheels_of(machine)
    for machine in machines:
        if machine != platform.machine():
            program(QEMU, "qemu-user-static")
            compilers(machine)
        else:
            program("unshare", "util-linux")
            if os.geteuid() != 0:
                raise EdgespecError("roots are made and entered as root: sudo make wheels-test")
        packages_of_debian()


def _forge() -> None:
    text = os.environ.get("HOURS", "")
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 <= hours < math.inf:
        raise UsageError(f"HOURS={text}: not a number of hours; such as make forge HOURS=2")


def _sanitizers(*libraries: str) -> None:
    compiler = os.environ.get("CC", "cc")
    for name in libraries:
        command = [*shlex.split(compiler), f"-print-file-name={name}"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            found = ""
        if not Path(found).is_absolute():  # what is not found is printed as it was given
            raise EdgespecError(f"{compiler} has no {name}, which comes with gcc: apt install gcc g++")


def _machines() -> list[str]:
    return os.environ.get("MACHINES", " ".join(MACHINES)).split()


_MEMORY, _THREADS = ("libasan.so", "libubsan.so"), ("libtsan.so",)
_TARGETS: dict[str, Callable[[], None]] = {
    "wheels": lambda: wheels(_machines()),
    "release": lambda: release(_machines()),
    "wheels-test": lambda: wheels_test(_machines()),
    "pi": lambda: wheels([BOARDS]),
    "pi-test": lambda: wheels_test([BOARDS]),
    "forge": _forge,
    "sanitize": lambda: _sanitizers(*_MEMORY, *_THREADS),
    "sanitize-memory": lambda: _sanitizers(*_MEMORY),
    "sanitize-threads": lambda: _sanitizers(*_THREADS),
}
_USING = ("help", "house", "clean", "run", "serve", "images", "forge", "models-supported")
"""Targets that need nothing, or use what is installed; the others develop it, which takes a compiler."""


def compiler_lacking() -> str:
    """Return what is missing to compile, in words; "" if nothing is."""
    if not (shutil.which("cc") and shutil.which("c++")):
        return "no C and C++ compiler"
    return "" if Path(sysconfig.get_path("include"), "Python.h").exists() else "no Python.h"


def _venv(goals: Sequence[str]) -> None:
    """Raise EdgespecError if the venv is not there and cannot be made, or not be filled."""
    installed = (_VENV / "bin" / "python").exists()
    if not installed and not (find_spec("venv") and find_spec("ensurepip")):
        raise EdgespecError("no venv module; apt install python3-venv")
    if not (lacking := compiler_lacking()):
        return
    if not installed and not list(DIST.glob("edgespec-*.whl")):
        raise EdgespecError(f"{lacking}; {TO_COMPILE}, or bring dist/ of `make wheels`")
    developing = [goal for goal in goals if goal not in _USING]
    if developing and not (_VENV / ".dev").exists():
        raise EdgespecError(f"{lacking}, and make {developing[0]} compiles edgespec; {TO_COMPILE}")


def check(goals: Sequence[str]) -> None:
    """Raise EdgespecError or UsageError for the first thing that one of make's targets lacks."""
    for goal in goals:
        _TARGETS.get(goal, lambda: None)()
    _venv(goals)


def _main(goals: Sequence[str]) -> int:
    try:
        check(goals)
    except EdgespecError as error:
        sys.stderr.write(f"edgespec: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
