"""Wheels for the boards, compiled on this machine: `python -m pi.wheels pi4 pi5`.

    llama-cpp-python   from its source package, checked by hash; one wheel for each board: its kernels
                       are those of one processor, chosen when it is compiled
    edgespec           one wheel for all boards: its kernels are chosen when they are loaded
                         ->  dist/BOARD/*.whl and manifest.json

recipe.py compiles them. OpenMP's library is left to the board.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.platform.cpu import BOARDS, Board
from pi import BUILD, DIST, ROOT, needs, recipe
from pi.console import Parser, main, message
from pi.manifest import Manifest, sha256, write_manifest
from pi.needs import MACHINE
from pi.root import ensure_root

TRIPLE = needs.triple(MACHINE)
"""The platform that the compilers make code for."""

_BOARDS = {board.name: board for board in BOARDS}


def build(names: Sequence[str]) -> list[Path]:
    """Build the wheels of each of `names` and return their folders, dist/NAME.

    Raises UsageError for an unknown name and EdgespecError for what this machine lacks, or if it fails.
    """
    for name in names:
        if name not in _BOARDS:
            raise UsageError(f"{name}: not a board; choose from {', '.join(_BOARDS)}")
    needs.boards()
    with recipe.alone():
        own = edgespec_wheel()
        return [_publish(name, [own, _llama(_BOARDS[name])]) for name in names]


def edgespec_wheel() -> Path:
    """Build edgespec's wheel for all 64-bit ARM machines with Linux and return it."""
    python = ensure_root() / "usr" / "include" / "python3.11"
    # Debian's pyconfig.h of each architecture is beside its own triple.
    return recipe.build_wheel(
        recipe.edgespec(MACHINE, "all boards", BUILD / "edgespec", python, f"-I{python.parent}")
    )


def _llama(board: Board) -> Path:
    source = recipe.llama_source()
    shutil.rmtree(source / "llama_cpp" / "lib", ignore_errors=True)  # left from the previous board
    return recipe.build_wheel(
        recipe.Wheel(
            "llama-cpp-python",
            board.name,
            MACHINE,
            source,
            build_tag=f"1{board.name}",
            # Of all its files only those of one library depend on the board: the others are compiled once.
            build_dir=BUILD / "llama",
            defines={
                **recipe.llama_defines(source),
                "GGML_CPU_ARM_ARCH": f"{board.arch};-mtune={board.tune}",
                "CMAKE_PROJECT_llama_cpp_INCLUDE": str(ROOT / "llama_cpp.cmake"),
            },
            exclude=recipe.NOT_IN_LLAMA,
        )
    )


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
        machine=MACHINE,
        glibc=".".join(map(str, max(map(recipe.glibc, wheels)))),
        compiler=recipe.compiler(MACHINE),
        tools=recipe.tools(),
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
