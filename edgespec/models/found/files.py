"""Models in the folders of this disk that edgespec did not put there, and what their files' names tell."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.entries import Entry
from edgespec.models.hub_names import other_parts

Source = Literal["edgespec", "ollama", "hub", "folder"]
"""The program, or the folder, whose file it is; "edgespec": the models folder and models.toml."""

Report = Callable[[str], None]
"""Takes what cannot be looked at, in one line."""

_UNFINISHED = re.compile(r".*(\.part|\.incomplete|\.downloadinprogress|\.tmp|\.crdownload|\.aria2)", re.I)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:i?q\d+(?:_[a-z0-9]+)*|tq\d_\d|mxfp4(?:_moe)?|nvfp4|bf16|f16|f32)(?![a-z0-9])",
    re.I,
)
_PREFERRED = ("Q4_K_M", "Q8_0")  # as llama.cpp has it, where no quantization is named


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model in a store. Its header has not been read."""

    name: str
    """The name that it has wherever a model is named."""
    source: Source
    path: Path
    """Its file; of a split model the first."""
    size: int = 0
    """Bytes on disk, of all parts."""
    sha256: str | None = None
    """Hash of its file as the store records it, in lower-case hex; None: the store records none."""
    parts_sha256: tuple[str, ...] = ()
    """The same of its other parts, if all are recorded."""
    problem: str = ""
    """Why it cannot be used and what to do, in one line; "" if it can."""
    notes: tuple[str, ...] = ()
    """Things that the store keeps beside the file and edgespec does not use, each in one line."""

    def checked(self) -> FoundModel:
        """Return itself. Raises EdgespecError for one that cannot be used."""
        if self.problem:
            raise EdgespecError(f"{self.name}: {self.problem}")
        return self


def found_entry(model: FoundModel) -> Entry:
    """Return a model as an entry: its file is used where it is, and has to have the store's own hash."""
    return Entry(name=model.name, path=model.path, sha256=model.sha256, parts=model.parts_sha256)


@dataclass(slots=True)
class Listing:
    """The models of one or more stores."""

    models: list[FoundModel] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Folders that cannot be looked at, and stopped downloads, each in one line."""


# ---- names of files ----


def model_files(names: Iterable[str]) -> list[str]:
    """Return those of a folder's files that are models: of a split one the first part, and no projectors."""
    models = (name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    return [name for name in models if not (part := _PART.fullmatch(name)) or int(part[2]) == 1]


def quantization_in(name: str) -> str:
    """Return the quantization in a file's name in capitals, such as "Q4_K_M"; "" if there is none."""
    found = _QUANTIZATION.findall(name)
    return str(found[-1]).upper() if found else ""


def of_quantization(names: Sequence[str], wanted: str) -> list[str]:
    """Return the files of the quantization `wanted`; for "" the one of all that is meant then."""
    if wanted:
        return [name for name in names if quantization_in(name) == wanted.upper()]
    best = [name for kind in _PREFERRED for name in names if quantization_in(name) == kind]
    return [*(best or names)][:1]


def file_stem(name: str) -> str:
    """Return a model's name as the beginning of a file name: "ollama:qwen3:8b" is "qwen3-8b"."""
    text = re.sub(r"^(ollama|hf):", "", name)
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text.removesuffix(".gguf"))


# ---- places ----


def refusal(path: Path, error: OSError) -> str:
    """Return why `path` cannot be looked at, in one line that says what to do."""
    if isinstance(error, PermissionError):
        return f"{path}: may not be read; have it made readable, or name another folder"
    return describe_os_error(error if error.filename else OSError(error.errno, error.strerror, str(path)))


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, its links followed, is in `folder`. Raises OSError if it is nowhere."""
    # Not `Path.resolve`, which raises RuntimeError for a loop of links before Python 3.13.
    return Path(os.path.realpath(path, strict=True)).is_relative_to(real_path(folder))


def real_path(path: Path) -> Path:
    """Return a path with its links followed, as far as they lead anywhere."""
    return Path(os.path.realpath(path))


def walked(root: Path, report: Report) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder below `root` and its files' names; `report` takes those that cannot be read.

    Links to folders are not followed.
    """

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            report(refusal(Path(error.filename), error))

    for folder, _, names in os.walk(root, onerror=refused):
        yield Path(folder), names


def gguf_files(root: Path, report: Report) -> list[Path]:
    """Return the .gguf files below a folder, of a split model the first, by path.

    `report` takes folders that cannot be read, stopped downloads, and parts without a first.
    """
    found = set[Path]()
    for folder, names in walked(root, report):
        for name in names:
            if _UNFINISHED.fullmatch(name):
                report(f"{folder / name}: a stopped download; the program that began it continues it")
            elif name.lower().endswith(".gguf"):
                found.add(folder / name)
    parts = {path: part for path in found if (part := _PART.fullmatch(path.name)) and int(part[2]) != 1}
    for path, part in sorted(parts.items()):
        first = f"{part[1]}-00001-of-{part[3]}.gguf"
        if path.with_name(first) not in found:
            report(f"{path}: its first part is missing, {first}; download it")
    return sorted(found - parts.keys())


def size_and_problem(first: Path) -> tuple[int, str]:
    """Return the bytes of a model's files, and why they cannot be used, "" if they can."""
    size = 0
    for path in (first, *map(first.with_name, other_parts(first.name))):
        try:
            size += path.stat().st_size
        except FileNotFoundError:
            what = "its file" if path == first else f"its part {path.name}"
            return size, f"{what} is missing; download it"
        except OSError as error:
            return size, refusal(path, error).removeprefix(f"{path}: ")
    return size, ""
