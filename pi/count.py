"""Counts instructions per multiply-add of a product, ours and llama.cpp's own: `python -m pi.count`.

Without the board its speed cannot be measured, but the instructions of its processor can be counted. The
same product, by ggml on one thread, runs twice under qemu with a plugin that counts: the second is one
product with the quantization of its activations, without start and packing. The count is no speed:
instructions differ in cost, and waiting for memory is not counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.platform.cpu import BOARDS, Board
from pi import BUILD, DIST, needs
from pi.console import Parser, describe_exit, err, main, out, run
from pi.manifest import check_wheels, read_manifest
from pi.needs import QEMU_WITH_PLUGINS as QEMU
from pi.recipe import llama_source
from pi.root import ensure_root
from pi.wheels import TRIPLE

TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
TOKENS = (1, 4, 8)
VARIANTS = {"armv8.2_2": "dotprod", "armv8.2_3": "dotprod and SVE", "armv8.6_1": "i8mm and SVE"}
"""Names in llama.cpp's library for ARM, and what they use."""
ROWS, COLUMNS = 1536, 1536
"""A product of Qwen2.5-1.5B."""

_HERE = Path(__file__).parent
_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")


def count(board: Board) -> dict[str, dict[str, dict[int, float]]]:
    """Return instructions a multiply-add: type -> whose kernels -> tokens -> number."""
    folder = DIST / board.name
    counter = _Counter(board.name, check_wheels(folder, read_manifest(folder)))
    emulated = ["-cpu", board.emulated]
    kernels: dict[str, _Kernels] = {
        "llama.cpp": _Kernels(emulated),
        "llama.cpp, not repacked": _Kernels(emulated, repacked=False),
        "edgespec": _Kernels(emulated, plugin=True),
    }
    return counter.table(kernels)


def count_variants() -> dict[str, dict[str, dict[int, float]]]:
    """Return the same for processors that multiply matrices of bytes, with vectors of 128 and 256 bits.

    llama.cpp's variants are those of `make wheels`' library for ARM: some have kernels for SVE. edgespec's
    kernels are for NEON, whose vectors have 128 bits. Raises EdgespecError without these wheels.
    """
    wheels = [*DIST.glob("llama_cpp_python-*aarch64.whl"), *DIST.glob("edgespec-*aarch64.whl")]
    if len(wheels) < 2:
        raise EdgespecError(f"{DIST} has no wheels for ARM; run: make wheels MACHINES=aarch64")
    kernels = {}
    for n_bytes in (16, 32):
        emulated = ["-cpu", f"max,sve-default-vector-length={n_bytes}"]
        for variant, what in VARIANTS.items():
            kernels[f"llama.cpp, {what}, {8 * n_bytes} bits"] = _Kernels(emulated, variant=variant)
    kernels["edgespec, i8mm"] = _Kernels(emulated, variant=next(iter(VARIANTS)), plugin=True)
    return _Counter("variants", wheels).table(kernels)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Whose kernels are counted, and on which processor."""

    emulated: list[str]
    variant: str = ""
    """llama.cpp's library of this name; "": it has one alone."""
    plugin: bool = False
    """Whether edgespec's kernels multiply."""
    repacked: bool = True
    """Whether llama.cpp may repack the weights."""


