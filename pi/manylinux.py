"""Wheels that need no compiler, for all processors of a kind: `python -m pi.manylinux x86_64 aarch64`.

    llama-cpp-python   one wheel with ggml's CPU backend once for each set of features; which of them a
                       processor has, ggml finds out when edgespec starts. OpenMP's library lies beside them
    edgespec           one abi3 wheel: its kernels are chosen when they are loaded
                         ->  dist/*.whl

`pip install edgespec --find-links dist` then takes this llama-cpp-python: its local version satisfies the pin
and is newer than the source package of the registry. recipe.py compiles them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from pi import BUILD, DIST, ROOT, needs, recipe
from pi.console import Parser, main
from pi.needs import MACHINES
from pi.root import ensure_root

LOCAL_VERSION = "+edgespec"
"""End of the version of llama-cpp-python in these wheels: `==0.3.36` means them too, and pip prefers them."""

_COPIES = ("lib*.so.*.*", "libllama.so.0", "libggml.so", "libggml-base.so")
"""Copies of libraries under names by which nothing loads them."""

_PACKAGE_FILE, _VARIANTS_FILE = "llama_cpp/__init__.py", "vendor/llama.cpp/ggml/src/CMakeLists.txt"
_VARIANT = (
    "            ggml_add_cpu_backend_variant({} DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8{} SME)\n"
)
_SME = (_VARIANT.format("armv9.2_1   ", ""), _VARIANT.format("armv9.2_2   ", " SVE2"))
"""Variants that bookworm's GCC 12 cannot compile. Processors with SME use those with SVE2 or NEON."""

_LOADING = '''

def _load_cpu_backend():
    """Load the variant of ggml's CPU backend for this processor (added by edgespec's pi/manylinux.py).

    llama.cpp itself would look for it in the folder of the program and in the current one.
    """
    import ctypes
    import os

    from . import llama_cpp

    library = llama_cpp._lib
    library.ggml_backend_reg_count.restype = ctypes.c_size_t
    if library.ggml_backend_reg_count() == 0:
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        library.ggml_log_set(quiet, None)
        library.ggml_backend_load_all_from_path(os.fsencode(os.path.dirname(library._name)))
        library.ggml_log_set(None, None)


_load_cpu_backend()
'''
"""Code behind that package's own: programs that know nothing of edgespec find a backend too."""


def build(machines: Sequence[str]) -> list[Path]:
    """Build the wheels for each of `machines` into dist/ and return them.

    Raises UsageError for an unknown name and EdgespecError for what this machine lacks, or if it fails.
    """
    needs.wheels(machines)
    with recipe.alone():
        return [_publish(wheel) for machine in machines for wheel in (_edgespec(machine), _llama(machine))]


def _edgespec(machine: str) -> Path:
    label, build_dir = f"manylinux {machine}", BUILD / f"edgespec-{machine}"
    if machine == platform.machine():
        headers, flags = Path(sysconfig.get_path("include")), ""
    else:
        headers = ensure_root() / "usr" / "include" / "python3.11"
        flags = f"-I{headers.parent}"  # Debian's pyconfig.h of each architecture is beside its own triple
    return recipe.build_wheel(recipe.edgespec(machine, label, build_dir, headers, flags))


def _llama(machine: str) -> Path:
    source = _source()
    return recipe.build_wheel(
        recipe.Wheel(
            "llama-cpp-python",
            f"manylinux {machine}",
            machine,
            source,
            BUILD / f"llama-{machine}",
            defines={
                **recipe.llama_defines(source),
                "GGML_BACKEND_DL": "ON",
                "GGML_CPU_ALL_VARIANTS": "ON",
                "CMAKE_PROJECT_llama_cpp_INCLUDE": str(ROOT / "pi" / "variants.cmake"),
                "EDGESPEC_OPENMP": str(_openmp(machine)),
            },
            exclude=(*recipe.NOT_IN_LLAMA, *(f"llama_cpp/lib/{name}" for name in _COPIES)),
        )
    )


def _source() -> Path:
    """Return a copy of llama-cpp-python's sources that differs in version, import and variants."""
    original = recipe.llama_source()
    folder = original.with_name(f"{original.name}-variants")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(original, new, symlinks=True, copy_function=os.link)
        new.rename(folder)
    version = f'__version__ = "{recipe.llama_version()}'
    changes = {_PACKAGE_FILE: {version: version + LOCAL_VERSION}, _VARIANTS_FILE: dict.fromkeys(_SME, "")}
    for name, replaced in changes.items():
        text = (original / name).read_text()
        for old, new_text in replaced.items():
            if text.count(old) != 1:
                raise EdgespecError(f"{original / name}: not as pi/manylinux.py knows it: no {old.strip()}")
            text = text.replace(old, new_text)
        text += _LOADING if name == _PACKAGE_FILE else ""
        if text != (folder / name).read_text():  # what has not changed is not compiled again
            write_atomically(folder / name, text)
    shutil.rmtree(folder / "llama_cpp" / "lib", ignore_errors=True)  # left from another machine
    return folder


def _openmp(machine: str) -> Path:
    """Return the file of OpenMP's library, whose name is what programs look for."""
    command = [f"{needs.triple(machine)}-gcc", f"-print-file-name={recipe.OPENMP}"]
    found = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not found.is_absolute():
        raise EdgespecError(f"{command[0]} has no {recipe.OPENMP}: apt install libgomp1")
    copy = BUILD / f"openmp-{machine}" / recipe.OPENMP
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(found, copy)
    return copy


def _publish(wheel: Path) -> Path:
    """Put a wheel into dist/ in the place of older ones for the same machines, and return it."""
    machine = next(name for name in MACHINES if wheel.stem.endswith(name))
    DIST.mkdir(exist_ok=True)
    published = DIST / wheel.name
    copy = published.with_name(f".{wheel.name}.new")
    shutil.copyfile(wheel, copy)
    for old in DIST.glob(f"{wheel.name.partition('-')[0]}-*{machine}.whl"):
        old.unlink()
    copy.rename(published)
    message(f"{recipe.sha256(published)}  {published.relative_to(ROOT)}")
    return published


def _main() -> int:
    parser = Parser(
        prog="python -m pi.manylinux",
        description="Build wheels that need no compiler, for all processors of a kind, into dist/.",
        epilog="Example: python -m pi.manylinux x86_64",
    )
    parser.add_argument("machines", nargs="+", metavar="MACHINE", help=", ".join(MACHINES))
    build(parser.parse_args().machines)
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
