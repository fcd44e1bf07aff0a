"""Ollama's store, read as Ollama itself reads it: manifests name blobs by digest.

    manifests/HOST/NAMESPACE/NAME/TAG    JSON: layers, each with a media type, a digest and a size
    blobs/sha256-DIGEST                  a layer; that of the model is its GGUF file
    blobs/sha256-DIGEST-partial          a pull that was stopped

`ollama:NAME[:TAG]` names one as `ollama list` does. No path but those two is made of what a manifest says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from edgespec.errors import UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import FoundModel, Listing, Report, is_inside, real_path, refusal, walked
from edgespec.platform.files import expand_user

PREFIX = "ollama:"

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai/", "library/", "latest"
_SYSTEM_STORE = "/usr/share/ollama/.ollama/models"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,349}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,79}){3}")
"""HOST/NAMESPACE/NAME/TAG, as Ollama takes it: it leads nowhere but into its folder."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_LAYER = "application/vnd.ollama.image."
_MOST_BYTES = 16 << 20  # of a manifest, and of a layer of JSON
_NOT_USED = {
    "system": "system message of it is not used: --system gives one",
    "messages": "earlier messages of it are not used",
    "projector": "projector of it is not used: edgespec reads no images",
    "draft": "draft of it is not used",
    "params": "parameters of it are not used: options give them",
}
"""Kind of layer -> what a user is told of it."""


class _Layer(msgspec.Struct, frozen=True):
    media: str = msgspec.field(default="", name="mediaType")
    digest: str = ""
    size: int = 0


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer]
    config: _Layer = _Layer()


class _BrokenError(Exception):
    """A model cannot be used; `str(error)` is the problem in one line."""


def is_ollama_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of Ollama's store, by its form."""
    return ref.startswith(PREFIX)


def is_store(folder: Path) -> bool:
    """Whether a folder is laid out as a store of Ollama."""
    return all(os.path.isdir(folder / name) for name in ("manifests", "blobs"))  # noqa: PTH112 - never raises


def list_ollama(folders: Sequence[Path] = ()) -> Listing:
    """Return all models of Ollama's stores and of those of `folders` that are one, and stopped pulls."""
    listing = Listing()
    for root in _roots(folders):
        listing.models += [_read(root, name) for name in _names(root, listing.problems.append)]
        listing.problems += [
            f"{str(part).removesuffix('-partial')}: a stopped pull; `ollama pull` of the same model continues"
            for part in sorted(root.glob("blobs/sha256-*-partial"))
        ]
    return listing


