"""Store the idle machine's power, which `edgespec energy` measured, in the user's cache.

    cache_root()/energy.json        {"format": "edgespec energy", "version": 1, "idle": {
                                        "RAPL": {"watts": 3.21, "cpu": "...", "measured": "..."}}}

A figure holds for one source on one processor model. Failures here raise nothing: each is one line for
`on_message`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from edgespec.errors import describe_os_error
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import IDLE_POWER
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, NewerFormatError, StateFile, parse_json

FORMAT, VERSION = "edgespec energy", 1


class _IdleFigure(msgspec.Struct, frozen=True):
    watts: Annotated[float, msgspec.Meta(gt=0)]
    cpu: str
    measured: str = ""


Entries = dict[str, _IdleFigure]
"""Source name -> figure."""


def idle_path() -> Path:
    """Return the file that keeps the idle power."""
    return IDLE_POWER.path()


def load_idle_power(source: str, root: Path = Path("/"), on_message: MessageFn = silent) -> float | None:
    """Return the idle watts stored for `source` on this processor, or None."""
    try:
        entry = (_file(on_message).read() or {}).get(source)
    except OSError as error:
        on_message(f"the idle power is not known: {describe_os_error(error)}")
        return None
    return entry.watts if entry and entry.cpu == _cpu(root) else None


def store_idle_power(
    source: str, watts: float, root: Path = Path("/"), on_message: MessageFn = silent
) -> Path | None:
    """Store the idle power of `source`; return the file, or None if it cannot be written."""
    file = _file(on_message)
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    entry = _IdleFigure(float(f"{watts:.6g}"), _cpu(root), measured)

    def with_entry(kept: Entries | None) -> bytes:
        content = {"format": FORMAT, "version": VERSION, "idle": {**(kept or {}), source: entry}}
        return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"

    try:
        file.update(with_entry)
    except (OSError, NewerFormatError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        on_message(f"the idle power could not be kept: {reason}")
        return None
    return file.path


def _cpu(root: Path) -> str:
    return read_cpu(root / "proc/cpuinfo").model


def _file(on_message: MessageFn) -> StateFile[Entries]:
    return StateFile(idle_path(), _parse, on_message=on_message)


def _parse(data: bytes) -> Entries:
    document = parse_json(idle_path(), data, form=FORMAT, version=VERSION)
    try:
        return msgspec.convert(document["idle"], Entries)
    except (KeyError, msgspec.ValidationError):
        raise DamagedFileError("damaged: no power of the idle machine") from None
