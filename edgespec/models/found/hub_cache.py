"""The hub library's cache, which llama.cpp uses, too.

    models--OWNER--REPO/refs/main                       the commit of the last download
    models--OWNER--REPO/snapshots/COMMIT/FILE.gguf      a link to the blob
    models--OWNER--REPO/blobs/SHA256                    its content

`hf:OWNER/REPO/FILE.gguf[@REVISION]` names one. A link that does not end in the repository's own folder is
not followed.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import Entry, HubSource, nearest
from edgespec.models.found.files import (
    FoundModel,
    Listing,
    gguf_files,
    model_files,
    of_quantization,
    quantization_in,
    real_path,
    size_and_problem,
)
from edgespec.models.hub import list_hub_files
from edgespec.models.hub_names import HubRepository, hub_repository, other_files
from edgespec.models.sources import SourceFailure
from edgespec.models.store import Store
from edgespec.platform.files import expand_user, text_of, user_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def list_hub() -> Listing:
    """Return all models of the cache; a file that several commits have is listed once."""
    listing, seen = Listing(), set()
    for folder in sorted(_root().glob("models--*--*")):
        main = _commit(folder, "main")
        for snapshot in sorted(folder.glob("snapshots/*"), key=lambda one: (one.name != main, one.name)):
            for model in _of_snapshot(snapshot, snapshot.name == main, listing.problems):
                if real_path(model.path) not in seen:
                    seen.add(real_path(model.path))
                    listing.models.append(model)
    return listing


def find_in_hub(entry: Entry) -> FoundModel | None:
    """Return the file in the cache that an entry of `hub_entry` means; None if it is not there.

    Of a split model all parts have to be. Raises nothing: what cannot be read is not there.
    """
    source = entry.sources[0] if entry.sources else None
    if not isinstance(source, HubSource) or entry.converted:
        return None
    folder = _folder(source.repo)
    commit = source.revision if _COMMIT.fullmatch(source.revision) else _commit(folder, source.revision)
    snapshot = folder / "snapshots" / commit
    found = _found(snapshot, snapshot / source.file, is_main=source.revision == "main")
    return found if commit and not found.problem else None


def _root() -> Path:
    """Return the folder of the hub library's cache, as that library finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return expand_user(folder)
    home = os.environ.get("HF_HOME")
    return (expand_user(home) if home else user_folder("XDG_CACHE_HOME") / "huggingface") / "hub"


def _folder(repo: str) -> Path:
    return _root() / f"models--{repo.replace('/', '--')}"


def _commit(folder: Path, revision: str) -> str:
    """Return the commit that a branch or tag was at the last download; "" if there is none."""
    commit = "" if ".." in revision.split("/") else text_of(folder / "refs" / revision)
    return commit if _COMMIT.fullmatch(commit) else ""


def _of_snapshot(snapshot: Path, is_main: bool, problems: list[str]) -> list[FoundModel]:
    return [_found(snapshot, path, is_main=is_main) for path in gguf_files(snapshot, problems)]


def _found(snapshot: Path, path: Path, *, is_main: bool) -> FoundModel:
    folder = snapshot.parents[1]
    size, problem = size_and_problem(path, folder)
    hashes = [
        name if _SHA256.fullmatch(name := real_path(one).name) else None for one in (path, *other_files(path))
    ]
    repo = folder.name.removeprefix("models--").replace("--", "/")
    return FoundModel(
        name=f"hf:{repo}/{path.relative_to(snapshot).as_posix()}" + ("" if is_main else f"@{snapshot.name}"),
        source="hub",
        path=path,
        size=size,
        sha256=hashes[0],
        parts_sha256=tuple(filter(None, hashes[1:])),
        problem=problem,
    )


# ---- the file that the name of a repository means: hf:OWNER/REPO[:QUANTIZATION] ----
# What is here is looked through first, so a model that was pulled needs no network; then the hub is asked.
# Without a quantization it is Q4_K_M, Q8_0 or the first, as in llama.cpp.


def hub_file(ref: str) -> str:
    """Return the name of a file of the hub for a name of `is_hub_name`: its own, or of the repository's file.

    Raises:
        UsageError: the repository has no such quantization, several files of it, or no GGUF file at all.
        EdgespecError: the hub has no such repository, or cannot be asked.

    """
    repository = hub_repository(ref)
    if repository is None:
        return ref
    chosen = of_quantization(_files_here(repository), repository.quantization)
    file = chosen[0] if len(chosen) == 1 else _file_there(ref, repository)
    revision = "" if repository.revision == "main" else f"@{repository.revision}"
    return f"hf:{repository.repo}/{file}{revision}"


def _files_here(repository: HubRepository) -> list[str]:
    names = Store.default().hub_files(repository.repo, repository.revision)
    folder = _folder(repository.repo)
    if repository.revision == "main" and (commit := _commit(folder, "main")):
        snapshot = folder / "snapshots" / commit
        found = _of_snapshot(snapshot, True, [])
        names += [one.path.relative_to(snapshot).as_posix() for one in found if not one.problem]
    return model_files(dict.fromkeys(names))


def _file_there(ref: str, repository: HubRepository) -> str:
    repo, wanted = repository.repo, repository.quantization
    try:
        names = model_files(_listed(repo, repository.revision, os.environ.get("HF_ENDPOINT", "")))
    except SourceFailure as failure:
        cure = "" if ref.startswith("hf:") else "; if a file is meant, there is none of this name here"
        raise EdgespecError(f"{ref}: hub {repo}: {failure}{cure}") from None
    if not names:
        raise UsageError(f"{ref}: no GGUF file in this repository; look for {repo}-GGUF on the hub")
    matches = of_quantization(names, wanted)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{ref}: which of {', '.join(f'hf:{repo}/{name}' for name in matches)}?")
    types = list(dict.fromkeys(filter(None, map(quantization_in, names))))
    raise UsageError(f"{ref}: no such quantization{nearest(wanted, types)}; there are {', '.join(types)}")


@functools.lru_cache
def _listed(repo: str, revision: str, _endpoint: str) -> tuple[str, ...]:
    """Return the files of a repository; asked once in a process."""
    return tuple(list_hub_files(repo, revision))
