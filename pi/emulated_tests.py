"""The tests of the kernels and of the C core under qemu: what pi/bare.py runs in each of its emulated places.

A processor has its own instructions alone: any other ends the program. Tests of the C core, whose code is the
same for all of them, run on the plainest one only.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pi import BUILD, ROOT
from pi.console import run
from pi.needs import triple

_PYTHON_TESTS: dict[str, str] = {
    "llama/test_kernels.py": "",
    # Half a minute to two each: every architecture and every type once. The kernels alone, in
    # test_kernels.py, are compared for all types, all sizes of a batch and all numbers of threads.
    "llama/test_kernels_models.py": (
        "batch_or_the_threads and not (q4_k_m-llama or q4_0-qwen2 or q8_0-gemma3)"
    ),
    "llama/test_session.py": "",
    "apps/speech/test_whisper_model.py": "",
}
"""Python tests of the kernels, ten times slower than on a processor, and those of them that -k leaves out."""
_OF_THE_CORE: dict[str, str] = {
    "llama/test_gguf_header.py": "flipped_bits",  # a minute of Python that is the same everywhere
    "decoding/test_lossless.py": "chi_square_catches or never_accepts_less",  # 10 s each, of tests and theory
    "drafting/test_suffix.py": "",
    "decoding/test_twins.py": "",
    "llama/test_weights.py": "nothing_is_printed or left_open or failed_assertion",  # 10 s each: processes
}
_TOOLS = ("pytest", "hypothesis", "gguf")

PATIENT = "import sys, edgespec.llama.selftest; edgespec.llama.selftest.TIMEOUT_S = 600.0\n"
"""The self-test has 30 s, enough on a processor. In the emulator it is given more; its verdict is kept."""
_PYTEST = PATIENT + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def tools() -> list[str]:
    """Return the packages that the Python tests need beside the wheels, as pyproject.toml asks for them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    return [line for extra in extras.values() for line in extra if line.startswith(_TOOLS)]


def c_tests(name: str, machine: str, qemu: Sequence[str], *, plainest: bool) -> str:
    """Cross-compile the C tests, run them by `qemu`, and return ctest's summary.

    `name`: of the place, for logs and folders. Raises EdgespecError if one fails.
    """
    build, programs = BUILD / f"tests-{name}", Path(sys.executable).parent
    defines = {
        "CMAKE_MAKE_PROGRAM": programs / "ninja",
        "CMAKE_TOOLCHAIN_FILE": ROOT / "pi" / "toolchain.cmake",
        "CMAKE_CROSSCOMPILING_EMULATOR": ";".join(qemu),
        "EDGESPEC_TESTS": "ON",
        "EDGESPEC_GGML_INCLUDE": Path(sysconfig.get_path("purelib"), "include"),
        "PI_TRIPLE": triple(machine),
    }
    configure: list[str | Path] = [programs / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja"]
    configure += [f"-D{key}={value}" for key, value in defines.items()]
    run(f"{name}: configuring the C tests", configure, BUILD / f"{name}-cmake.log")
    compile_all: list[str | Path] = [programs / "cmake", "--build", build]
    run(f"{name}: compiling the C tests", compile_all, BUILD / f"{name}-compile.log")
    command: list[str | Path] = [programs / "ctest", "--test-dir", build, "--output-on-failure"]
    command += [] if plainest else ["--tests-regex", "^kernels"]
    log = BUILD / f"{name}-ctest.log"
    run(f"{name}: C tests", command, log)
    return next(line for line in log.read_text().splitlines() if "tests passed" in line)


def pytest_command(folder: Path, *, plainest: bool) -> list[str]:
    """Copy the tests into `folder`, where `import edgespec` finds what is installed, and return the program.

    It is Python's arguments, to be run in that folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", folder)
    tests = _PYTHON_TESTS | (_OF_THE_CORE if plainest else {})
    left_out = " or ".join(f"({words})" for words in tests.values() if words)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", str(folder / "pyproject.toml")]
    options += ["-m", "not pair and not slow", "-k", f"not ({left_out})"]
    return ["-c", _PYTEST, *options, *(str(folder / "tests" / name) for name in tests)]
