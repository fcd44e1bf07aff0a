"""Files of hub repositories in a store: their names, and the one that OWNER/REPO[:QUANTIZATION] means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.errors import UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import ModelFiles
from edgespec.models.found.model import FoundModel, Source, is_projector, quantization_in

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
        """OWNER/REPO/FILE.gguf."""
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
