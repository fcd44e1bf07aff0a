"""Ollama's store, read as Ollama itself reads it: manifests name blobs by digest.

    manifests/HOST/NAMESPACE/NAME/TAG    JSON: layers, each with a media type, a digest and a size
    blobs/sha256-DIGEST                  a layer; that of the model is its GGUF file
    blobs/sha256-DIGEST-partial*         a pull that was stopped

`ollama:NAME[:TAG]` names one as `ollama list` does. No path but those two is made of what a manifest says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edgespec.errors import UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import FoundModel, Listing, is_inside, real_path, refusal
from edgespec.platform.files import expand_user

PREFIX = "ollama:"

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_SYSTEM_STORE = "/usr/share/ollama/.ollama/models"
_PARTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,349}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,79}){3}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_LAYER = "application/vnd.ollama.image."
_MOST_BYTES = 16 << 20  # of a manifest, and of a layer of parameters
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "mirostat"),
)
"""Parameters that change what is written."""
_NOT_USED = {
    "system": "Ollama's system message of it is not used: --system gives one",
    "messages": "Ollama's earlier messages of it are not used",
    "projector": "its projector is not used: edgespec reads no images",
    "draft": "Ollama's draft of it is not used",
}
"""Kind of layer -> what a user is told of it."""


class _Layer(msgspec.Struct, frozen=True):
    media: str = msgspec.field(default="", name="mediaType")
    digest: str = ""
    size: int = 0

    @property
    def kind(self) -> str:
        return self.media.removeprefix(_LAYER)


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer]
    config: _Layer = _Layer()


class _Config(msgspec.Struct, frozen=True):
    model_format: str = ""
    remote_host: str = ""


class _BrokenError(Exception):
    """A manifest cannot be used; `str(error)` is the problem in one line."""


class OllamaName(NamedTuple):
    """A model's name in Ollama, with all its parts."""

    host: str
    namespace: str
    model: str
    tag: str

    def __str__(self) -> str:
        """Return the name as `ollama list` shows it."""
        hidden = (_HOST, _NAMESPACE) if self.namespace.lower() == _NAMESPACE else (_HOST,)
        shown = [part for part in self[:2] if self.host.lower() != _HOST or part.lower() not in hidden]
        return "/".join([*shown, f"{self.model}:{self.tag}"])

    @property
    def folded(self) -> tuple[str, ...]:
        """The parts, by which names are equal."""
        return tuple(part.lower() for part in self)

    @property
    def is_valid(self) -> bool:
        """Whether Ollama would take it; then it leads nowhere but into its folder."""
        return bool(_PARTS.fullmatch("/".join(self)))


def is_ollama_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of Ollama's store, by its form."""
    return ref.startswith(PREFIX)


def is_store(folder: Path) -> bool:
    """Whether a folder is laid out as a store of Ollama."""
    try:
        return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()
    except OSError:
        return False


def list_ollama(folders: Sequence[Path] = ()) -> Listing:
    """Return all models of Ollama's stores and of those of `folders` that are one, and stopped pulls."""
    listing = Listing()
    for root in _roots(folders):
        listing.models += [_read(root, name) for name in _names(root, listing.problems)]
        stopped = {path.name.partition("-partial")[0] for path in root.glob("blobs/sha256-*-partial*")}
        listing.problems += [
            f"{root / 'blobs' / name}: a stopped pull of Ollama's; `ollama pull` of the same model continues"
            for name in sorted(stopped)
        ]
    return listing