def ollama_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of all models, for completion: no manifest is read."""
    return [_shown(name) for root in _roots(folders) for name in _names(root, lambda _: None)]


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
    known = {name: root for root in reversed(_roots(folders)) for name in _names(root, problems.append)}
    tags = {name: root for name, root in known.items() if name.rpartition("/")[0].lower() == model.lower()}
    exact = [name for name in tags if name.rpartition("/")[2].lower() == (tag or _TAG).lower()]
    if exact or (len(tags) == 1 and not tag):
        name = [*exact, *tags][0]
        return _read(known[name], name)
    if tags and not tag:
        raise UsageError(f"{ref}: which of {', '.join(sorted(map(_shown, tags)))}?")
    if problems and not known:
        raise UsageError(f"{ref}: {problems[0]}")
    names = sorted(_shown(name).removeprefix(PREFIX) for name in tags or known)
    # Tags of the same model are near whatever their letters.
    hint = f" (nearest: {', '.join(names[:6])})" if tags else nearest(text, names)
    raise UsageError(
        f"{ref}: Ollama has no such model here{hint}; see `edgespec models scan`, or `ollama pull {text}`"
    )


def _roots(folders: Sequence[Path]) -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    roots = [expand_user(own)] if own else [expand_user("~/.ollama/models"), Path(_SYSTEM_STORE)]
    return roots + [folder for folder in folders if is_store(folder) and folder not in roots]


def _names(root: Path, report: Report) -> list[str]:
    """Return HOST/NAMESPACE/NAME/TAG of all that have a manifest; `report` takes what cannot be read."""
    manifests = root / "manifests"
    files = [folder / file for folder, names in walked(manifests, report) for file in names]
    names = sorted(file.relative_to(manifests).as_posix() for file in files)
    return [name for name in names if _NAME.fullmatch(name)]


def _shown(name: str) -> str:
    """Return a name as `ollama list` shows it."""
    path, _, tag = name.rpartition("/")
    return f"{PREFIX}{path.removeprefix(_HOST).removeprefix(_NAMESPACE)}:{tag}"


def _read(root: Path, name: str) -> FoundModel:
    """Return the model of a manifest, or why there is none."""
    file, label = root / "manifests" / name, _shown(name)
    try:
        layers = _layers(root, file)
        (layer,) = layers["model"]
        file = _blob(root, layer)
        _check_blob(file, layer, f"`ollama pull {label.removeprefix(PREFIX)}`")
    except _BrokenError as error:
        return FoundModel(name=label, source="ollama", path=file, problem=str(error))
    return FoundModel(
        name=label,
        source="ollama",
        path=file,
        size=layer.size,
        sha256=file.name.removeprefix("sha256-"),
        notes=tuple(f"Ollama's {line}" for kind, line in _NOT_USED.items() if kind in layers),
    )


def _layers(root: Path, file: Path) -> dict[str, list[_Layer]]:
    """Return the layers of a manifest by kind, with one "model". Raises _BrokenError for any other."""
    try:
        manifest = msgspec.json.decode(_content(file, root / "manifests"), type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _BrokenError(f"{file} is no manifest; `ollama pull` writes it again") from None
    layers: dict[str, list[_Layer]] = {}
    for layer in manifest.layers:
        layers.setdefault(layer.media.removeprefix(_LAYER), []).append(layer)
    config: dict[str, Any] = {}
    if manifest.config.digest:
        # Without it, the model may be usable.
        with suppress(_BrokenError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            config = msgspec.json.decode(_content(_blob(root, manifest.config), root / "blobs"), type=dict)
    if "tensor" in layers or config.get("model_format") == "safetensors":
        raise _BrokenError("Ollama holds it as safetensors, not as GGUF; pull a GGUF version of it")
    if host := config.get("remote_host"):
        raise _BrokenError(f"a cloud model of {host}, whose weights are not here; pull another")
    if "adapter" in layers:
        raise _BrokenError("it applies a LoRA adapter, which edgespec does not; choose the model without it")
    if (n := len(layers.get("model", ()))) != 1:
        kinds = ", ".join(layers) or "none"
        raise _BrokenError(f"its manifest names {n} model files (layers: {kinds}), and edgespec takes one")
    return layers


def _content(file: Path, folder: Path) -> bytes:
    """Return the bytes of a small file of the store, which must lie in `folder`."""
    try:
        if not is_inside(file, folder):
            raise _BrokenError(f"{file} is a link out of {folder}, which is not followed; remove it")
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _BrokenError(refusal(file, error)) from None
    if len(data) > _MOST_BYTES:
        raise _BrokenError(f"{file} is too large for what it should be; `ollama pull` writes it again")
    return data


def _blob(root: Path, layer: _Layer) -> Path:
    match = _DIGEST.fullmatch(layer.digest)
    if match is None:
        raise _BrokenError(
            f"its manifest names the blob {layer.digest[:80]!a}, which is no digest; `ollama pull` it again"
        )
    return root / "blobs" / f"sha256-{match[1].lower()}"


def _check_blob(blob: Path, layer: _Layer, again: str) -> None:
    """Raise _BrokenError unless the blob of a model is here, complete, and inside the store."""
    try:
        if not is_inside(blob, blob.parent):
            raise _BrokenError(f"its blob {blob} is a link out of the store; name {real_path(blob)}")
        with blob.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        is_begun = any(blob.parent.glob(f"{blob.name}-partial*"))
        what = "half pulled" if is_begun else "gone"
        raise _BrokenError(f"its blob {blob} is {what}; {again} brings all of it") from None
    except OSError as error:
        raise _BrokenError(refusal(blob, error)) from None
    if layer.size and size != layer.size:
        raise _BrokenError(f"its blob {blob} has {size:,} bytes of {layer.size:,}; remove it, then {again}")
