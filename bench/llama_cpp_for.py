"""Builds llama.cpp's CPU backend for a lower instruction set, to compare on the same footing.

    .venv/bin/python bench/llama_cpp_for.py avx2 DIRECTORY
    LLAMA_CPP_LIB_PATH=DIRECTORY EDGESPEC_KERNELS_ISA=avx2 .venv/bin/python bench/verify_cost.py

The source is that of the llama-cpp-python that is installed, fetched by pip. Only `libggml-cpu` is compiled,
with the flags of that instruction set and nothing of this processor's own; the other libraries are links to
those installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx2": ("-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"),
}
INSTRUCTION_SETS["avx-vnni"] = (*INSTRUCTION_SETS["avx2"], "-DGGML_AVX_VNNI=ON")
"""Name as in EDGESPEC_KERNELS_ISA -> options of ggml's CMake files."""


def installed_libraries() -> Path:
    """Return the directory of the libraries that llama-cpp-python installed."""
    found = importlib.util.find_spec("llama_cpp")
    if not found or not found.origin:
        raise SystemExit("llama-cpp-python is not installed: run make")
    return Path(found.origin).parent / "lib"


def fetch_source(directory: Path) -> Path:
    """Return the source of the installed version, unpacked in `directory`."""
    version = importlib.metadata.version("llama-cpp-python")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--no-binary", ":all:", "--dest", str(directory), f"llama-cpp-python=={version}"),
        ],
        check=True,
    )
    with tarfile.open(next(directory.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(directory, filter="data")
    return next(path for path in directory.glob("llama_cpp_python-*") if path.is_dir())


def build(name: str, source: Path, directory: Path, launcher: str) -> Path:
    """Return `libggml-cpu` for an instruction set, compiled in `directory`."""
    options = [
        *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF", "-DGGML_SSE42=ON"),
        *("-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF"),
        *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF", *INSTRUCTION_SETS[name]),
    ]
    if launcher:
        options += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={launcher}" for language in ("C", "CXX")]
    subprocess.run(
        ["cmake", "-S", source / "vendor" / "llama.cpp", "-B", directory, "-G", "Ninja", *options], check=True
    )
    subprocess.run(["cmake", "--build", directory, "--target", "ggml-cpu"], check=True)
    return next(directory.rglob("libggml-cpu.so"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("isa", choices=INSTRUCTION_SETS)
    parser.add_argument("directory", type=Path, help="where the libraries are to lie; it must not exist")
    parser.add_argument("--launcher", default="", help="program that starts each compiler, such as ccache")
    args = parser.parse_args()
    installed = installed_libraries()
    with tempfile.TemporaryDirectory(prefix="edgespec-llama-cpp-") as scratch:
        built = build(args.isa, fetch_source(Path(scratch)), Path(scratch) / "build", args.launcher)
        args.directory.mkdir(parents=True)
        for library in sorted(installed.iterdir()):
            place = args.directory / library.name
            if library.name.startswith("libggml-cpu.so"):
                place.write_bytes(built.read_bytes())
            else:
                place.symlink_to(library)
    print(f"LLAMA_CPP_LIB_PATH={args.directory.absolute()} EDGESPEC_KERNELS_ISA={args.isa}")


if __name__ == "__main__":
    main()
