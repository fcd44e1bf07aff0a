"""Boards: which one this is, what its processor has, and a wheel of llama.cpp that was built for another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from edgespec.platform.cpu import (
    BOARDS,
    board_of,
    device_model,
    device_revision,
    hwcaps,
    read_cpu,
    wheel_board,
    wheel_for_another_board,
)
from pi_trees import A72, A72_HWCAP, A76, A76_HWCAP, PI_4_2GB, PI_5_8GB, cpuinfo, plant

PI4, PI5 = BOARDS

SITECUSTOMIZE = """\
from edgespec.platform import cpu as boards

boards.auxval = {{16: {hwcap}, 26: 0}}.__getitem__
"""


def auxv(hwcap: int, hwcap2: int = 0) -> Callable[[int], int]:
    """Return what the kernel says of a processor with these bits."""
    return {16: hwcap, 26: hwcap2}.__getitem__


def install(folder: Path, build: str) -> Path:
    """Put the metadata of a wheel of llama-cpp-python there, as pip leaves them; return the folder."""
    info = folder / "llama_cpp_python-0.3.36.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 0.3.36\n")
    tag = f"Build: {build}\n" if build else ""
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: scikit-build-core 0.11.6\nRoot-Is-Purelib: false\n"
        f"{tag}Tag: py3-none-manylinux_2_34_aarch64\n"
    )
    return folder


def test_which_board(tmp_path):
    for pi, board in ((PI_4_2GB, PI4), (PI_5_8GB, PI5)):
        root = plant(tmp_path / board.name, pi)
        assert device_model(root) == pi.model, "without the NUL at its end"
        assert device_revision(root) == pi.revision
        assert board_of(device_model(root)) is board
    other = tmp_path / "other"
    (other / "proc/device-tree").mkdir(parents=True)
    (other / "proc/device-tree/model").write_bytes(b"Raspberry Pi 3 Model B Plus Rev 1.3\0")
    assert board_of(device_model(other)) is None
    nothing = tmp_path / "nothing"
    assert (device_model(nothing), device_revision(nothing), board_of("")) == ("", "", None)


@pytest.mark.parametrize(("hwcap", "features"), [(A72_HWCAP, A72), (A76_HWCAP, A76)])
def test_features_as_the_kernel_names_them(hwcap, features):
    known = {"asimd", "crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "asimddp", "sve", "i8mm", "bf16"}
    assert hwcaps(auxv(hwcap)) == known & set(features.split())


def test_features_of_newer_processors():
    assert hwcaps(auxv(1 << 22, 1 << 13 | 1 << 14)) == {"sve", "i8mm", "bf16"}
    assert hwcaps(auxv(0, 1 << 22 | 1 << 1)) == frozenset(), "each bit is of its own word"


@pytest.mark.skipif(os.uname().machine == "aarch64", reason="this is ARM")
def test_elsewhere_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda _: pytest.fail("the wheel was looked at"))
    assert hwcaps() == frozenset()
    assert wheel_for_another_board() == ""


@pytest.mark.skipif(os.uname().machine != "aarch64", reason="the kernel's word on ARM")
def test_the_kernel_agrees_with_itself():
    assert "asimd" in hwcaps()


@pytest.mark.parametrize(
    ("build", "board"), [("1pi5", PI5), ("1pi4", PI4), ("", None), ("1", None), ("1pi55", None)]
)
def test_for_which_board_a_wheel_was_built(tmp_path, monkeypatch, build, board):
    monkeypatch.syspath_prepend(install(tmp_path, build))
    assert wheel_board() is board


def test_the_wheel_of_a_pi_5_on_a_pi_4(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path, "1pi5"))
    line = wheel_for_another_board(hwcaps(auxv(A72_HWCAP)))
    assert line == (
        "llama-cpp-python was built for the Raspberry Pi 5 (Cortex-A76), this processor "
        f"({read_cpu().model}) has no atomics, asimdrdm, fphp, asimdhp, asimddp; "
        "install the wheels of dist/pi4 (make pi4)"
    )
    assert wheel_for_another_board(hwcaps(auxv(A76_HWCAP))) == ""
    assert "has no asimddp; install the wheels of dist/pi4" in wheel_for_another_board(
        hwcaps(auxv(A76_HWCAP & ~(1 << 20)))
    )
    assert wheel_for_another_board(frozenset({"asimd"})).endswith("; build llama-cpp-python on this machine")


@pytest.mark.parametrize("build", ["1pi4", ""])
@pytest.mark.parametrize("hwcap", [A72_HWCAP, A76_HWCAP])
def test_wheels_that_run(tmp_path, monkeypatch, build, hwcap):
    monkeypatch.syspath_prepend(install(tmp_path, build))
    assert wheel_for_another_board(hwcaps(auxv(hwcap))) == ""


@pytest.fixture
def board(child_environment, tmp_path):
    """Run a Python on a board with that processor, on which the wheel of a Pi 5 was installed."""

    def board(hwcap: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / f"{hwcap:x}"
        if not folder.exists():
            install(folder, "1pi5")
            (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(hwcap=hwcap))
        path = os.pathsep.join([str(folder), child_environment["PYTHONPATH"]])
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={**child_environment, "PYTHONPATH": path},
            timeout=120,
            check=False,
        )

    return board


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "edgespec", "doctor", "--json"),
        ("-m", "edgespec", "run", "a prompt"),
        ("-c", "import sys; from edgespec.cli import main; sys.exit(main())", "doctor"),
    ],
)
def test_commands_say_it_before_the_library_is_loaded(board, arguments):
    process = board(A72_HWCAP, *arguments)
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("edgespec: error: llama-cpp-python was built for the Raspberry Pi 5 (Cortex-A76)")
    assert line.endswith("; install the wheels of dist/pi4 (make pi4)")


@pytest.mark.parametrize("arguments", [("models", "list"), ("--help",)], ids=" ".join)
def test_commands_that_do_without_the_library_run(board, arguments):
    process = board(A72_HWCAP, "-m", "edgespec", *arguments)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout


def test_commands_on_the_right_board(board):
    process = board(A76_HWCAP, "-m", "edgespec", "--help")
    assert (process.returncode, process.stderr) == (0, "")
    assert "doctor" in process.stdout


def test_programs_get_the_error(board):
    program = """if True:
        import sys
        import edgespec
        try:
            edgespec.Engine
        except edgespec.EdgespecError as error:
            print(error)
        print("llama_cpp" in sys.modules)
    """
    process = board(A72_HWCAP, "-c", program)
    assert (process.returncode, process.stderr) == (0, "")
    error, loaded = process.stdout.splitlines()
    assert error.startswith("llama-cpp-python was built for")
    assert loaded == "False"


@pytest.mark.parametrize(
    ("text", "model", "count"),
    [
        (cpuinfo(A72, *["0xd08"] * 4), "Cortex-A72", 4),
        (cpuinfo(A76, *["0xd0b"] * 4, revision="d04170"), "Cortex-A76", 4),
        (cpuinfo(A76, *["0xd05"] * 4, *["0xd0b"] * 4), "Cortex-A55 and Cortex-A76", 8),
        (cpuinfo(A76, "0xd0b", "0xd05", "0xd05"), "Cortex-A76 and Cortex-A55", 3),
        (cpuinfo(A76, "0xd0c"), "Neoverse-N1", 1),
        (cpuinfo(A76, "0xfff"), "processor 0xfff of implementer 0x41", 1),
        (cpuinfo(A76, "0xd08", implementer="0x61"), "processor 0xd08 of implementer 0x61", 1),
        (
            cpuinfo("neon", "0xd08").replace(
                "BogoMIPS", "model name\t: ARMv7 Processor rev 3 (v7l)\nBogoMIPS"
            ),
            "Cortex-A72",
            1,
        ),
    ],
)
def test_cores_by_name(tmp_path, text, model, count):
    (tmp_path / "cpuinfo").write_text(text)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert (cpu.model, cpu.count) == (model, count)
    assert cpu.flags
