"""Counts instructions of Whisper's passes, on edgespec's kernels and ggml's own: `python -m pi.count_speech`.

pi/whisper_passes.py runs in each board's emulated Python, with the plugin that counts (pi/count.py): the
encoder of one window of 30 s, and passes of the decoder. ggml's own kernels run the same graphs, with the
weights as the file has them. The count is no speed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgespec.models.resolve import resolve
from edgespec.platform.cpu import BOARDS, Board
from pi import needs
from pi.console import Parser, main, message, out
from pi.count import instructions, plugin
from pi.emulator import Emulator, install
from pi.needs import QEMU_WITH_PLUGINS as QEMU
from pi.root import ensure_root

MODELS = ("whisper-base", "whisper-tiny.en")
KINDS = {"stock": "ggml", "kernels": "edgespec"}

Counts = dict[str, dict[str, dict[str, int]]]
"""Model -> whose kernels -> pass -> instructions."""

_NOT_COUNTED = ("loaded", "warm")
PASSES = Path(__file__).with_name("whisper_passes.py")


def count_speech(board: Board, models: Mapping[str, Path], library: Path) -> Counts:
    """Return the instructions of each pass on a board. `library`: qemu's plugin that counts."""
    # A processor for each board; the setting applies to this thread and the programs that it starts.
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[BOARDS.index(board) % len(usable)]})
    emulator = Emulator(board, ensure_root())
    python = emulator.root / "usr" / "bin" / "python3.11"
    command = [QEMU, *emulator.qemu()[1:], "-plugin", library, "-0", emulator.venv / "bin" / "python", python]
    command += ["-P", PASSES]  # -P: the modules beside the program are this machine's
    environment = emulator.environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found: Counts = {}
    for name, path in models.items():
        for kind, whose in KINDS.items():
            message(f"{board.name}: {name}, {whose}")
            lines = instructions([*command, path, kind], environment, emulator.venv)
            passes = {line: n for line, n in lines if line not in _NOT_COUNTED}
            found.setdefault(name, {})[whose] = passes
            message(f"{board.name}: {name}, {whose}: {passes}")
    return found


def show(board: Board, counts: Counts) -> None:
    """Print rows of a table: millions of instructions of each pass."""
    for name, kinds in counts.items():
        for whose, passes in kinds.items():
            cells = (f" {n / 1e6:,.0f} |" for n in passes.values())
            out.print(f"| {board.name} | {name} | {whose} |{''.join(cells)}")


def _main() -> int:
    parser = Parser(
        prog="python -m pi.count_speech",
        description="Count the instructions of Whisper's passes on boards, edgespec's kernels and ggml's.",
        epilog="Example: python -m pi.count_speech --models whisper-base",
    )
    parser.add_argument(
        "--models", metavar="NAMES", default=",".join(MODELS), help="names or files (default: %(default)s)"
    )
    parser.add_argument(
        "--board", choices=[board.name for board in BOARDS], help="count on one of them (default: on both)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    needs.program(QEMU, "qemu-user")
    models = {name: resolve(name) for name in args.models.split(",")}
    root = ensure_root()
    boards = [board for board in BOARDS if args.board in (None, board.name)]
    for board in boards:  # one at a time: they share folders
        install(Emulator(board, root))
    library = plugin()
    with ThreadPoolExecutor(len(boards)) as threads:
        counts = list(threads.map(lambda board: count_speech(board, models, library), boards))
    if args.json:
        out.print_json(data={board.name: found for board, found in zip(boards, counts, strict=True)})
        return 0
    names = next(iter(next(iter(counts[0].values())).values()))
    out.print("| board | model | kernels |" + "".join(f" {name} |" for name in names))
    out.print("|---|---|---|" + "---|" * len(names))
    for board, found in zip(boards, counts, strict=True):
        show(board, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
