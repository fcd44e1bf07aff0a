"""All stores of this disk: the model that a name means, and the list of all.

    ollama:NAME[:TAG]                       ollama.py
    lmstudio:PUBLISHER/REPO[:QUANTIZATION]  lmstudio.py
    llama.cpp:OWNER/REPO[:QUANTIZATION]     llama_cpp.py
    hf:OWNER/REPO/FILE.gguf[@REVISION]      hub_cache.py, where it is there; else it is pulled (hub.py)
    [hf:]OWNER/REPO[:QUANTIZATION]          one of these files: hub_repositories.py
    a path                                  files of the folders that models.toml names
    a name                                  edgespec's own models

Names and sizes only: nothing here reads a model's header, so that a shell can complete with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import Registry
from edgespec.models.found import llama_cpp, lmstudio, ollama
from edgespec.models.found.files import model_files, refusal
from edgespec.models.found.hub_cache import find_in_hub, hub_root, list_hub
from edgespec.models.found.hub_repositories import hub_file
from edgespec.models.found.llama_cpp import find_llama_cpp, list_llama_cpp, llama_cpp_root
from edgespec.models.found.lmstudio import find_lmstudio, list_lmstudio, lmstudio_roots
from edgespec.models.found.model import FoundModel, Listing
from edgespec.models.found.ollama import find_ollama, is_store, list_ollama, ollama_names, ollama_roots
from edgespec.models.hub_names import hub_entry, is_hub_name
from edgespec.models.registry import load_registry
from edgespec.models.store import Store

_PREFIXES = (ollama.PREFIX, lmstudio.PREFIX, llama_cpp.PREFIX)


def is_found_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of another program's store, by its form."""
    return ref.startswith(_PREFIXES)


def find_model(ref: str) -> FoundModel:
    """Return the model that a name of `is_found_name` means; its `problem` may say why it cannot be used.

    Raises UsageError for an unknown, ambiguous or impossible name.
    """
    if ref.startswith(ollama.PREFIX):
        return find_ollama(ref, ollama_roots(load_registry().folders))
    if ref.startswith(lmstudio.PREFIX):
        return find_lmstudio(ref, lmstudio_roots())
    return find_llama_cpp(ref, llama_cpp_root())


def stored_model(ref: str) -> FoundModel | None:
    """Return the model of another program's store that `ref` means; None for any other name.

    Raises as `find_model`.
    """
    if is_found_name(ref):
        return find_model(ref)
    return find_in_hub(hub_entry(hub_file(ref))) if is_hub_name(ref) else None


def list_found(folders: Sequence[Path] = ()) -> Listing:
    """Return all models on this disk: edgespec's own, other programs', those of the user's folders.

    `folders`: more folders to look into, which must exist. Raises UsageError if one does not.
    """
    registry = load_registry()
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
    more = list(dict.fromkeys([*registry.folders, *folders]))
    listing = list_own(registry)
    listing.add(list_ollama(ollama_roots(more)))
    listing.add(list_lmstudio(lmstudio_roots()))
    listing.add(list_hub(hub_root()))
    listing.add(list_llama_cpp(llama_cpp_root()))
    for folder in more:
        listing.add(_list_folder(folder))
    return listing


def list_own(registry: Registry) -> Listing:
    """Return edgespec's own models that are here."""
    store, listing = Store.default(), Listing()
    for entry in registry.entries.values():
        path = store.file(entry)
        if store.is_present(entry, registry):
            sha256 = store.expected_sha256(entry)
            size = path.stat().st_size
            listing.models.append(
                FoundModel(name=entry.name, source="edgespec", path=path, size=size, sha256=sha256)
            )
    return listing


def other_names() -> list[str]:
    """Return the names of other programs' models, for a shell; what cannot be read has none."""
    try:
        names = ollama_names(ollama_roots(load_registry().folders))
        for listing in (
            list_lmstudio(lmstudio_roots()),
            list_llama_cpp(llama_cpp_root()),
            list_hub(hub_root()),
        ):
            names += [model.name for model in listing.models if not model.problem]
    except (EdgespecError, OSError):
        return []
    return names


def _list_folder(folder: Path) -> Listing:
    listing = Listing()
    if is_store(folder):  # one of Ollama's, which is listed as such
        return listing
    try:
        folder.stat()
    except FileNotFoundError:
        listing.problems.append(f"{folder}: no such folder; correct `folders` in models.toml")
        return listing
    except OSError as error:
        listing.problems.append(refusal(folder, error))
        return listing
    for files in model_files(folder, listing.problems.append):
        listing.models.append(
            FoundModel(
                name=str(files.path),
                source="folder",
                path=files.path,
                size=files.size,
                problem=files.problem,
            )
        )
    return listing
