"""All stores of this disk: the model that a name means, and the list of all.

    ollama:NAME[:TAG]                       ollama.py
    lmstudio:PUBLISHER/REPO[:QUANTIZATION]  its folders, below
    llama.cpp:OWNER/REPO[:QUANTIZATION]     its cache, below
    hf:OWNER/REPO/FILE.gguf[@REVISION]      hub_cache.py, where it is there; else it is pulled (hub.py)
    [hf:]OWNER/REPO[:QUANTIZATION]          one of these files: hub_cache.py
    a path                                  files of the folders that models.toml names
    a name                                  edgespec's own models

Names and sizes only: nothing here reads a model's header, so that a shell can complete with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import Registry
from edgespec.models.found import ollama
from edgespec.models.found.files import Report, model_files, refusal
from edgespec.models.found.hub_cache import cached_files, find_in_hub, hub_file, hub_root, list_hub
from edgespec.models.found.ollama import find_ollama, is_store, list_ollama, ollama_names, ollama_roots
from edgespec.models.found.repositories import FoundModel, Listing, RepositoryFile, choose_file, found_models
from edgespec.models.hub_names import hub_entry, is_hub_name
from edgespec.models.registry import load_registry
from edgespec.models.store import Store
from edgespec.platform.files import expand_user, text_of, user_folder

LMSTUDIO, LLAMA_CPP = "lmstudio:", "llama.cpp:"
_PREFIXES = (ollama.PREFIX, LMSTUDIO, LLAMA_CPP)


def is_found_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of another program's store, by its form."""
    return ref.startswith(_PREFIXES)


def find_model(ref: str) -> FoundModel:
    """Return the model that a name of `is_found_name` means; its `problem` may say why it cannot be used.

    Raises UsageError for an unknown, ambiguous or impossible name.
    """
    if ref.startswith(ollama.PREFIX):
        return find_ollama(ref, ollama_roots(load_registry().folders))
    if ref.startswith(LMSTUDIO):
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


# ---- llama.cpp's own cache ($LLAMA_CACHE, ~/.cache/llama.cpp) ----
#
#     OWNER_REPO_FILE.gguf             a file that `-hf OWNER/REPO` has pulled
#     manifest=OWNER=REPO=TAG.json     which file that was
#     models--OWNER--REPO/             later versions keep them as the hub library does (hub_cache.py)
#
# `llama.cpp:OWNER/REPO[:QUANTIZATION]` names one as `-hf` does, also in the hub's cache; a file that no
# manifest names is `llama.cpp:FILE.gguf`.


class _PulledFile(msgspec.Struct, frozen=True):
    rfilename: str = ""


class _PullManifest(msgspec.Struct, frozen=True):
    ggufFile: _PulledFile = _PulledFile()  # noqa: N815 - as the file has it


def llama_cpp_root() -> Path:
    """Return the folder of llama.cpp's cache."""
    if own := os.environ.get("LLAMA_CACHE"):
        return expand_user(own)
    return user_folder("XDG_CACHE_HOME") / "llama.cpp"


def list_llama_cpp(root: Path) -> Listing:
    """Return all models of the cache."""
    listing = Listing()
    if root != hub_root():  # else they are listed as the hub's
        listing.models = found_models(LLAMA_CPP, "llama.cpp", _llama_cpp_files(root, listing.problems.append))
    return listing


def find_llama_cpp(ref: str, root: Path) -> FoundModel:
    """Return the model that `ref` means, here or in the hub's cache.

    Without a quantization it is Q4_K_M, Q8_0 or the first, as in llama.cpp. Raises UsageError for an unknown
    or ambiguous name.
    """
    caches = [root] if root == hub_root() else [root, hub_root()]
    last: UsageError | None = None
    for cache in caches:
        files = _llama_cpp_files(cache, lambda _: None)
        try:
            chosen = choose_file(ref, LLAMA_CPP, files, prefers=True)
        except UsageError as error:
            last = error if last is None or "(here:" in str(error) else last
        else:
            return found_models(LLAMA_CPP, "llama.cpp", files)[files.index(chosen)]
    assert last  # noqa: S101 - there is a cache, which did not have it
    raise last


def _llama_cpp_files(root: Path, report: Report) -> list[RepositoryFile]:
    cached = [one.file for one in cached_files(root, report) if one.is_main]
    return [*cached, *_flat_files(root, report)]


def _flat_files(root: Path, report: Report) -> Iterator[RepositoryFile]:
    names = dict(_manifests(root))
    for files in model_files(root, report):
        if files.path.parent == root:
            repo, file = names.get(files.path.name, ("", files.path.name))
            yield RepositoryFile(repo, file, files)


def _manifests(root: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name of each pulled file, and its repository and path there."""
    try:
        manifests = sorted(root.glob("manifest=*=*=*.json"))
    except OSError:
        return
    for path in manifests:
        _, owner, repo, _ = path.name.split("=", 3)
        try:
            file = msgspec.json.decode(text_of(path), type=_PullManifest).ggufFile.rfilename
        except (msgspec.MsgspecError, RecursionError):
            continue  # the file is then known by its own name
        if file:
            yield f"{owner}_{repo}_{file.replace('/', '_')}", (f"{owner}/{repo}", file)


# ---- LM Studio's models: PUBLISHER/REPO/FILE.gguf below its folder ----
#
# `lmstudio:PUBLISHER/REPO[:QUANTIZATION]` names one. The folder is the `downloadsFolder` of its
# settings.json, else `models` in its home; older versions had their home in ~/.cache/lm-studio.


def lmstudio_roots() -> list[Path]:
    """Return the folders of models that LM Studio may have, the likeliest first."""
    homes = [expand_user("~/.lmstudio"), expand_user("~/.cache/lm-studio")]
    if pointer := text_of(expand_user("~/.lmstudio-home-pointer")):
        homes.insert(0, Path(pointer))
    chosen = [folder for home in homes if (folder := _downloads_folder(home))]
    return list(dict.fromkeys([*chosen, *(home / "models" for home in homes)]))


def _downloads_folder(home: Path) -> Path | None:
    """Return the folder that the user chose in LM Studio; None: none, or settings that say nothing of it."""
    try:
        settings = msgspec.json.decode(text_of(home / "settings.json"), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    folder = settings.get("downloadsFolder")
    return expand_user(folder) if isinstance(folder, str) and folder.strip() else None


def list_lmstudio(roots: Sequence[Path]) -> Listing:
    """Return all models of the folders."""
    listing = Listing()
    listing.models = found_models(LMSTUDIO, "lmstudio", _lmstudio_files(roots, listing.problems.append))
    return listing


def find_lmstudio(ref: str, roots: Sequence[Path]) -> FoundModel:
    """Return the model that `ref` means. Raises UsageError for an unknown or ambiguous name."""
    files = _lmstudio_files(roots, lambda _: None)
    chosen = choose_file(ref, LMSTUDIO, files, prefers=False)
    return found_models(LMSTUDIO, "lmstudio", files)[files.index(chosen)]


def _lmstudio_files(roots: Sequence[Path], report: Report) -> list[RepositoryFile]:
    found: dict[str, RepositoryFile] = {}
    for root in roots:
        for files in model_files(root, report):
            parts = files.path.relative_to(root).parts
            n_repo = 2 if len(parts) > 2 else 0
            one = RepositoryFile("/".join(parts[:n_repo]), "/".join(parts[n_repo:]), files)
            found.setdefault(one.full_name.lower(), one)
    return list(found.values())
