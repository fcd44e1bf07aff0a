"""The file that the name of a repository of the hub means: hf:OWNER/REPO[:QUANTIZATION].

What is here is looked through first, so that a model that was pulled needs no network; then the hub is asked.
Without a quantization it is Q4_K_M, Q8_0 or the first, as in llama.cpp.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import ModelFiles, is_later_part
from edgespec.models.found.hub_cache import cached_files, hub_root
from edgespec.models.found.repositories import RepositoryFile, is_projector, of_quantization, preferred
from edgespec.models.hub import list_hub_files
from edgespec.models.hub_names import HubRepository, hub_repository
from edgespec.models.sources import SourceFailure
from edgespec.models.store import Store


def hub_file(ref: str) -> str:
    """Return the name of a file of the hub for a name of `is_hub_name`: its own, or of the repository's file.

    Raises:
        UsageError: the repository has no such quantization, several files of it, or no GGUF file at all.
        EdgespecError: the hub has no such repository, or cannot be asked.

    """
    repository = hub_repository(ref)
    if repository is None:
        return ref
    here = of_quantization([*_files_here(repository)], repository.quantization)
    chosen = here if repository.quantization else preferred(here)
    if len(chosen) != 1:
        chosen = [_file_there(ref, repository)]
    revision = "" if repository.revision == "main" else f"@{repository.revision}"
    return f"hf:{chosen[0].full_name}{revision}"


def _files_here(repository: HubRepository) -> Iterator[RepositoryFile]:
    repo, revision = repository.repo, repository.revision
    yield from _models(repo, Store.default().hub_files(repo, revision))
    for cached in cached_files(hub_root(), lambda _: None) if revision == "main" else ():
        if cached.is_main and cached.file.repo.lower() == repo.lower() and not cached.file.files.problem:
            yield cached.file


def _file_there(ref: str, repository: HubRepository) -> RepositoryFile:
    repo, wanted = repository.repo, repository.quantization
    try:
        names = _listed(repo, repository.revision, os.environ.get("HF_ENDPOINT", ""))
    except SourceFailure as failure:
        cure = "" if ref.startswith("hf:") else "; if a file is meant, there is none of this name here"
        raise EdgespecError(f"{ref}: hub {repo}: {failure}{cure}") from None
    models = [*_models(repo, names)]
    if not models:
        raise UsageError(f"{ref}: no GGUF file in this repository; look for {repo}-GGUF on the hub")
    matches = of_quantization(models, wanted) if wanted else preferred(models)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{ref}: which of {', '.join(f'hf:{one.full_name}' for one in matches)}?")
    types = list(dict.fromkeys(one.quantization for one in models if one.quantization))
    raise UsageError(f"{ref}: no such quantization{nearest(wanted, types)}; there are {', '.join(types)}")


@functools.lru_cache
def _listed(repo: str, revision: str, _endpoint: str) -> tuple[str, ...]:
    """Return the files of a repository; asked once in a process."""
    return tuple(list_hub_files(repo, revision))


def _models(repo: str, names: Iterable[str]) -> Iterator[RepositoryFile]:
    """Yield those of a repository's files that are models: of a split one the first part."""
    for name in names:
        if name.lower().endswith(".gguf") and not is_projector(name) and not is_later_part(name):
            yield RepositoryFile(repo, name, ModelFiles(Path(name), 0))
