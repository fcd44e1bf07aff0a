"""Ollama's store, read as Ollama itself reads it: manifests name blobs by digest.

    manifests/HOST/NAMESPACE/NAME/TAG    JSON: layers, each with a media type, a digest and a size
    blobs/sha256-DIGEST                  a layer; that of the model is its GGUF file

`ollama:NAME[:TAG]` names one as `ollama list` does. No path but those two is made of what a manifest says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import FoundModel, Listing, is_inside, size_and_problem, walked
from edgespec.platform.files import expand_user

PREFIX = "ollama:"

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai/", "library/", "latest"
_SYSTEM_STORE = "/usr/share/ollama/.ollama/models"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,349}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,79}){3}")
"""HOST/NAMESPACE/NAME/TAG, as Ollama takes it: it leads nowhere but into its folder."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_LAYER = "application/vnd.ollama.image."
_MOST_BYTES = 16 << 20  # of a manifest


class _Layer(msgspec.Struct, frozen=True):
    media: str = msgspec.field(default="", name="mediaType")
    digest: str = ""
    size: int = 0

    @property
    def kind(self) -> str:
        return self.media.removeprefix(_LAYER)


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer]


def is_ollama_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of Ollama's store, by its form."""
    return ref.startswith(PREFIX)


def is_store(folder: Path) -> bool:
    """Whether a folder is laid out as a store of Ollama."""
    return all(os.path.isdir(folder / name) for name in ("manifests", "blobs"))  # noqa: PTH112 - never raises


def list_ollama(folders: Sequence[Path] = ()) -> Listing:
    """Return all models of Ollama's stores and of those of `folders` that are one."""
    listing = Listing()
    for root in _roots(folders):
        listing.models += [_read(root, name) for name in _names(root, listing.problems)]
    return listing


def ollama_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of all models, for completion: no manifest is read."""
    return [_shown(name) for root in _roots(folders) for name in _names(root, [])]


def find_ollama(ref: str, folders: Sequence[Path] = ()) -> FoundModel:
    """Return the model that `ref`, ollama:NAME[:TAG], means; its `problem` may say why it cannot be used.

    Without a tag it is `latest`, as in Ollama, or else the only one there is. Raises UsageError for an
    unknown or ambiguous name, and where no store can be read.
    """
    text, problems = ref.removeprefix(PREFIX), list[str]()
    path, colon, tag = text.rpartition(":") if text.rfind(":") > text.rfind("/") else (text, "", "")
    model = "".join((_HOST, _NAMESPACE)[: max(0, 2 - path.count("/"))]) + path
    if bool(colon) != bool(tag) or not _NAME.fullmatch(f"{model}/{tag or _TAG}"):
        raise UsageError(f"{ref}: expected ollama:NAME[:TAG], as `ollama list` shows it")
    known = {name: root for root in reversed(_roots(folders)) for name in _names(root, problems)}
    tags = {name: root for name, root in known.items() if name.rpartition("/")[0].lower() == model.lower()}
    exact = [name for name in tags if name.rpartition("/")[2].lower() == (tag or _TAG).lower()]
    if exact or (len(tags) == 1 and not tag):
        name = [*exact, *tags][0]
        return _read(known[name], name)
    if tags and not tag:
        raise UsageError(f"{ref}: which of {', '.join(sorted(map(_shown, tags)))}?")
    if problems and not known:
        raise UsageError(f"{ref}: {problems[0]}")
    hint = nearest(text, sorted(_shown(name).removeprefix(PREFIX) for name in tags or known))
    raise UsageError(
        f"{ref}: Ollama has no such model here{hint}; see `edgespec models scan`, or `ollama pull {text}`"
    )


def _roots(folders: Sequence[Path]) -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    roots = [expand_user(own)] if own else [expand_user("~/.ollama/models"), Path(_SYSTEM_STORE)]
    return roots + [folder for folder in folders if is_store(folder) and folder not in roots]


def _names(root: Path, problems: list[str]) -> list[str]:
    """Return HOST/NAMESPACE/NAME/TAG of all that have a manifest."""
    manifests = root / "manifests"
    names = sorted(file.relative_to(manifests).as_posix() for file in walked(manifests, problems))
    return [name for name in names if _NAME.fullmatch(name)]


def _shown(name: str) -> str:
    """Return a name as `ollama list` shows it."""
    path, _, tag = name.rpartition("/")
    return f"{PREFIX}{path.removeprefix(_HOST).removeprefix(_NAMESPACE)}:{tag}"


def _read(root: Path, name: str) -> FoundModel:
    """Return the model of a manifest, or why there is none."""
    file, size, problem, label = root / "manifests" / name, 0, "", _shown(name)
    try:
        layer = _model_layer(root, file)
        digest = _DIGEST.fullmatch(layer.digest)
        if digest is None:
            raise EdgespecError(f"its manifest names the blob {layer.digest[:80]!a}, which is no digest")
        file = root / "blobs" / f"sha256-{digest[1].lower()}"
        size, problem = size_and_problem(file, root / "blobs")
        if not problem and layer.size not in (0, size):
            problem = f"its file {file} has {size:,} bytes of {layer.size:,}"
    except EdgespecError as error:
        problem = str(error)
    if problem:
        problem += f"; `ollama pull {label.removeprefix(PREFIX)}` pulls it again"
    sha256 = file.name.removeprefix("sha256-") if not problem else None
    return FoundModel(name=label, source="ollama", path=file, size=size, sha256=sha256, problem=problem)


def _model_layer(root: Path, file: Path) -> _Layer:
    """Return the layer of a manifest that is a GGUF file. Raises EdgespecError where there is not one."""
    try:
        if not is_inside(file, root / "manifests"):
            raise EdgespecError(f"{file} is a link out of the store, which is not followed")
        with file.open("rb") as stream:
            layers = msgspec.json.decode(stream.read(_MOST_BYTES), type=_Manifest).layers
    except OSError as error:
        raise EdgespecError(f"{file}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise EdgespecError(f"{file} is no manifest") from None
    models = [layer for layer in layers if layer.kind == "model"]
    kinds = dict.fromkeys(layer.kind for layer in layers)
    if len(models) != 1 or kinds.keys() & {"adapter", "tensor"}:
        raise EdgespecError(
            f"it consists of {', '.join(kinds) or 'nothing'}, and edgespec takes one GGUF file, no adapter"
        )
    return models[0]