def ollama_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of all models, for completion: no manifest is read."""
    return [f"{PREFIX}{name}" for root in _roots(folders) for name in _names(root, [])]


def find_ollama(ref: str, folders: Sequence[Path] = ()) -> FoundModel:
    """Return the model that `ref`, ollama:NAME[:TAG], means; its `problem` may say why it cannot be used.

    Without a tag it is `latest`, as in Ollama, or else the only one there is. Raises UsageError for an
    unknown or ambiguous name, and where no store can be read.
    """
    asked = _parsed(ref)
    problems: list[str] = []
    known = [(root, name) for root in _roots(folders) for name in _names(root, problems)]
    wanted = asked._replace(tag=asked.tag or _TAG).folded
    for root, name in known:
        if name.folded == wanted:
            return _read(root, name)
    tags = [(root, name) for root, name in known if name.folded[:3] == wanted[:3]]
    if not asked.tag and len({name.folded for _, name in tags}) == 1:
        return _read(*tags[0])
    if not asked.tag and tags:
        raise UsageError(f"{ref}: which of {', '.join(sorted(f'{PREFIX}{name}' for _, name in tags))}?")
    if problems and not known:
        raise UsageError(f"{ref}: {problems[0]}")
    # Tags of the same model first: they are near whatever their letters.
    names = [str(name) for _, name in tags or known]
    hint = f" (nearest: {', '.join(sorted(names)[:6])})" if tags else nearest(ref.removeprefix(PREFIX), names)
    raise UsageError(
        f"{ref}: Ollama has no such model here{hint}; see `edgespec models scan`, or `ollama pull "
        f"{ref.removeprefix(PREFIX)}`"
    )


def _roots(folders: Sequence[Path]) -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    roots = [expand_user(own)] if own else [expand_user("~/.ollama/models"), Path(_SYSTEM_STORE)]
    return roots + [folder for folder in folders if is_store(folder) and folder not in roots]


def _parsed(ref: str) -> OllamaName:
    """Return a name with the parts that Ollama would add; without a tag it stays ""."""
    text = ref.removeprefix(PREFIX)
    path, colon, tag = text.rpartition(":") if text.rfind(":") > text.rfind("/") else (text, "", "")
    host, namespace, model, *more = [_HOST, _NAMESPACE][: 2 - path.count("/")] + path.split("/")
    if more or bool(colon) != bool(tag) or not OllamaName(host, namespace, model, tag or _TAG).is_valid:
        raise UsageError(f"{ref}: expected ollama:NAME[:TAG], as `ollama list` shows it")
    return OllamaName(host, namespace, model, tag)


def _names(root: Path, problems: list[str]) -> list[OllamaName]:
    """Return the names that have a manifest; `problems` takes what cannot be looked at."""
    manifests, found = root / "manifests", []

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            problems.append(refusal(Path(error.filename), error))

    for folder, _, files in os.walk(manifests, onerror=refused):
        match Path(folder).relative_to(manifests).parts:
            case (host, namespace, model):
                found += [OllamaName(host, namespace, model, file) for file in files]
    return sorted(name for name in found if name.is_valid)


def _read(root: Path, name: OllamaName) -> FoundModel:
    """Return the model of a manifest, or why there is none."""
    label, file = f"{PREFIX}{name}", root.joinpath("manifests", *name)
    try:
        layers = _layers(root, file)
        (layer,) = layers["model"]
        blob = _blob(root, layer)
        problem, notes = _problem(blob, layer, name), _notes(root, layers)
    except _BrokenError as error:
        return FoundModel(name=label, source="ollama", path=file, problem=str(error))
    sha256 = blob.name.removeprefix("sha256-")
    return FoundModel(
        name=label, source="ollama", path=blob, size=layer.size, sha256=sha256, problem=problem, notes=notes
    )


def _layers(root: Path, file: Path) -> dict[str, list[_Layer]]:
    """Return the layers of a manifest by kind, with one "model". Raises _BrokenError for any other."""
    try:
        manifest = msgspec.json.decode(_content(file, root / "manifests"), type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _BrokenError(f"{file} is no manifest; `ollama pull` writes it again") from None
    layers: dict[str, list[_Layer]] = {}
    for layer in manifest.layers:
        layers.setdefault(layer.kind, []).append(layer)
    config = _json(root, manifest.config, _Config) or _Config()
    if "tensor" in layers or config.model_format == "safetensors":
        raise _BrokenError("Ollama holds it as safetensors, not as GGUF; pull a GGUF version of it")
    if config.remote_host:
        raise _BrokenError(f"a cloud model of {config.remote_host}, whose weights are not here; pull another")
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


def _problem(blob: Path, layer: _Layer, name: OllamaName) -> str:
    """Return why the blob of a model cannot be used; "" if it is here and complete."""
    again = f"`ollama pull {name}`"
    try:
        size = blob.stat().st_size
        if not is_inside(blob, blob.parent):
            return f"its blob {blob} is a link out of the store, not followed; name {real_path(blob)}"
        blob.open("rb").close()
    except FileNotFoundError:
        is_begun = any(blob.parent.glob(f"{blob.name}-partial*"))
        return f"its blob {blob} is {'half pulled' if is_begun else 'gone'}; {again} brings all of it"
    except OSError as error:
        return refusal(blob, error)
    if layer.size and size != layer.size:
        return f"its blob {blob} has {size:,} bytes of {layer.size:,}; remove it, then {again}"
    return ""


def _notes(root: Path, layers: dict[str, list[_Layer]]) -> tuple[str, ...]:
    """The parts of the manifest that edgespec does not use."""
    notes = [line for kind, line in _NOT_USED.items() if kind in layers]
    given: dict[str, Any] = {}
    for layer in layers.get("params", ()):
        given |= _json(root, layer, dict[str, Any]) or {}
    if values := ", ".join(f"{name} {given[name]}" for name in _SAMPLING if name in given):
        notes.append(f"Ollama's parameters of it are not used ({values}): options give them")
    return tuple(notes)


def _json(root: Path, layer: _Layer, kind: Any) -> Any:  # noqa: ANN401 - the type that the caller names
    """Return a small layer of JSON as `kind`; None if it is not here, or something else."""
    try:
        return msgspec.json.decode(_content(_blob(root, layer), root / "blobs"), type=kind)
    except (_BrokenError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
