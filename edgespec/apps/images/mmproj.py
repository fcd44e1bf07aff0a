"""The file of a target's image encoder."""

from __future__ import annotations

from pathlib import Path


def find_mmproj(target: Path, given: str | Path | None) -> Path | None:
    """Return the file `given`, or `mmproj*.gguf` beside the file of the target; None if there is none."""
    return Path(given) if given else next(iter(sorted(target.parent.glob("mmproj*.gguf"))), None)
