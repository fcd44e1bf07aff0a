"""The hub library's cache, which llama.cpp uses, too.

    models--OWNER--REPO/refs/main                       the commit of the last download
    models--OWNER--REPO/snapshots/COMMIT/FILE.gguf      a link to the blob
    models--OWNER--REPO/blobs/SHA256                    its content; .incomplete: a stopped download

`hf:OWNER/REPO/FILE.gguf[@REVISION]` names one. A link that does not end in the repository's own blobs is not
followed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.entries import Entry, HubSource, nearest
from edgespec.models.found.files import (
    ModelFiles,
    Report,
    is_inside,
    is_later_part,
    model_files,
    real_path,
    refusal,
    unfinished_file,
)
from edgespec.models.found.repositories import (
    FoundModel,
    Listing,
    RepositoryFile,
    is_projector,
    of_quantization,
    preferred,
)
from edgespec.models.hub import list_hub_files
from edgespec.models.hub_names import HubRepository, hub_name, hub_repository, other_files
from edgespec.models.sources import SourceFailure
from edgespec.models.store import Store
from edgespec.platform.files import expand_user, text_of, user_folder

_REPOSITORY = re.compile(r"models--([^/]+?)--([^/]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hub_root() -> Path:
    """Return the folder of the hub library's cache, as that library finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return expand_user(folder)
    if home := os.environ.get("HF_HOME"):
        return expand_user(home) / "hub"
    return user_folder("XDG_CACHE_HOME") / "huggingface" / "hub"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A model in a snapshot of a repository."""

    file: RepositoryFile
    commit: str
    is_main: bool
    """Whether it is of the commit that `main` was at the last download."""

    @property
    def name(self) -> str:
        """Its name: hf:OWNER/REPO/FILE.gguf, with @COMMIT where it is not main's."""
        return f"hf:{self.file.full_name}" + ("" if self.is_main else f"@{self.commit}")


def list_hub(root: Path) -> Listing:
    """Return all models of the cache; a file that several commits have is listed once."""
    listing = Listing()
    seen: set[Path] = set()
    for cached in cached_files(root, listing.problems.append):
        blob = real_path(cached.file.files.path)
        if cached.file.files.problem or blob not in seen:
            seen.add(blob)
            listing.models.append(_found(cached))
    return listing


def find_in_hub(entry: Entry) -> FoundModel | None:
    """Return the file in the cache that an entry of `hub_entry` means; None if it is not there.

    Of a split model all parts have to be. Raises nothing: what cannot be read is not there.
    """
    source = entry.sources[0] if entry.sources else None
    if not isinstance(source, HubSource) or entry.converted:
        return None
    folder = hub_root() / f"models--{source.repo.replace('/', '--')}"
    commit = source.revision if _COMMIT.fullmatch(source.revision) else _reference(folder, source.revision)
    path = folder / "snapshots" / commit / source.file
    try:
        if not commit or not all(_is_whole(one, folder) for one in (path, *other_files(path))):
            return None
        sha256, size = _sha256(path), _whole_size(path)
        others = tuple(filter(None, map(_sha256, other_files(path))))
    except OSError:
        return None
    return FoundModel(
        name=hub_name(entry), source="hub", path=path, size=size, sha256=sha256, parts_sha256=others
    )


def cached_files(root: Path, report: Report) -> Iterator[CachedFile]:
    """Yield the models of all snapshots; those of `main` first."""
    for folder in _subfolders(root, report):
        match = _REPOSITORY.fullmatch(folder.name)
        if not match:
            continue
        repo, main = f"{match[1]}/{match[2]}", _reference(folder, "main")
        _report_stopped(folder, report)
        snapshots = _subfolders(folder / "snapshots", report)
        for snapshot in sorted(snapshots, key=lambda one: (one.name != main, one.name)):
            for files in model_files(snapshot, lambda _: None):
                relative = files.path.relative_to(snapshot).as_posix()
                checked = replace(files, problem=_problem(files.path, folder))
                if not checked.problem:
                    checked = replace(checked, size=_whole_size(files.path))
                file = RepositoryFile(repo, relative, checked, _sha256(files.path))
                yield CachedFile(file, snapshot.name, snapshot.name == main)


def _found(cached: CachedFile) -> FoundModel:
    file = cached.file
    return FoundModel(
        name=cached.name,
        source="hub",
        path=file.files.path,
        size=file.files.size,
        sha256=file.sha256,
        problem=file.files.problem,
    )


def _reference(folder: Path, revision: str) -> str:
    """Return the commit that a branch or tag was at the last download; "" if there is none."""
    if ".." in revision.split("/"):
        return ""
    commit = text_of(folder / "refs" / revision)
    return commit if _COMMIT.fullmatch(commit) else ""


def _subfolders(folder: Path, report: Report) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(one.path) for one in entries if one.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        report(refusal(folder, error))
        return []


def _report_stopped(folder: Path, report: Report) -> None:
    try:
        for path in sorted((folder / "blobs").glob("*.incomplete")):
            report(unfinished_file(path))
    except OSError as error:
        report(describe_os_error(error))


def _problem(path: Path, folder: Path) -> str:
    """Return why a file of a snapshot, or another part of its model, cannot be used; "" if it can."""
    for one in (path, *other_files(path)):
        try:
            if not _is_whole(one, folder):
                return (
                    f"{one.name} is a link out of {folder / 'blobs'}, which is not followed; name its target"
                )
        except FileNotFoundError:
            return f"the file of {one.name} is gone, or was never pulled whole; pull it again"
        except OSError as error:
            return refusal(one, error)
    return ""


def _is_whole(path: Path, folder: Path) -> bool:
    """Whether a file of a snapshot is one, or a link to a blob. Raises OSError if it is nowhere."""
    path.stat()
    place = folder / "blobs" if path.is_symlink() else folder
    return is_inside(path, place)


def _whole_size(path: Path) -> int:
    return sum(one.stat().st_size for one in (path, *other_files(path)))


def _sha256(path: Path) -> str | None:
    """Return the hash that the name of its blob is; None for a file that is no link to one."""
    name = real_path(path).name
    return name if _SHA256.fullmatch(name) else None


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
