"""Finds a target's image encoder, its mmproj: named by somebody, beside the target, or in its repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from edgespec.apps.images.library import is_built
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_complete_file, read_header
from edgespec.models.hub import HubRepository, SourceFailure
from edgespec.models.on_disk import is_projector, quantization_in, repository_files
from edgespec.models.registry import Entry, HubSource, load_registry
from edgespec.models.resolve import resolve
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
_NONE = MmprojFacts("", 0, frozenset(), is_quantized=False)


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


def find_mmproj(target: Path, given: str | Path | None, *, pull_missing: bool = True) -> Path | None:
    """Return the file of the image encoder for the model at `target`; None if there is none.

    `given`: a path or a name as of `resolve`; without it models.toml may name one. Of several beside the
    target one that fits it is chosen, in F16 if possible. One in its repository of the hub is pulled, unless
    `pull_missing` is false. Raises EdgespecError for a file that is none or does not fit.
    """
    store = Store.default()
    entry = next((one for one in load_registry().entries.values() if store.file(one) == target), None)
    if named := given or (entry and entry.mmproj):
        return _checked(resolve(str(named), pull_missing=pull_missing), target)
    if beside := [path for path in target.parent.glob("*.gguf") if is_projector(path.name)]:
        return _checked(min(beside, key=lambda path: (not _fits(path, target), _rank(path.name))), target)
    if (repository := _repository(target, entry)) is None:
        return None
    try:
        files = [*filter(is_projector, repository_files(repository, ask=pull_missing))]
    except SourceFailure as failure:
        problem = f"looking for its image encoder: hub {repository.repo}: {failure}"
        raise EdgespecError(f"{target.name}: {problem}") from None
    if not files:
        return None
    name = f"hf:{repository.repo}/{min(files, key=_rank)}@{repository.revision}".removesuffix("@main")
    return _checked(resolve(name, pull_missing=pull_missing), target)


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
    try:
        path = find_mmproj(target, None, pull_missing=False)
        found = facts(path) if path else _NONE
        problem = "" if is_built() or not path else "run `make images`, which builds what reads them"
    except EdgespecError as error:
        path, found, problem = None, _NONE, str(error)
    told = {"projector": found.projector or None, "bytes": found.n_bytes or None, "problem": problem}
    return {"file": path and str(path), **told}
