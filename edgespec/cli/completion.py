"""Shell completion of models; if no model fits, the shell completes files (docs/start.md)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

from edgespec.decoding.choices import DrafterName
from edgespec.errors import EdgespecError
from edgespec.models.registry import Registry, load_registry


def complete_model() -> list[str]:
    """Return the values of --target and --draft: models by name, and GGUF files of this directory."""
    from edgespec.models.on_disk import other_names

    files = (file.name for file in sorted(Path().glob("*.gguf")))
    # bash inserts names unquoted, so names that need quotes are left to the shell's own completion.
    names = (name for name in (*other_names(), *files) if shlex.quote(name) == name)
    return [*_registry().entries, *names]


def complete_models(incomplete: str) -> list[str]:
    """Return `incomplete`, a comma-separated list, completed by each possible model."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{model}" for model in complete_model()]


def complete_pair() -> list[str]:
    """Return the names of pairs that a shell completes."""
    return list(_registry().pairs)


def complete_draft() -> list[str]:
    """Return the drafts that were made here."""
    from edgespec.models.draft_records import draft_records

    try:
        return [draft.name for draft in draft_records()]
    except (EdgespecError, OSError):
        return []


def complete_drafter() -> list[str]:
    """Return the drafters that can be named without a class."""
    from edgespec.platform.plugins import offered

    return [*get_args(DrafterName), *offered("edgespec.drafters")]


def complete_name() -> list[str]:
    """Return the registry's models and pairs."""
    return [*_registry().entries, *_registry().pairs]


def _registry() -> Registry:
    """Return the registry, empty if models.toml cannot be read; the command itself reports that."""
    try:
        return load_registry()
    except (EdgespecError, OSError):
        return Registry({}, {})
