"""Models that are split over several files: NAME-00001-of-00003.gguf is the first, and stands for all."""

from __future__ import annotations

import re
from pathlib import Path

_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def other_parts(first: str) -> list[str]:
    """Return the names of the files that complete the first part of a split model; [] for any other file."""
    match = _FIRST.fullmatch(first)
    n = int(match[2]) if match else 1
    return [f"{match[1]}-{no:05}-of-{n:05}.gguf" for no in range(2, n + 1)] if match else []


def other_files(first: Path) -> list[Path]:
    """Return the paths of those files, which may not exist."""
    return [first.with_name(name) for name in other_parts(first.name)]
