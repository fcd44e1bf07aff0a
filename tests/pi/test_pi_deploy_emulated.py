"""Deploying to a Raspberry Pi 4 that is emulated: a real ssh and sshd, qemu, the wheels of dist/pi4.

What a session on the board asks of the system is answered from the tree of a Raspberry Pi 4, which the
emulated Python sees too. Its shell, tar and the like are this machine's.
"""

import re
import shutil
import subprocess
import sys

import pytest

from edgespec.errors import EdgespecError
from edgespec.models.resolve import resolve
from edgespec.models.store import Store
from edgespec.platform.cpu import BOARDS
from pi import DIST, ROOT, emulator
from pi.manifest import check_wheels, read_manifest
from pi.root import ensure_root
from pi_trees import PI_4_4GB, plant
from sshd import Board, serving

PI4 = BOARDS[0]
MODEL = "smollm2-135m-q4_1"


class EmulatedPi4(Board):
    """A board whose Python is an arm64 one, with the instructions of a Cortex-A72."""

    def __init__(self, folder, packages):
        super().__init__(folder)
        root = plant(self.fakes / "root", PI_4_4GB)
        python = emulator.wrapper(emulator.Emulator(PI4, root))
        lay_under(root, packages)
        (self.programs / emulator.QEMU).symlink_to(shutil.which(emulator.QEMU))
        self.program("python3", f'exec {python} "$@"')
        # Threads that wait would keep the emulator from the others, and the self-test has 20 s.
        self.environment["OMP_WAIT_POLICY"] = "passive"

    @property
    def installed(self):
        """The venv in use."""
        return (self.home / "edgespec/venv").readlink()

    def run(self, *arguments, **environment):
        """What edgespec prints on the board, after it has ended with 0."""
        command = [self.home / "edgespec/venv/bin/edgespec", *arguments]
        return run(*command, env=self.environment | environment, cwd=self.home)


def lay_under(folder, lower):
    """Have links in a folder to all that it lacks and another has."""
    for entry in lower.iterdir():
        own = folder / entry.name
        if own.is_dir():
            lay_under(own, entry)
        elif not own.exists():
            own.symlink_to(entry)


def run(*command, **options):
    """What a command prints, after it has ended with 0."""
    process = subprocess.run(command, **options, capture_output=True, text=True, check=False)
    if "the package registry cannot be reached" in process.stderr:
        pytest.skip(process.stderr.splitlines()[-1])
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture
def board(tmp_path):
    if not shutil.which(emulator.QEMU):
        pytest.skip(f"{emulator.QEMU} is not installed (apt install qemu-user-static)")
    try:
        check_wheels(DIST / PI4.name, read_manifest(DIST / PI4.name))
        packages = ensure_root("arm64")
        resolve(MODEL)
    except EdgespecError as error:
        pytest.skip(str(error))
    return EmulatedPi4(tmp_path / "board", packages)


@pytest.mark.slow
def test_the_wheels_are_installed_checked_and_run(board, tmp_path):
    """Twice, the second in the place of the first; three minutes."""
    with serving(tmp_path / "sshd", board) as server:
        deploy = (sys.executable, "-m", "pi.deploy", *server.arguments)
        doctor = run(*deploy, cwd=ROOT)
        assert doctor.startswith("cpu      Cortex-A72\n         asimd; not asimdhp asimddp i8mm sve bf16\n")
        assert f"board    {PI_4_4GB.model}, " in doctor
        assert re.search(r"^version  edgespec .* for pi4$", doctor, re.MULTILINE)
        # An emulator may be too slow for the self-test; a wrong result of it is no such thing.
        assert re.search(r"^ +self-test (passed|did not end within \d+ s) \(neon, ", doctor, re.MULTILINE)
        first = board.installed
        assert run(*deploy, cwd=ROOT).startswith("cpu      Cortex-A72\n")
    assert board.installed != first
    assert sorted(path.name for path in (board.home / "edgespec").iterdir()) == [str(board.installed), "venv"]

    options = ("--raw", "--no-cache", "--drafter", "none", "--temp", "0", "-n", "4")
    models = str(Store.default().root)
    said = board.run("run", "--target", MODEL, *options, "one two", EDGESPEC_MODELS_DIR=models)
    assert said.strip()
