"""A target's image encoder: its file (mmproj), named, beside it or in its repository, and what runs it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from edgespec.errors import EdgespecError
from edgespec.llama.backend import bindings, library_folder, take_log
from edgespec.llama.gguf_header import check_complete_file, read_header
from edgespec.models.hub import HubRepository, SourceFailure
from edgespec.models.on_disk import is_projector, quantization_in, repository_files
from edgespec.models.registry import Entry, HubSource, load_registry
from edgespec.models.resolve import ModelRef, resolve
from edgespec.models.store import Store

_LAST = ("mm.", "resampler.", "adapter.")  # begin the names of a projector's tensors


class MmprojFacts(msgspec.Struct, frozen=True):
    """Facts from the header of an image encoder's file."""

    projector: str
    """Its kind, such as "gemma3"."""
    n_bytes: int
    """Bytes of the file, which are in memory once it is loaded."""
    widths: frozenset[int]
    """Lengths in its projector's tensors, among them the width of the text model."""
    is_quantized: bool
    """Whether edgespec's kernels gain anything: for 16-bit weights llama.cpp's are as fast."""


_UNQUANTIZED = ("f32", "f16", "bf16")


def facts(path: Path) -> MmprojFacts:
    """Return the facts of a file. Raises EdgespecError if it is damaged or no image encoder."""
    header = check_complete_file(path)
    gguf, kind = header.gguf, header.architecture
    if kind != "clip" and header.general_type != "mmproj":
        raise EdgespecError(f"{path}: no image encoder (mmproj), but a model of architecture {kind}")
    if "clip.has_vision_encoder" not in gguf.fields or not gguf.number("clip.has_vision_encoder"):
        raise EdgespecError(f"{path}: an encoder of sound alone, not of images")
    names = ("clip.projector_type", "clip.vision.projector_type")
    projector = next((gguf.text(name) for name in names if name in gguf.fields), "")
    widths = frozenset(n for one in gguf.tensors if one.name.startswith(_LAST) for n in one.shape)
    is_quantized = any(one.type not in _UNQUANTIZED for one in gguf.tensors)
    return MmprojFacts(projector, header.file_bytes, widths, is_quantized)


def find_mmproj(
    target: Path, given: str | Path | None, *, pull_missing: bool = True, ask_hub: bool = True
) -> Path | None:
    """Return the file of the image encoder for the model at `target`; None if there is none.

    `given`: a path or a name as of `resolve`; without it models.toml may name one. Of several beside the
    target one that fits is chosen, then one with words of its name, then one in F16. Without any its
    repository of the hub is searched, if `ask_hub` also for files that are not here. A missing file is
    pulled; if `pull_missing` is false, the path that it will have is returned. Raises EdgespecError for a
    file that is no encoder or does not fit.
    """
    store = Store.default()
    entry = next((one for one in load_registry().entries.values() if store.file(one) == target), None)
    named = (
        given or (entry.mmproj if entry else "") or _beside(target) or _in_repository(target, entry, ask_hub)
    )
    if not named:
        return None
    ref = ModelRef(str(named))
    path = store.file(ref.found) if isinstance(ref.found, Entry) else ref.found
    return path if not pull_missing and not path.exists() else _checked(resolve(ref), target)


def _beside(target: Path) -> Path | None:
    def rank(path: Path) -> tuple[bool, int, tuple[bool, str]]:
        return not _fits(path, target), -len(_words(path.stem) & _words(target.stem)), _rank(path.name)

    return min(
        (path for path in target.parent.glob("*.gguf") if is_projector(path.name)), key=rank, default=None
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower().replace(quantization_in(name).lower() or "\0", "")))


def _in_repository(target: Path, entry: Entry | None, ask_hub: bool) -> str:
    """Return the name of a file in a model's repository of the hub, or ""."""
    if (repository := _repository(target, entry)) is None:
        return ""
    try:
        files = [*filter(is_projector, repository_files(repository, ask=ask_hub))]
    except SourceFailure as failure:
        problem = f"looking for its image encoder: hub {repository.repo}: {failure}"
        raise EdgespecError(f"{target.name}: {problem}") from None
    name = f"hf:{repository.repo}/{min(files, key=_rank)}@{repository.revision}" if files else ""
    return name.removesuffix("@main")


def _rank(name: str) -> tuple[bool, str]:
    return quantization_in(name) != "F16", name


def _fits(path: Path, target: Path) -> bool:
    try:
        return bool(_checked(path, target))
    except EdgespecError:
        return False


def _checked(path: Path, target: Path) -> Path:
    widths, wanted = facts(path).widths, read_header(target).n_embd
    if widths and wanted not in widths:
        problem = f"the image encoder of another model: {target.name} reads rows of {wanted} numbers"
        raise EdgespecError(f"{path}: {problem}, which it does not make; name the right one by --mmproj FILE")
    return path


def _repository(target: Path, entry: Entry | None) -> HubRepository | None:
    for source in entry.sources if entry else ():
        if isinstance(source, HubSource):
            return HubRepository(source.repo, "", source.revision)
    if cached := re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/", str(target)):
        return HubRepository(f"{cached[1]}/{cached[2]}", "", cached[3])
    store = Store.default()
    stamp = store.stamp(Entry(target.stem)) if target.parent == store.root else None
    pulled = re.match(r"hub ([^/]+/[^/]+)/", stamp.source) if stamp else None
    return HubRepository(pulled[1], "", target.stem.partition("@")[2] or "main") if pulled else None


def image_facts(target: Path) -> dict[str, Any]:
    """Return a report of a target's image encoder: file, projector, bytes, and why it reads none, or ""."""
    told: dict[str, Any] = dict.fromkeys(("file", "projector", "bytes")) | {"problem": ""}
    try:
        if (path := find_mmproj(target, None, pull_missing=False, ask_hub=False)) is None:
            return told
        if not path.exists():
            return told | {"file": str(path), "problem": "their encoder is pulled with the first one"}
        found = facts(path)
    except EdgespecError as error:
        return told | {"problem": str(error)}
    problem = "" if is_built() else "run `make images`, which builds what reads them"
    return {"file": str(path), "projector": found.projector, "bytes": found.n_bytes, "problem": problem}


# ---- llama.cpp's library that runs it, which `make images` builds ----

_LIBRARY = "libmtmd.so"


def is_built() -> bool:
    """Whether the library lies beside llama.cpp's own."""
    return (library_folder() / _LIBRARY).exists()


@cache
def load() -> ModuleType:
    """Return `llama_cpp.mtmd_cpp`, whose log is llama.cpp's (backend.py).

    Raises EdgespecError if its library is not built, or cannot be loaded.
    """
    if not is_built():
        raise EdgespecError(f"llama.cpp's encoders of images ({_LIBRARY}) are not built; run `make images`")
    try:
        module = bindings("llama_cpp.mtmd_cpp")
    except (OSError, RuntimeError, AttributeError) as error:
        problem = f"{library_folder() / _LIBRARY}: cannot be loaded: {error}; run `make images` again"
        raise EdgespecError(problem) from error
    take_log(module.mtmd_log_set)
    take_log(module.mtmd_helper_log_set)
    return module
