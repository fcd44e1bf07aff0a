"""Wheels for boards: what a wheel needs, and the C code on a board's processor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from pi import ROOT, recipe
from pi.needs import BOARDS, QEMU, triple

TRIPLE = triple(BOARDS)


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


def test_the_source_package_is_that_of_the_version_in_use() -> None:
    assert recipe.llama_version() == "0.3.36", "see whether _LLAMA_SHA256 is of this version"


def test_a_wheel_has_no_sources_of_c(tmp_path: Path) -> None:
    """Of the package alone: nothing is compiled."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    settings = ["-C", "wheel.cmake=false", "-C", "wheel.py-api=py3", "-C", f"build-dir={tmp_path / 'build'}"]
    subprocess.run([*pip, *settings, "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("edgespec-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "edgespec/apps/speech/options.py" in names
    assert not [name for name in names if "/csrc/" in name]


def tables_of_ggml(folder: Path) -> list[str]:
    """The ARM library with the tables of coded types, from a wheel of `make wheels`; [] without one."""
    for wheel in (ROOT / "dist").glob("llama_cpp_python-*aarch64.whl"):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if "/libggml-base.so" in name]
            return [packed.extract(names[0], folder)]
    return []


def test_c_code_on_a_boards_processor(tmp_path: Path) -> None:
    """The core and the kernels; an instruction that the processor lacks would end the test.

    qemu's "max" stands for processors that multiply matrices of bytes (Snapdragon X, Graviton 3). Types whose
    tables are ggml's have their products where its ARM library is in dist/.
    """
    for program in (f"{TRIPLE}-g++", QEMU):
        if not shutil.which(program):
            pytest.skip(f"no {program} here (docs/start.md names the packages)")
    of_the_kernels = ["test_threads", "test_attention", "test_instruction_sets"]
    names = ["test_rows", "test_suffix", "test_philox", *of_the_kernels]
    arguments = {"test_suffix": ["300"], "test_instruction_sets": tables_of_ggml(tmp_path)}
    tools = Path(sys.executable).parent
    for command in (
        ["-S", ROOT, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
         f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'pi/toolchain.cmake'}", f"-DPI_TRIPLE={TRIPLE}",
         "-DEDGESPEC_TESTS=ON"],
        ["--build", tmp_path, "--target", *names],
    ):  # fmt: skip
        built = subprocess.run([tools / "cmake", *command], capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
    best = {"cortex-a72": "neon", "cortex-a76": "neon-dotprod", "max": "neon-i8mm"}
    for processor, instructions in best.items():
        on_processor = [QEMU, "-cpu", processor, "-L", f"/usr/{TRIPLE}"]
        for name in names:
            command = [*on_processor, tmp_path / name, *arguments.get(name, [])]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, f"{name} on {processor}: {ended.stderr}"
        assert ended.stdout == f"{instructions}\n"
