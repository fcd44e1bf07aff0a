"""Models in the folders of this disk that edgespec did not put there, and what their files' names tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry
from edgespec.models.hub_names import other_files

Source = Literal["edgespec", "ollama", "hub", "folder"]
"""The program, or the folder, whose file it is; "edgespec": the models folder and models.toml."""

_PART = re.compile(r".*-(\d{5})-of-\d{5}\.gguf", re.IGNORECASE | re.DOTALL)
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
    """Folders that cannot be looked at, each in one line."""


# ---- names of files ----


def _is_first(name: str) -> bool:
    part = _PART.fullmatch(name)
    return name.lower().endswith(".gguf") and (part is None or int(part[1]) == 1)


def model_files(names: Iterable[str]) -> list[str]:
    """Return those of a folder's files that are models: of a split one the first part, and no projectors."""
    return [name for name in names if _is_first(name) and "mmproj" not in name.lower()]


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


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, its links followed, is in `folder`. Raises OSError if it is nowhere."""
    # Not `Path.resolve`, which raises RuntimeError for a loop of links before Python 3.13.
    return Path(os.path.realpath(path, strict=True)).is_relative_to(real_path(folder))


def real_path(path: Path) -> Path:
    """Return a path with its links followed, as far as they lead anywhere."""
    return Path(os.path.realpath(path))


def walked(root: Path, problems: list[str]) -> Iterator[Path]:
    """Yield the files below a folder; `problems` takes folders that cannot be read.

    Links to folders are not followed.
    """

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            problems.append(f"{error.filename}: {error.strerror}; have it made readable, or name another")

    for folder, _, names in os.walk(root, onerror=refused):
        yield from (Path(folder, name) for name in names)


def gguf_files(root: Path, problems: list[str]) -> list[Path]:
    """Return the .gguf files below a folder, of a split model the first, by path; `problems` as `walked`."""
    return sorted(path for path in walked(root, problems) if _is_first(path.name))


def size_and_problem(first: Path, folder: Path | None = None) -> tuple[int, str]:
    """Return the bytes of a model's files, and why they cannot be used, "" if they can.

    `folder`: links that lead out of it are not followed.
    """
    size = 0
    for path in (first, *other_files(first)):
        try:
            size += path.stat().st_size
            if folder and not is_inside(path, folder):
                return size, f"{path} is a link out of {folder}, which is not followed"
        except FileNotFoundError:
            return size, f"its file {path} is missing; download it"
        except OSError as error:
            return size, f"{path}: {error.strerror}"
    return size, ""
