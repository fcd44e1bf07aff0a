"""The power of the idle machine, as `edgespec energy` measured it, kept in the user's cache.

    cache_root()/energy.json        {"format": "edgespec energy", "version": 1, "idle": {
                                        "RAPL": {"watts": 3.21, "cpu": "...", "measured": "..."}}}

A figure holds for one source on one model of processor. No failure here ends anything: each is one line
for `on_message`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from edgespec.errors import describe_os_error
from edgespec.platform.cpu import read_cpu
from edgespec.platform.files import cache_root, write_atomically

FORMAT, VERSION = "edgespec energy", 1
MessageFn = Callable[[str], None]
"""Takes one line worth telling the user although the work goes on."""


def silent(_line: str) -> None:
    """Take a line and tell nobody."""


def idle_path() -> Path:
    """Return the file that keeps the idle power."""
    return cache_root() / "energy.json"


def kept_idle(source: str, root: Path = Path("/"), on_message: MessageFn = silent) -> float | None:
    """Return the watts that were kept of `source` on this processor; None where there are none."""
    entry = _kept(on_message).get(source)
    if entry is None or entry["cpu"] != _cpu(root):
        return None
    return float(entry["watts"])


def keep_idle(
    source: str, watts: float, root: Path = Path("/"), on_message: MessageFn = silent
) -> Path | None:
    """Keep the idle power of `source` beside those of others; return the file, None if it cannot be."""
    path = idle_path()
    measured = datetime.now().astimezone().isoformat(timespec="seconds")
    entry = {"watts": float(f"{watts:.6g}"), "cpu": _cpu(root), "measured": measured}
    content = {"format": FORMAT, "version": VERSION, "idle": {**_kept(silent), source: entry}}
    try:
        write_atomically(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        on_message(f"the idle power could not be kept: {describe_os_error(error)}")
        return None
    return path


def _cpu(root: Path) -> str:
    return read_cpu(root / "proc/cpuinfo").model


def _kept(on_message: MessageFn) -> dict[str, dict[str, Any]]:
    """Return the entries by source; of a file that cannot be read none."""
    path = idle_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError("not of this version")
        idle: dict[str, dict[str, Any]] = content["idle"]
        for entry in idle.values():
            if not (0 < entry["watts"] < math.inf and isinstance(entry["cpu"], str)):
                raise ValueError("no power")
    except FileNotFoundError:
        return {}
    except OSError as error:
        on_message(f"the idle power is not known: {describe_os_error(error)}")
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        on_message(f"{path}: damaged or not this edgespec's; run edgespec energy to write it anew")
        return {}
    return idle
