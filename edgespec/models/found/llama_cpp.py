"""llama.cpp's own cache ($LLAMA_CACHE, ~/.cache/llama.cpp).

    OWNER_REPO_FILE.gguf             a file that `-hf OWNER/REPO` has pulled
    manifest=OWNER=REPO=TAG.json     which file that was
    models--OWNER--REPO/             later versions keep them as the hub library does (hub_cache.py)

`llama.cpp:OWNER/REPO[:QUANTIZATION]` names one as `-hf` does, also in the hub's cache; a file that no
manifest names is `llama.cpp:FILE.gguf`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgespec.errors import UsageError
from edgespec.models.found.files import Report, model_files
from edgespec.models.found.hub_cache import cached_files, hub_root
from edgespec.models.found.model import FoundModel, Listing
from edgespec.models.found.repositories import RepositoryFile, choose_file, found_models
from edgespec.platform.files import expand_user, text_of, user_folder

PREFIX = "llama.cpp:"


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
        listing.models = found_models(PREFIX, "llama.cpp", _files(root, listing.problems.append))
    return listing


def find_llama_cpp(ref: str, root: Path) -> FoundModel:
    """Return the model that `ref` means, here or in the hub's cache.

    Without a quantization it is Q4_K_M, Q8_0 or the first, as in llama.cpp. Raises UsageError for an unknown
    or ambiguous name.
    """
    caches = [root] if root == hub_root() else [root, hub_root()]
    last: UsageError | None = None
    for cache in caches:
        files = _files(cache, lambda _: None)
        try:
            chosen = choose_file(ref, PREFIX, files, prefers=True)
        except UsageError as error:
            last = error if last is None or "(here:" in str(error) else last
        else:
            return found_models(PREFIX, "llama.cpp", files)[files.index(chosen)]
    assert last  # noqa: S101 - there is a cache, which did not have it
    raise last


def _files(root: Path, report: Report) -> list[RepositoryFile]:
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