class _Counter:
    """Counts products with the libraries of some wheels."""

    def __init__(self, name: str, wheels: Sequence[Path]) -> None:
        self._name = name
        self._libraries = BUILD / f"libraries-{name}"
        shutil.rmtree(self._libraries, ignore_errors=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self._libraries, [one for one in archive.namelist() if ".so" in one])
        self._llama = self._libraries / "llama_cpp" / "lib"
        self._program, self._plugin = _product(self._llama), plugin()

    def table(self, kernels: Mapping[str, _Kernels]) -> dict[str, dict[str, dict[int, float]]]:
        """Return instructions a multiply-add: type -> whose kernels -> tokens -> number."""
        found: dict[str, dict[str, dict[int, float]]] = {}
        for name, number in TYPES.items():
            for whose, which in kernels.items():
                for n in TOKENS:
                    with err.status(f"{self._name}: {name}, {n} tokens, {whose}"):
                        product = [str(part) for part in (number, ROWS, COLUMNS, n)]
                        _, (_, each) = instructions(self._command(which, product))
                        of_one = round(each / (ROWS * COLUMNS * n), 3)
                        found.setdefault(name, {}).setdefault(whose, {})[n] = of_one
        return found

    def _command(self, which: _Kernels, arguments: list[str]) -> list[str | Path]:
        command: list[str | Path] = [QEMU, *which.emulated, "-L", ensure_root(), "-plugin", self._plugin]
        command += ["-E", f"LD_LIBRARY_PATH={self._llama}"]
        if which.variant:
            command += ["-E", f"GGML_BACKEND_PATH={self._llama / f'libggml-cpu-{which.variant}.so'}"]
        if which.plugin:
            arguments = [*arguments, str(self._libraries / "edgespec" / "edgespec_kernels.so")]
        elif not which.repacked:
            arguments = [*arguments, "plain"]
        return [*command, self._program, *arguments]


def _product(llama: Path) -> Path:
    """Compile the program, linked with the libraries in `llama`, and return it."""
    program = BUILD / "count_product"
    include = llama_source() / "vendor" / "llama.cpp" / "ggml" / "include"
    libraries = [next(iter(sorted(llama.glob(f"{name}.so*")))) for name in ("libggml", "libggml-base")]
    link: list[str | Path] = [*libraries, f"-Wl,-rpath-link,{llama}"]
    run(
        "compiling the product",
        [f"{TRIPLE}-gcc", *_FLAGS, f"-I{include}", _HERE / "count_product.c", "-o", program, *link],
        BUILD / "count-product.log",
    )
    return program


def plugin() -> Path:
    """Compile qemu's plugin that counts, and return it."""
    library = BUILD / "count_plugin.so"
    run(
        "compiling qemu's plugin",
        ["cc", *_FLAGS, "-shared", "-fPIC", _HERE / "count_plugin.c", "-o", library],
        BUILD / "count-plugin.log",
    )
    return library


def instructions(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> list[tuple[str, int]]:
    """Return the lines that a program writes, each with the instructions since the one before.

    It runs on one processor, because waiting threads run instructions too. Raises EdgespecError if it fails.
    """
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        ended = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, env=env, cwd=cwd
        )
    finally:
        os.sched_setaffinity(0, usable)
    lines, said = ended.stdout.splitlines(), ended.stderr.splitlines()
    counts = [int(line.split()[1]) for line in said if line.startswith("instructions ")]
    others = [line for line in said if not line.startswith("instructions ")]
    if ended.returncode:
        raise EdgespecError(f"{QEMU}: {others[-1] if others else describe_exit(ended.returncode)}")
    if not lines or len(counts) != len(lines):
        raise EdgespecError(f"{QEMU}: {len(counts)} of {len(lines)} lines counted")
    return [(line, n - before) for line, n, before in zip(lines, counts, [0, *counts[:-1]], strict=True)]


def _main() -> int:
    parser = Parser(
        prog="python -m pi.count",
        description="Count instructions a multiply-add on each board, edgespec's kernels and llama.cpp's.",
        epilog="Example: python -m pi.count",
    )
    parser.add_argument(
        "--variants",
        action="store_true",
        help="count llama.cpp's variants for ARM, of make wheels, with SVE or not",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    needs.program(QEMU, "qemu-user")
    found = {"wheels": count_variants()} if args.variants else {board.name: count(board) for board in BOARDS}
    if args.json:
        out.print_json(data=found)
        return 0
    out.print("| board | type | kernels |" + "".join(f" n = {n} |" for n in TOKENS))
    out.print("|---|---|---|" + "---|" * len(TOKENS))
    for board, types in found.items():
        for name, kernels in types.items():
            for whose, figures in kernels.items():
                row = "".join(f" {figures[n]:.3f} |" for n in TOKENS)
                out.print(f"| {board} | {name} | {whose} |{row}")
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
