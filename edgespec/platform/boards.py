"""Boards: the Raspberry Pis that wheels are built for (see docs/raspberry-pi.md)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.platform.cpu import read_cpu
from edgespec.platform.files import lines_of, text_of

_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAPS = {
    "asimd": (_AT_HWCAP, 1),
    "crc32": (_AT_HWCAP, 7),
    "atomics": (_AT_HWCAP, 8),
    "fphp": (_AT_HWCAP, 9),
    "asimdhp": (_AT_HWCAP, 10),
    "asimdrdm": (_AT_HWCAP, 12),
    "asimddp": (_AT_HWCAP, 20),
    "sve": (_AT_HWCAP, 22),
    "i8mm": (_AT_HWCAP2, 13),
    "bf16": (_AT_HWCAP2, 14),
}
"""Feature name in /proc/cpuinfo: its entry in the auxiliary vector, and its bit there."""


@dataclass(frozen=True, slots=True)
class Board:
    """A kind of board, as far as its wheels depend on it."""

    name: str
    """Name in `make pi5` and `dist/pi5`. The llama.cpp wheel for it has the build tag "1" + name."""
    title: str
    models: tuple[str, ...]
    """Prefixes of /proc/device-tree/model on the boards that these wheels suit best."""
    arch: str
    """GCC's -march for llama.cpp's kernels, which are not chosen at run time."""
    tune: str
    """GCC's -mtune."""
    hwcaps: tuple[str, ...]
    """Features in /proc/cpuinfo that code for `arch` needs."""
    emulated: str
    """qemu's -cpu."""


BOARDS = (
    Board(
        name="pi4",
        title="Raspberry Pi 4 (Cortex-A72)",
        models=("Raspberry Pi 4", "Raspberry Pi Compute Module 4"),  # 4, 400, CM4
        arch="armv8-a+crc",
        tune="cortex-a72",
        hwcaps=("asimd", "crc32"),
        emulated="cortex-a72",
    ),
    Board(
        name="pi5",
        title="Raspberry Pi 5 (Cortex-A76)",
        models=("Raspberry Pi 5", "Raspberry Pi Compute Module 5"),  # 5, 500, CM5
        arch="armv8.2-a+dotprod+fp16",
        tune="cortex-a76",
        hwcaps=("asimd", "crc32", "atomics", "asimdrdm", "fphp", "asimdhp", "asimddp"),
        emulated="cortex-a76",
    ),
)
"""64-bit boards, fewest features first. Their wheels also run on other boards with these features."""


def device_model(root: Path = Path("/")) -> str:
    """Return the device's model, such as "Raspberry Pi 5 Model B Rev 1.0"; "" if the kernel names none."""
    return text_of(root / "proc/device-tree/model").strip("\0 \n")


def device_revision(root: Path = Path("/")) -> str:
    """Return a Raspberry Pi's revision code, such as "c03114"; "" on other machines."""
    pairs = (line.partition(":") for line in lines_of(root / "proc/cpuinfo"))
    return next((value.strip() for name, _, value in pairs if name.strip() == "Revision"), "")


def board_of(model: str) -> Board | None:
    """Return the board with this `device_model`, or None."""
    return next((board for board in BOARDS if model.startswith(board.models)), None)


def auxval(kind: int) -> int:
    """Return an entry of the auxiliary vector, such as AT_HWCAP; 0 unless the process is 64-bit ARM."""
    if os.uname().machine != "aarch64" or sys.maxsize < 1 << 32:  # the bits mean other features in 32-bit
        return 0
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(getauxval(kind))


def hwcaps(source: Callable[[int], int] | None = None) -> frozenset[str]:
    """Return the names of the processor features this process may use; empty unless 64-bit ARM.

    Not from /proc/cpuinfo: under qemu's user emulation that describes the host. `source`: default `auxval`.
    """
    source = source or auxval
    words = {kind: source(kind) for kind in (_AT_HWCAP, _AT_HWCAP2)}
    return frozenset(name for name, (kind, bit) in _HWCAPS.items() if words[kind] >> bit & 1)


def wheel_board() -> Board | None:
    """Return the board that the installed llama-cpp-python wheel was built for; None if for none of them."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        lines = (distribution("llama-cpp-python").read_text("WHEEL") or "").splitlines()
    except PackageNotFoundError:
        return None
    builds = {f"Build: 1{board.name}": board for board in BOARDS}
    return next((builds[line] for line in lines if line in builds), None)


def wheel_for_another_board(features: frozenset[str] | None = None) -> str:
    """Return one line to the user if the installed llama.cpp would crash here on an illegal instruction.

    Else "". `features` of this processor: default `hwcaps`; if empty, as on x86, nothing is checked.
    """
    features = hwcaps() if features is None else features
    board = wheel_board() if features else None
    missing = [name for name in board.hwcaps if name not in features] if board else []
    if board is None or not missing:
        return ""
    fitting = [other.name for other in BOARDS if features.issuperset(other.hwcaps)]
    cure = (
        f"install the wheels of dist/{fitting[-1]} (make {fitting[-1]})"
        if fitting
        else "build llama-cpp-python on this machine"
    )
    return (
        f"llama-cpp-python was built for the {board.title}, this processor ({read_cpu().model}) has no "
        f"{', '.join(missing)}; {cure}"
    )
