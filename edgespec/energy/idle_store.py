"""Store the idle machine's power, which `edgespec energy` measured, in the user's cache.

    cache_root()/energy.json        {"format": "edgespec energy", "version": 1, "idle": {
                                        "RAPL": {"watts": 3.21, "cpu": "...", "measured": "..."}}}

A figure holds for one source on one processor model. Failures here raise nothing: each is one line for
`on_message`.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.errors import describe_os_error
from edgespec.platform.cpu import read_cpu
from edgespec.platform.files import cache_root
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, NewerFormatError, StateFile, parse_json

FORMAT, VERSION = "edgespec energy", 1

Entries = dict[str, dict[str, Any]]
"""Source name -> watts, cpu, measured."""


def idle_path() -> Path:
    """Return the file that keeps the idle power."""
    return cache_root() / "energy.json"


def load_idle_power(source: str, root: Path = Path("/"), on_message: MessageFn = silent) -> float | None:
    """Return the idle watts stored for `source` on this processor, or None."""
    try:
        entry = (_file(on_message).read() or {}).get(source)
    except OSError as error:
        on_message(f"the idle power is not known: {describe_os_error(error)}")
        return None
    if entry is None or entry["cpu"] != _cpu(root):
        return None
    return float(entry["watts"])


def store_idle_power(
    source: str, watts: float, root: Path = Path("/"), on_message: MessageFn = silent
) -> Path | None:
    """Store the idle power of `source`; return the file, or None if it cannot be written."""
    file = _file(on_message)
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    entry = {"watts": float(f"{watts:.6g}"), "cpu": _cpu(root), "measured": measured}

    def with_entry(kept: Entries | None) -> bytes:
        content = {"format": FORMAT, "version": VERSION, "idle": {**(kept or {}), source: entry}}
        return json.dumps(content, indent=2).encode() + b"\n"

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
        idle: Entries = document["idle"]
        for entry in idle.values():
            if not (0 < entry["watts"] < math.inf and isinstance(entry["cpu"], str)):
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedFileError("damaged: no power of the idle machine") from None
    return idle
