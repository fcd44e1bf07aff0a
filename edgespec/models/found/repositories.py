"""Files of hub repositories in a store: their names, and the one that OWNER/REPO[:QUANTIZATION] means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import Entry, nearest

if TYPE_CHECKING:
    from edgespec.models.found.files import ModelFiles

# ---- one model that was found in a store, and the listing of a store ----


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


# ---- files of a repository ----


_PREFERRED = ("Q4_K_M", "Q8_0")  # as llama.cpp has it, where no quantization is named


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A model in a repository of a store."""

    repo: str
    """OWNER/REPO; "" for a file that lies in no repository's folder."""
    file: str
    """Its path in the repository."""
    files: ModelFiles
    sha256: str | None = None

    @property
    def quantization(self) -> str:
        """The quantization in the file's name, in capitals, or ""."""
        return quantization_in(self.file)

    @property
    def full_name(self) -> str:
        """The name that `models pull` takes: OWNER/REPO/FILE.gguf."""
        return f"{self.repo}/{self.file}" if self.repo else self.file


def found_models(prefix: str, source: Source, files: Iterable[RepositoryFile]) -> list[FoundModel]:
    """Return the files as models, each with the shortest name that means no other."""
    files = list(files)
    models = [one for one in files if one.repo and not is_projector(one.file)]
    of_repo = Counter(one.repo.lower() for one in models)
    of_type = Counter((one.repo.lower(), one.quantization) for one in models)

    def short(one: RepositoryFile) -> str:
        if one in models and of_repo[one.repo.lower()] == 1:
            return one.repo
        if one in models and one.quantization and of_type[one.repo.lower(), one.quantization] == 1:
            return f"{one.repo}:{one.quantization}"
        return one.full_name

    return [
        FoundModel(
            name=prefix + short(one),
            source=source,
            path=one.files.path,
            size=one.files.size,
            sha256=one.sha256,
            problem=one.files.problem,
        )
        for one in files
    ]


def of_quantization(files: Iterable[RepositoryFile], wanted: str) -> list[RepositoryFile]:
    """Return the files of the quantization `wanted`; for "" all."""
    return [one for one in files if not wanted or one.quantization == wanted.upper()]


def preferred(files: Sequence[RepositoryFile]) -> list[RepositoryFile]:
    """Return the one of a repository's files that is meant where no quantization is named; [] for none."""
    best = [one for name in _PREFERRED for one in files if one.quantization == name]
    return [*(best or files)][:1]


def choose_file(ref: str, prefix: str, files: Iterable[RepositoryFile], *, prefers: bool) -> RepositoryFile:
    """Return the file that `ref` means: PREFIX and OWNER/REPO[:QUANTIZATION], REPO[:QUANTIZATION] or a file.

    `prefers`: without a quantization, take the one that llama.cpp would; else that is ambiguous. Raises
    UsageError for an ambiguous or unknown name, which offers those that there are.
    """
    files = list(files)
    text = ref.removeprefix(prefix).lower()
    exact = [one for one in files if one.full_name.lower() == text]
    if exact:
        return exact[0]
    repo, _, wanted = text.partition(":")
    models = [
        one
        for one in files
        if one.repo and repo in (one.repo.lower(), one.repo.lower().rpartition("/")[2])
        if not is_projector(one.file)
    ]
    matches = of_quantization(models, wanted)
    if prefers and not wanted and len({one.repo for one in matches}) == 1:
        matches = preferred(matches)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{ref}: which of {', '.join(sorted(prefix + one.full_name for one in matches))}?")
    known = {one.full_name: one for one in models or files}
    hint = f" (here: {', '.join(sorted(prefix + name for name in known)[:6])})" if models else ""
    hint = hint or nearest(text, [one.repo or one.file for one in files])
    raise UsageError(f"{ref}: no such model is here{hint}; see `edgespec models scan`")
