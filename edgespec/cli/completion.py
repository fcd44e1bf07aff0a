"""What a shell completes where a model is expected; if nothing fits, files (docs/models.md)."""

from __future__ import annotations

import shlex
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.models.entries import Registry
from edgespec.models.registry import load_registry


def complete_model() -> list[str]:
    """Return the values of --target and --draft: the registry's models, and GGUF files of this directory."""
    files = (file.name for file in sorted(Path().glob("*.gguf")))
    # bash would insert a name as it is; one that has to be quoted is left to the shell's own completion.
    return [*_registry().entries, *(name for name in files if shlex.quote(name) == name)]


def complete_models(incomplete: str) -> list[str]:
    """Return every list that `incomplete`, with commas, becomes by one more model."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{model}" for model in complete_model()]


def complete_pair() -> list[str]:
    """Return the registry's pairs."""
    return list(_registry().pairs)


def complete_name() -> list[str]:
    """Return the registry's models and pairs."""
    return [*_registry().entries, *_registry().pairs]


def _registry() -> Registry:
    """Return the registry; an empty one if models.toml cannot be read, which the command itself will say."""
    try:
        return load_registry()
    except (EdgespecError, OSError):
        return Registry({}, {})
