"""Ollama's store, read as Ollama itself reads it: manifests name blobs by digest.

    manifests/HOST/NAMESPACE/NAME/TAG    JSON: layers, each with a media type, a digest and a size
    blobs/sha256-DIGEST                  a layer; that of the model is its GGUF file
    blobs/sha256-DIGEST-partial*         a pull that was stopped

`ollama:NAME[:TAG]` names one as `ollama list` does. No path but those two is made of what a manifest says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgespec.errors import UsageError
from edgespec.models.entries import nearest
from edgespec.models.found.files import is_inside, real_path, refusal
from edgespec.models.found.repositories import FoundModel, Listing
from edgespec.platform.files import expand_user

PREFIX = "ollama:"

_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_SYSTEM_STORE = "/usr/share/ollama/.ollama/models"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_HOST_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,349}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_LAYER = "application/vnd.ollama.image."
_MOST_BYTES = 16 << 20  # of a manifest, and of a layer of parameters
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty", "mirostat"),
)
"""Parameters that change what is written."""


class _Layer(msgspec.Struct, frozen=True):
    media: str = msgspec.field(default="", name="mediaType")
    digest: str = ""
    size: int = 0


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer] | None = None
    config: _Layer = _Layer()

    def of_kind(self, kind: str) -> list[_Layer]:
        return [layer for layer in self.layers or [] if layer.media == _LAYER + kind]


class _Config(msgspec.Struct, frozen=True):
    model_format: str = ""
    remote_host: str = ""


class _BrokenError(Exception):
    """A manifest cannot be used; `str(error)` is the problem in one line."""


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model's name in Ollama, with all its parts."""

    host: str
    namespace: str
    model: str
    tag: str

    def __str__(self) -> str:
        """Return the name as `ollama list` shows it."""
        if self.host.lower() != _HOST:
            return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"
        library = self.namespace.lower() == _NAMESPACE
        return f"{'' if library else self.namespace + '/'}{self.model}:{self.tag}"

    @property
    def folded(self) -> tuple[str, ...]:
        """The parts, by which names are equal."""
        return tuple(part.lower() for part in (self.host, self.namespace, self.model, self.tag))

    @property
    def is_valid(self) -> bool:
        """Whether Ollama would take it; then it leads nowhere but into its folder."""
        others = (self.namespace, self.model, self.tag)
        return bool(_HOST_PART.fullmatch(self.host)) and all(map(_PART.fullmatch, others))


def ollama_roots(folders: Sequence[Path] = ()) -> list[Path]:
    """Return the stores to look at: Ollama's own, and those of `folders` that are such a store."""
    if own := os.environ.get("OLLAMA_MODELS"):
        roots = [expand_user(own)]
    else:
        roots = [expand_user("~/.ollama/models"), Path(_SYSTEM_STORE)]
    return roots + [folder for folder in folders if is_store(folder) and folder not in roots]


def is_store(folder: Path) -> bool:
    """Whether a folder is laid out as a store of Ollama."""
    try:
        return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()
    except OSError:
        return False


def list_ollama(roots: Sequence[Path]) -> Listing:
    """Return all models of the stores, and their stopped pulls."""
    listing = Listing()
    for root in roots:
        names = _names(root, listing.problems)
        listing.models += [_read(root, name) for name in names]
        listing.problems += _stopped_pulls(root)
    return listing


def ollama_names(roots: Sequence[Path]) -> list[str]:
    """Return the names of all models, for completion: no manifest is read."""
    return [f"{PREFIX}{name}" for root in roots for name in _names(root, [])]


def find_ollama(ref: str, roots: Sequence[Path]) -> FoundModel:
    """Return the model that `ref`, ollama:NAME[:TAG], means.

    Without a tag it is `latest`, as in Ollama, or else the only one there is. Raises UsageError for an
    unknown or ambiguous name, and where no store can be read.
    """
    asked = _parsed(ref)
    problems: list[str] = []
    known = [(root, name) for root in roots for name in _names(root, problems)]
    wanted = OllamaName(asked.host, asked.namespace, asked.model, asked.tag or _TAG).folded
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
    found = []
    for parts in _below(root / "manifests", 4, problems):
        name = OllamaName(*parts)
        if name.is_valid:
            found.append(name)
        elif not parts[-1].startswith("."):  # what a file manager leaves behind is no manifest
            problems.append(f"{root.joinpath('manifests', *parts)}: not a name that Ollama gives; ignored")
    return found


