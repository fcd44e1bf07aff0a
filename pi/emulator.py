"""An arm64 Python under qemu's user emulation, with a board's wheels installed.

The machines that build wheels cannot run arm64 programs directly, so `python` is a script that calls qemu.
qemu looks for libraries first in the tree of pi/root.py. Child processes of that Python also run in qemu,
because sys.executable is the script.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.models.store import Store
from edgespec.platform.cpu import Board
from edgespec.platform.files import write_atomically
from pi import BUILD, DIST, ROOT
from pi.console import environment, run
from pi.dependencies import download, folder_name
from pi.manifest import check_wheels, read_manifest, sha256
from pi.needs import QEMU

_PYTHON = "3.11"
_TOOLS = ("pytest", "hypothesis", "gguf", "matplotlib")
"""Packages that the tests need in addition to the wheels; pyproject.toml has the versions."""


@dataclass(frozen=True, slots=True)
class Emulator:
    """An arm64 Python with a board's wheels, run with that board's instructions alone."""

    board: Board
    root: Path
    """The file tree of pi/root.py."""

    @property
    def venv(self) -> Path:
        """Where the wheels are installed."""
        return BUILD / f"venv-{self.board.name}"

    def qemu(self, board: Board | None = None) -> list[str | Path]:
        """Return the beginning of a command that runs an arm64 program, by default on this board."""
        return [QEMU, "-cpu", (board or self.board).emulated, "-L", self.root]

    def log(self, step: str) -> Path:
        """Return where a step's output goes."""
        return BUILD / f"{self.board.name}-{step}.log"

    def environment(self) -> dict[str, str]:
        """Return the environment of its programs."""
        return environment(
            EDGESPEC_MODELS_DIR=str(Store.default().root),
            XDG_CACHE_HOME=str(BUILD / f"cache-{self.board.name}"),
            OMP_WAIT_POLICY="passive",  # waiting threads would take processor time from the others
        )

    def run(self, what: str, step: str, *command: str | Path) -> str:
        """Run a program of the venv and return its output. Raises EdgespecError if it fails."""
        program = [self.venv / "bin" / command[0], *command[1:]]
        # In a folder without the repository's sources, which Python would find first.
        run(f"{self.board.name}: {what}", program, self.log(step), env=self.environment(), cwd=self.venv)
        return self.log(step).read_text(encoding="utf-8", errors="replace")


def install(emulator: Emulator) -> str:
    """Make the venv of a board's wheels, unless it is there, and return what is installed, in one line.

    Raises EdgespecError for wheels that are missing, damaged or not for this board, or without a network.
    """
    folder = DIST / emulator.board.name
    own = check_wheels(folder, read_manifest(folder))
    kept = BUILD / folder_name("aarch64", _PYTHON)
    # pip takes requirements in the place of files.
    others = download([*own, *map(Path, _tools())], "aarch64", _PYTHON, kept)
    stamp, made = emulator.venv / "edgespec-venv.json", _digest([*own, *others], emulator.root)
    if stamp.exists() and stamp.read_text() == made:
        return f"{len(own)} of {folder}, {len(others)} others, installed before"
    shutil.rmtree(emulator.venv, ignore_errors=True)
    python = wrapper(emulator)
    run(
        f"{emulator.board.name}: making a venv",
        [python, "-m", "venv", emulator.venv],
        emulator.log("venv"),
        env=emulator.environment(),
    )
    install = ("python", "-m", "pip", "--isolated", "install", "--no-index", "--no-compile", "--no-deps")
    emulator.run("installing wheels", "install", *install, *own, *others)
    emulator.run("checking what they need", "check", "python", "-m", "pip", "--isolated", "check")
    write_atomically(stamp, made)
    return f"{len(own)} of {folder}, {len(others)} others"


def wrapper(emulator: Emulator) -> Path:
    """Return the program that is Python to the emulated system: argv[0] is how it was called.

    It is beside Python itself, so that it finds its library; a venv's `python` is a link to it.
    """
    python = emulator.root / "usr" / "bin" / f"python-{emulator.board.name}"
    qemu = shlex.join(map(str, emulator.qemu()))
    program = shlex.quote(f"{emulator.root}/usr/bin/python3.11")
    write_atomically(python, f'#!/bin/sh\nexec {qemu} -0 "$0" {program} "$@"\n')
    python.chmod(0o755)
    return python


def _tools() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    return [line for extra in extras.values() for line in extra if line.startswith(_TOOLS)]


def _digest(wheels: Sequence[Path], root: Path) -> str:
    """Return a text that changes when the venv must be made again."""
    files = [*wheels, root / "edgespec-root.json"]
    return json.dumps({str(file): sha256(file) for file in files}, indent=2)
