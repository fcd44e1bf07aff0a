"""All stores of this disk: the model that a name means, and the list of all.

    ollama:NAME[:TAG]                       ollama.py
    hf:OWNER/REPO/FILE.gguf[@REVISION]      hub_cache.py, where it is there; else it is pulled (hub.py)
    [hf:]OWNER/REPO[:QUANTIZATION]          one of these files: hub_cache.py
    a path                                  files of LM Studio, llama.cpp, and the folders of models.toml
    a name                                  edgespec's own models

Names and sizes only: nothing here reads a model's header, so that a shell can complete with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.found.files import FoundModel, Listing, gguf_files, size_and_problem
from edgespec.models.found.hub_cache import list_hub
from edgespec.models.found.ollama import is_store, list_ollama, ollama_names
from edgespec.models.registry import load_registry
from edgespec.models.store import Store
from edgespec.platform.files import expand_user

_USUAL = ("~/.lmstudio/models", "~/.cache/lm-studio/models", "~/.cache/llama.cpp")
"""Where LM Studio and llama.cpp keep files."""


def list_found(folders: Sequence[Path] = ()) -> Listing:
    """Return all models on this disk: edgespec's own, other programs', those of the user's folders.

    `folders`: more folders to look into, which must exist. Raises UsageError if one does not.
    """
    registry, store, listing = load_registry(), Store.default(), Listing()
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
    for entry in registry.entries.values():
        if store.is_present(entry, registry):
            path, sha256 = store.file(entry), store.expected_sha256(entry)
            size = path.stat().st_size
            listing.models.append(
                FoundModel(name=entry.name, source="edgespec", path=path, size=size, sha256=sha256)
            )
    more = [*registry.folders, *folders]
    for part in (list_ollama(more), list_hub()):
        listing.models += part.models
        listing.problems += part.problems
    usual = map(expand_user, filter(None, (*_USUAL, os.environ.get("LLAMA_CACHE"))))
    for folder in dict.fromkeys([*usual, *(one for one in more if not is_store(one))]):
        for path in gguf_files(folder, listing.problems):
            size, problem = size_and_problem(path)
            listing.models.append(
                FoundModel(name=str(path), source="folder", path=path, size=size, problem=problem)
            )
    listing.problems += [
        f"{folder}: no such folder; correct `folders` in models.toml"
        for folder in registry.folders
        if not folder.exists()
    ]
    return listing


def other_names() -> list[str]:
    """Return the names of other programs' models, for a shell; what cannot be read has none."""
    try:
        of_hub = [model.name for model in list_hub().models if not model.problem]
        return ollama_names(load_registry().folders) + of_hub
    except (EdgespecError, OSError):
        return []
