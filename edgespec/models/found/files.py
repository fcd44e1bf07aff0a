"""The GGUF files of a folder: walked without leaving it, split models put together.

A link to a file or a folder is followed only where it ends inside; one that leads out is reported.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import describe_os_error
from edgespec.models.hub_names import other_parts

_UNFINISHED = (".part", ".incomplete", ".downloadinprogress", ".tmp", ".crdownload", ".aria2", "-partial")
_LATER_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)

Report = Callable[[str], None]
"""Takes what cannot be looked at, in one line."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The file or files of a model in a folder."""

    path: Path
    """The first."""
    size: int
    """Bytes of all."""
    problem: str = ""
    """Why they cannot be used, in one line."""


def is_later_part(name: str) -> bool:
    """Whether a file's name is that of a split model's part after the first."""
    match = _LATER_PART.fullmatch(name)
    return match is not None and int(match[2]) != 1


def refusal(path: Path, error: OSError) -> str:
    """Return why `path` cannot be looked at, in one line that says what to do."""
    if error.errno == errno.ELOOP:
        return f"{path}: a link that leads to itself; remove it"
    if not isinstance(error, PermissionError):
        return describe_os_error(error if error.filename else OSError(error.errno, error.strerror, str(path)))
    return f"{path}: may not be read{_owner(path)}; have it made readable, or name another folder"


def _owner(path: Path) -> str:
    """Return " (it belongs to NAME)" if that can be found out."""
    for one in (path, *path.parents):
        try:
            return f" (it belongs to {pwd.getpwuid(one.stat().st_uid).pw_name})"
        except KeyError:
            return ""
        except OSError:
            continue
    return ""


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, its links followed, is in `folder`. Raises OSError if it is nowhere."""
    # Not `Path.resolve`, which raises RuntimeError for a loop of links before Python 3.13.
    return Path(os.path.realpath(path, strict=True)).is_relative_to(real_path(folder))


def real_path(path: Path) -> Path:
    """Return a path with its links followed, as far as they lead anywhere."""
    return Path(os.path.realpath(path))


def model_files(root: Path, report: Report) -> list[ModelFiles]:
    """Return the models below `root`, by path; `report` takes what cannot be looked at."""
    found: dict[Path, ModelFiles] = {}
    for path in _walk(root, report):
        found[path] = _one_file(path, root)
    firsts = {}
    later: dict[Path, list[Path]] = {}
    for path, files in found.items():
        match = _LATER_PART.fullmatch(path.name)
        if match and int(match[2]) != 1:
            later.setdefault(path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf"), []).append(path)
        else:
            firsts[path] = files
    for first, parts in later.items():
        if first not in firsts:
            size = sum(found[part].size for part in parts)
            firsts[first] = ModelFiles(first, size, f"its first part is missing, {first.name}; download it")
    return [_joined(one, found) for _, one in sorted(firsts.items())]


def _joined(first: ModelFiles, found: dict[Path, ModelFiles]) -> ModelFiles:
    others = [first.path.with_name(name) for name in other_parts(first.path.name)]
    if first.problem or not others:
        return first
    missing = next((path.name for path in others if path not in found), None)
    problem = f"its part {missing} is missing; download it" if missing else ""
    problem = problem or next((found[path].problem for path in others if found[path].problem), "")
    size = first.size + sum(found[path].size for path in others if path in found)
    return ModelFiles(first.path, size, problem)


def _one_file(path: Path, root: Path) -> ModelFiles:
    try:
        if not is_inside(path, root):
            cure = f"name {real_path(path)} itself"
            return ModelFiles(path, 0, f"a link out of {root}, which is not followed; {cure}")
        return ModelFiles(path, path.stat().st_size)
    except FileNotFoundError:
        return ModelFiles(path, 0, f"a link to {path.readlink()}, which is gone; remove it, or download it")
    except OSError as error:
        return ModelFiles(path, 0, refusal(path, error).removeprefix(f"{path}: "))


def _walk(root: Path, report: Report) -> Iterator[Path]:
    """Yield the .gguf files below `root`; each folder once, whatever links lead to it."""
    seen: set[tuple[int, int]] = set()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            facts = folder.stat()
            if (facts.st_dev, facts.st_ino) in seen:
                continue
            seen.add((facts.st_dev, facts.st_ino))
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            report(refusal(folder, error))
            continue
        for entry in listed:
            if _is_folder(entry, root, report):
                waiting.append(Path(entry.path))
            elif entry.name.lower().endswith(".gguf"):
                yield Path(entry.path)
            elif unfinished := unfinished_file(Path(entry.path)):
                report(unfinished)


def _is_folder(entry: os.DirEntry[str], root: Path, report: Report) -> bool:
    """Whether an entry is a folder to walk; `report` takes a link to one that leads out of `root`."""
    try:
        if not entry.is_dir():
            return False
        inside = not entry.is_symlink() or is_inside(Path(entry.path), root)
    except OSError:
        return False  # a link to nothing, or to itself: no folder
    if not inside:
        report(f"{entry.path}: a link out of {root}, which is not followed; {outside_cure(Path(entry.path))}")
    return inside


def outside_cure(path: Path) -> str:
    """The cure for a link that leads out of its store."""
    return f"add {real_path(path)} to `folders` in models.toml"


def unfinished_file(path: Path) -> str:
    """Return a line for a download that was stopped; "" for any other file."""
    name = path.name.lower()
    if not name.endswith(_UNFINISHED) or (".gguf" not in name and not name.endswith(".incomplete")):
        return ""
    try:
        size = path.stat().st_size
    except OSError:
        return ""
    return (
        f"{path}: a stopped download, {size / 1e9:.2f} GB so far; continue it with the program that began it"
    )
