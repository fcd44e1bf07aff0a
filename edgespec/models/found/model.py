"""One model that was found in a store, and the listing of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry

Source = Literal["edgespec", "ollama", "lmstudio", "hub", "llama.cpp", "folder"]
"""The program, or the folder, whose file it is; "edgespec": the models folder and models.toml."""

_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:i?q\d+(?:_[a-z0-9]+)*|tq\d_\d|mxfp4(?:_moe)?|nvfp4|bf16|f16|f32)(?![a-z0-9])",
    re.I,
)


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

    def add(self, other: Listing) -> None:
        """Add what is in another listing."""
        self.models += other.models
        self.problems += other.problems


def quantization_in(name: str) -> str:
    """Return the quantization in a file's name in capitals, such as "Q4_K_M"; "" if there is none."""
    found = _QUANTIZATION.findall(name)
    return str(found[-1]).upper() if found else ""


def file_stem(name: str) -> str:
    """Return a model's name as the beginning of a file name: "ollama:qwen3:8b" is "qwen3-8b"."""
    text = re.sub(r"^(ollama|lmstudio|llama\.cpp|hf):", "", name)
    return re.sub(r"[^A-Za-z0-9._+@-]+", "-", text.removesuffix(".gguf"))


def is_projector(name: str) -> bool:
    """Whether a file's name is that of a multimodal model's projector, which is stored beside it."""
    return "mmproj" in name.lower()
