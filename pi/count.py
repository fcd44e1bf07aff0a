"""Counts instructions per multiply-add of a product, ours and llama.cpp's own: `python -m pi.count`.

Without the board its speed cannot be measured, but the instructions of its processor can be counted. The same
product, by ggml on one thread, runs once and three times under qemu with a counting plugin: half of the
difference is one product with the quantization of its activations, without start and packing. The count is no
speed: instructions differ in cost, and waiting for memory is not counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.platform.boards import BOARDS, Board
from pi.console import BUILD, Parser, err, main, out, run
from pi.manifest import DIST, check_wheels, read_manifest
from pi.recipe import llama_source
from pi.root import ensure_root
from pi.wheels import TRIPLE

QEMU = "qemu-aarch64"
"""The one that loads plugins; Debian's static one does not."""

TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
TOKENS = (1, 4, 8)
ROWS, COLUMNS = 1536, 1536
"""A product of Qwen2.5-1.5B."""

_HERE = Path(__file__).parent


def count(board: Board) -> dict[str, dict[str, dict[int, float]]]:
    """Return instructions a multiply-add: type -> whose kernels -> tokens -> number."""
    folder = DIST / board.name
    libraries = BUILD / f"libraries-{board.name}"
    shutil.rmtree(libraries, ignore_errors=True)
    for wheel in check_wheels(folder, read_manifest(folder)):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(libraries, [name for name in archive.namelist() if ".so" in name])
    llama = libraries / "llama_cpp" / "lib"
    program, plugin = BUILD / "count_product", BUILD / "count_plugin.so"
    include = llama_source() / "vendor" / "llama.cpp" / "ggml" / "include"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror")
    link = (f"-L{llama}", "-lggml", "-lggml-base", f"-Wl,-rpath-link,{llama}")
    run(
        "compiling the product",
        [f"{TRIPLE}-gcc", *flags, f"-I{include}", _HERE / "count_product.c", "-o", program, *link],
        BUILD / "count-product.log",
    )
    run(
        "compiling qemu's plugin",
        ["cc", *flags, "-shared", "-fPIC", _HERE / "count_plugin.c", "-o", plugin],
        BUILD / "count-plugin.log",
    )
    emulator: list[str | Path] = [QEMU, "-cpu", board.emulated, "-L", ensure_root(), "-plugin", plugin]
    command = [*emulator, "-E", f"LD_LIBRARY_PATH={llama}", program]
    own = libraries / "edgespec" / "edgespec_kernels.so"
    found: dict[str, dict[str, dict[int, float]]] = {}
    plugins: dict[str, list[str | Path]] = {"llama.cpp": [], "edgespec": [own]}
    for name, number in TYPES.items():
        for whose, more in plugins.items():
            for n in TOKENS:
                with err.status(f"{board.name}: {name}, {n} tokens, {whose}"):
                    product = [str(part) for part in (number, ROWS, COLUMNS, n)]
                    once, thrice = (_instructions([*command, *product, str(k), *more]) for k in (1, 3))
                    each = (thrice - once) / 2 / (ROWS * COLUMNS * n)
                    found.setdefault(name, {}).setdefault(whose, {})[n] = round(each, 3)
    return found


def _instructions(command: list[str | Path]) -> int:
    """Return the plugin's count; on one processor, because waiting threads run instructions too."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, usable)
    lines = ended.stderr.splitlines()
    if ended.returncode or not lines or not lines[-1].startswith("instructions "):
        raise EdgespecError(f"{QEMU}: {lines[-1] if lines else f'exit code {ended.returncode}'}")
    return int(lines[-1].split()[1])


def _main() -> int:
    parser = Parser(
        prog="python -m pi.count",
        description="Count instructions a multiply-add on each board, edgespec's kernels and llama.cpp's.",
        epilog="Example: python -m pi.count",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if not shutil.which(QEMU):
        raise EdgespecError(f"no {QEMU} on this machine: apt install qemu-user")
    found = {board.name: count(board) for board in BOARDS}
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