def _below(folder: Path, depth: int, problems: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the files that lie `depth` levels below `folder`, as parts."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            if depth == 1:
                yield (entry.name,)
            elif entry.is_dir(follow_symlinks=False):
                for parts in _below(Path(entry.path), depth - 1, problems):
                    yield (entry.name, *parts)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        problems.append(refusal(folder, error))


# ---- one model ----


def _read(root: Path, name: OllamaName) -> FoundModel:
    """Return the model of a manifest, or why there is none."""
    label, file = f"{PREFIX}{name}", root.joinpath("manifests", *_parts(name))
    try:
        manifest = _manifest(file, root)
        layer = _model_layer(root, manifest, name)
        digest = _digest(layer)
        path, size = _blob(root, digest), layer.size
        problem = _blob_problem(path, layer, name, root)
        notes = _notes(root, manifest)
    except _BrokenError as error:
        return FoundModel(name=label, source="ollama", path=file, problem=str(error))
    return FoundModel(
        name=label, source="ollama", path=path, size=size, sha256=digest, problem=problem, notes=notes
    )


def _parts(name: OllamaName) -> tuple[str, ...]:
    return name.host, name.namespace, name.model, name.tag


def _manifest(file: Path, root: Path) -> _Manifest:
    data = _content(file, root / "manifests")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _BrokenError(f"{file} is no manifest; `ollama pull` writes it again") from None
    if manifest.layers is None:
        raise _BrokenError(f"{file} is a manifest without layers; `ollama pull` writes it again")
    return manifest


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


def _model_layer(root: Path, manifest: _Manifest, name: OllamaName) -> _Layer:
    """Return the layer of the GGUF file. Raises _BrokenError for a model that has none, or more beside it."""
    layers = manifest.of_kind("model")
    config = _json(root, manifest.config, _Config) or _Config()
    if manifest.of_kind("tensor") or config.model_format == "safetensors":
        raise _BrokenError("Ollama holds it as safetensors, not as GGUF; pull a GGUF version of it")
    if config.remote_host:
        raise _BrokenError(f"a cloud model of {config.remote_host}, whose weights are not here; pull another")
    if not layers:
        kinds = ", ".join(dict.fromkeys(layer.media or "none" for layer in manifest.layers or [])) or "none"
        raise _BrokenError(f"its manifest names no model, only layers of the types {kinds}; pull it again")
    if manifest.of_kind("adapter"):
        base = "the model that it was made from"
        raise _BrokenError(f"it applies a LoRA adapter to a model, which edgespec does not; choose {base}")
    if len(layers) > 1:
        raise _BrokenError(f"its manifest names {len(layers)} model files, and edgespec takes one GGUF file")
    return layers[0]


def _digest(layer: _Layer) -> str:
    match = _DIGEST.fullmatch(layer.digest)
    if match is None:
        shown = "".join(filter(str.isprintable, layer.digest))[:80]
        raise _BrokenError(
            f"its manifest names the blob {shown!r}, which is no digest; `ollama pull` it again"
        )
    return match[1].lower()


def _blob(root: Path, digest: str) -> Path:
    return root / "blobs" / f"sha256-{digest}"


def _blob_problem(path: Path, layer: _Layer, name: OllamaName, root: Path) -> str:
    """Return why the blob of a model cannot be used; "" if it is here and complete."""
    again = f"`ollama pull {name}`"
    try:
        size = path.stat().st_size
        if not is_inside(path, root / "blobs"):
            return (
                f"its blob {path} is a link out of the store, which is not followed; name {real_path(path)}"
            )
        with path.open("rb"):
            pass
    except FileNotFoundError:
        if list(path.parent.glob(f"{path.name}-partial*")):
            return f"its blob {path} is half pulled; {again} continues it"
        return f"its blob {path} is gone; {again} brings it back"
    except OSError as error:
        return refusal(path, error)
    if layer.size and size != layer.size:
        return f"its blob {path} has {size:,} bytes of {layer.size:,}; remove it, then {again}"
    return ""


def _notes(root: Path, manifest: _Manifest) -> tuple[str, ...]:
    """The parts of the manifest that edgespec does not use."""
    notes = []
    if manifest.of_kind("system"):
        notes.append("Ollama's system message of it is not used: --system gives one")
    if manifest.of_kind("messages"):
        notes.append("Ollama's earlier messages of it are not used")
    given: dict[str, Any] = {}
    for layer in manifest.of_kind("params"):
        given |= _json(root, layer, dict[str, Any]) or {}
    if names := [name for name in _SAMPLING if name in given]:
        values = ", ".join(f"{name} {given[name]}" for name in names)
        notes.append(f"Ollama's parameters of it are not used ({values}): options give them")
    if manifest.of_kind("projector"):
        notes.append("its projector is not used: edgespec reads no images")
    if manifest.of_kind("draft"):
        notes.append("Ollama's draft of it is not used")
    return tuple(notes)


def _json(root: Path, layer: _Layer, kind: Any) -> Any:  # noqa: ANN401 - the type that the caller names
    """Return a small layer of JSON as `kind`; None if it is not here, or something else."""
    try:
        blob = _blob(root, _digest(layer))
        return msgspec.json.decode(_content(blob, root / "blobs"), type=kind)
    except (_BrokenError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _stopped_pulls(root: Path) -> list[str]:
    try:
        parts = {path.name.partition("-partial")[0] for path in (root / "blobs").glob("sha256-*-partial*")}
    except OSError:
        return []  # `_names` says why
    return [
        f"{root / 'blobs' / name}: a stopped pull of Ollama's; `ollama pull` of the same model continues it"
        for name in sorted(parts)
    ]
