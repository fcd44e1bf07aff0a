"""Wheels for boards: what this machine lacks, what a wheel needs, and the C code on a board's processor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.cpu import BOARDS
from pi import ROOT, count, manifest, recipe, wheels

QEMU = "qemu-aarch64-static"


def run_wheels(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = None if path is None else {"PATH": path}
    return subprocess.run(
        [sys.executable, "-m", "pi.wheels", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("board", ["pi4", "pi5"])
def test_no_cross_compiler(tmp_path: Path, board: str) -> None:
    ended = run_wheels(board, path=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "")
    missing = "no aarch64-linux-gnu-gcc on this machine: apt install g++-aarch64-linux-gnu"
    assert ended.stderr == f"edgespec: {missing}\n"


@pytest.mark.parametrize("arguments", [["pi3"], ["pi5", "armhf"], []])
def test_no_such_board(arguments: list[str]) -> None:
    ended = run_wheels(*arguments)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ("choose from pi4, pi5\n" in ended.stderr) if arguments else ("BOARD" in ended.stderr)


def test_help_shows_an_example() -> None:
    assert "Example: python -m pi.wheels pi4 pi5" in run_wheels("--help").stdout


@pytest.mark.parametrize(
    ("tag", "needed"),
    [
        ("manylinux_2_34_aarch64", (2, 34)),
        ("manylinux_2_36_aarch64", (2, 36)),
        ("manylinux_2_17_aarch64.manylinux2014_aarch64", (2, 17)),
    ],
)
def test_the_c_library_that_a_wheel_needs(tag: str, needed: tuple[int, int]) -> None:
    assert recipe.glibc(Path(f"edgespec-0.1.0-cp311-abi3-{tag}.whl")) == needed


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("manylinux_2_38_aarch64", ["glibc 2.38", "has 2.36", "Debian bookworm"]),
        ("manylinux_3_0_aarch64", ["glibc 3.0"]),
        ("linux_aarch64", ["auditwheel"]),
    ],
)
def test_a_wheel_that_boards_cannot_run(tag: str, words: list[str]) -> None:
    with pytest.raises(EdgespecError) as caught:
        recipe.glibc(Path(f"edgespec-0.1.0-cp311-abi3-{tag}.whl"))
    assert all(word in str(caught.value) for word in words)


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "pi4"
    folder.mkdir()
    wheel = folder / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    written = manifest.Manifest(
        "pi4",
        "aarch64",
        "2.34",
        "a compiler",
        {"cmake": "4"},
        {"a": "1"},
        {wheel.name: manifest.sha256(wheel)},
    )
    manifest.write_manifest(folder, written)
    assert manifest.read_manifest(folder) == written
    assert json.loads((folder / "manifest.json").read_text())["packages"] == {"a": "1"}
    assert manifest.check_wheels(folder, written) == [wheel]


def test_the_source_package_is_that_of_the_version_in_use() -> None:
    assert recipe.llama_version() == "0.3.36", "see whether _LLAMA_SHA256 is of this version"


def test_counting_wants_an_emulator_with_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "QEMU", "no-such-qemu")
    monkeypatch.setattr(sys, "argv", ["count"])
    with pytest.raises(EdgespecError, match="no-such-qemu on this machine: apt install qemu-user"):
        count._main()


def test_an_unknown_board_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match="pi9"):
        wheels.build(["pi4", "pi9"])


def tables_of_ggml(folder: Path) -> list[str]:
    """The ARM library with the tables of coded types, from a wheel of `make wheels`; [] without one."""
    for wheel in (ROOT / "dist").glob("llama_cpp_python-*aarch64.whl"):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if "/libggml-base.so" in name]
            return [packed.extract(names[0], folder)]
    return []


@pytest.mark.slow
def test_c_code_on_a_boards_processor(tmp_path: Path) -> None:
    """The core and the kernels; an instruction that the processor lacks would end the test.

    qemu's "max" stands for processors that multiply matrices of bytes (Snapdragon X, Graviton 3). Types whose
    tables are ggml's have their products where its ARM library is in dist/.
    """
    for program in (f"{wheels.TRIPLE}-g++", QEMU):
        if not shutil.which(program):
            pytest.skip(f"no {program} here (docs/raspberry-pi.md names the packages)")
    of_the_kernels = ["test_threads", "test_attention", "test_instruction_sets"]
    names = ["test_rows", "test_suffix", "test_philox", *of_the_kernels]
    arguments = {"test_suffix": ["300"], "test_instruction_sets": tables_of_ggml(tmp_path)}
    tools = Path(sys.executable).parent
    for command in (
        ["-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
         f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'pi/toolchain.cmake'}", f"-DPI_TRIPLE={wheels.TRIPLE}",
         "-DEDGESPEC_TESTS=ON"],
        ["--build", tmp_path, "--target", *names],
    ):  # fmt: skip
        built = subprocess.run([tools / "cmake", *command], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
    best = {"cortex-a72": "neon", "cortex-a76": "neon-dotprod", "max": "neon-i8mm"}
    assert {board.emulated for board in BOARDS} < set(best)
    for processor, instructions in best.items():
        on_processor = [QEMU, "-cpu", processor, "-L", f"/usr/{wheels.TRIPLE}"]
        for name in names:
            command = [*on_processor, tmp_path / name, *arguments.get(name, [])]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, f"{name} on {processor}: {ended.stderr}"
        assert ended.stdout == f"{instructions}\n"
