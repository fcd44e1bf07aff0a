"""Tiny random models that keep a state: hybrid and recurrent ones."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from architecture_table import HYBRID, MTP, RECURRENT
from tiny_models import ARCHITECTURES, make_tiny

STATEFUL = [
    name for name, one in ARCHITECTURES.items() if {HYBRID, RECURRENT} & {*one.kinds} and MTP not in one.kinds
]

SOME = ["lfm2", "mamba2"]
"""One whose states the library keeps snapshots of, and one without."""

_folder = tempfile.TemporaryDirectory(prefix="edgespec-tiny-")


@cache
def tiny(name: str, seed: int = 1) -> Path:
    """Return the file of a tiny model of an architecture; one for all tests of a process."""
    return make_tiny(name, Path(_folder.name) / f"{name}-{seed}.gguf", seed=seed)
