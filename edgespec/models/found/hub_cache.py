"""The hub library's cache, which llama.cpp uses, too.

    models--OWNER--REPO/refs/main                       the commit of the last download
    models--OWNER--REPO/snapshots/COMMIT/FILE.gguf      a link to the blob
    models--OWNER--REPO/blobs/SHA256                    its content; .incomplete: a stopped download

`hf:OWNER/REPO/FILE.gguf[@REVISION]` names one. A link that does not end in the repository's own blobs is not
followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import describe_os_error
from edgespec.models.entries import Entry, HubSource
from edgespec.models.found.files import Report, is_inside, model_files, real_path, refusal, unfinished_file
from edgespec.models.found.repositories import FoundModel, Listing, RepositoryFile
from edgespec.models.hub_names import hub_name, other_files
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
