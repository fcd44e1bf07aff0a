"""Models that other programs store on this disk: found by their usual names, used in place.

    ollama:NAME[:TAG]                       Ollama's manifests
    hf:OWNER/REPO/FILE.gguf[@REVISION]      the hub's cache if it is there; else it is pulled (hub.py)
    [hf:]OWNER/REPO[:QUANTIZATION]          one of these files
    a path                                  files of LM Studio, llama.cpp, and the folders of models.toml
    a name                                  edgespec's own models

Names and sizes only: nothing here reads a model's header, so that a shell can complete with it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.hub import HubRepository, SourceFailure, hub_repository, list_hub_files
from edgespec.models.registry import Entry, HubSource, load_registry, nearest, other_files
from edgespec.models.store import Store
from edgespec.platform.files import expand_user, text_of, user_folder, why_no_file

Source = Literal["edgespec", "ollama", "hub", "folder"]
"""The program, or the folder, whose file it is; "edgespec": the models folder and models.toml."""

_PART = re.compile(r".*-(\d{5})-of-\d{5}\.gguf", re.IGNORECASE | re.DOTALL)
_QUANTIZATION = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:i?q\d+(?:_[a-z0-9]+)*|tq\d_\d|mxfp4(?:_moe)?|nvfp4|bf16|f16|f32)(?![a-z0-9])",
    re.I,
)
_PREFERRED = ("Q4_K_M", "Q8_0")  # as llama.cpp has it, where no quantization is named


class FoundModel(msgspec.Struct, frozen=True, kw_only=True):
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
        """Return itself. Raises EdgespecError for an unusable one."""
        if self.problem:
            raise EdgespecError(f"{self.name}: {self.problem}")
        return self


def found_entry(model: FoundModel) -> Entry:
    """Return a model as an entry: its file is used in place, and must have the hash recorded by its store."""
    return Entry(name=model.name, path=model.path, sha256=model.sha256, parts=model.parts_sha256)


class Listing(msgspec.Struct):
    """The models of one or more stores."""

    models: list[FoundModel] = msgspec.field(default_factory=list)
    problems: list[str] = msgspec.field(default_factory=list)
    """Folders that cannot be looked at, each in one line."""


# ---- names of files ----


def _is_first(name: str) -> bool:
    part = _PART.fullmatch(name)
    return name.lower().endswith(".gguf") and (part is None or int(part[1]) == 1)


def model_files(names: Iterable[str]) -> list[str]:
    """Return the models among a folder's files: only the first part of split ones, no projectors."""
    return [name for name in names if _is_first(name) and "mmproj" not in name.lower()]


def is_projector(file: str) -> bool:
    """Whether a file in a folder or repository is called as image encoders are: mmproj*.gguf."""
    name = file.rpartition("/")[2].lower()
    return name.startswith("mmproj") and name.endswith(".gguf")


def quantization_in(name: str) -> str:
    """Return the quantization in a file's name in capitals, such as "Q4_K_M"; "" if there is none."""
    found = _QUANTIZATION.findall(name)
    return str(found[-1]).upper() if found else ""


def of_quantization(names: Sequence[str], wanted: str) -> list[str]:
    """Return the files of the quantization `wanted`; for "" the default one."""
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
    """Whether `path`, its links followed, is in `folder`. Raises OSError if it does not exist."""
    # Not `Path.resolve`, which raises RuntimeError for a loop of links before Python 3.13.
    return Path(os.path.realpath(path, strict=True)).is_relative_to(real_path(folder))


def real_path(path: Path) -> Path:
    """Return a path with its links followed, as far as they exist."""
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
    """Return the .gguf files below a folder, only the first of a split model; `problems` as `walked`."""
    return sorted(path for path in walked(root, problems) if _is_first(path.name))


def size_and_problem(first: Path, folder: Path | None = None) -> tuple[int, str]:
    """Return the bytes of a model's files, and why they are unusable, or "".

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


ARCHITECTURE = "whisper"
"""The architecture in a GGUF file of ours."""

CTRANSLATE2_MODEL = "model.bin"
HUB_WEIGHTS, HUB_INDEX = "model.safetensors", "model.safetensors.index.json"
WHISPER_CPP_MAGIC = b"lmgg"


def is_whisper_source(path: Path) -> bool:
    """Whether `path` is a Whisper model of another program, to be converted; reads only a few bytes."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CTRANSLATE2_MODEL, HUB_WEIGHTS, HUB_INDEX))
    if why_no_file(path):
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == WHISPER_CPP_MAGIC
    except OSError:
        return False


def whisper_gguf(ref: str) -> str:
    """Return the line that refuses a GGUF Whisper model as input of a conversion."""
    return (
        f"{ref}: a Whisper model in GGUF; other types are made of a folder of the hub (model.safetensors), "
        "a file of whisper.cpp (ggml-NAME.bin) or a folder of CTranslate2 (model.bin)"
    )


def foreign_whisper(ref: str) -> str:
    """Return the line that refuses another program's Whisper model where a GGUF file is needed."""
    return f"{ref}: a Whisper model, but no GGUF; convert it: edgespec quantize {ref} --type q8_0"


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def list_hub() -> Listing:
    """Return all models of the cache; a file that several commits have is listed once."""
    listing, seen = Listing(), set()
    for folder in sorted(_root().glob("models--*--*")):
        main = _commit(folder, "main")
        for snapshot in sorted(folder.glob("snapshots/*"), key=lambda one: (one.name != main, one.name)):
            for model in _of_snapshot(snapshot, snapshot.name == main, listing.problems):
                if real_path(model.path) not in seen:
                    seen.add(real_path(model.path))
                    listing.models.append(model)
    return listing


def find_in_hub(entry: Entry) -> FoundModel | None:
    """Return the file in the cache that an entry of `hub_entry` means; None if it is not there.

    All parts of a split model must be there. Raises nothing: unreadable files count as missing.
    """
    source = entry.sources[0] if entry.sources else None
    if not isinstance(source, HubSource) or entry.converted:
        return None
    folder = _folder(source.repo)
    commit = source.revision if _COMMIT.fullmatch(source.revision) else _commit(folder, source.revision)
    snapshot = folder / "snapshots" / commit
    found = _found(snapshot, snapshot / source.file, is_main=source.revision == "main")
    return found if commit and not found.problem else None


def _root() -> Path:
    """Return the folder of the hub library's cache, as that library finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return expand_user(folder)
    home = os.environ.get("HF_HOME")
    return (expand_user(home) if home else user_folder("XDG_CACHE_HOME") / "huggingface") / "hub"


def _folder(repo: str) -> Path:
    return _root() / f"models--{repo.replace('/', '--')}"


def _commit(folder: Path, revision: str) -> str:
    """Return the commit of a branch or tag at the last download; "" if there is none."""
    commit = "" if ".." in revision.split("/") else text_of(folder / "refs" / revision)
    return commit if _COMMIT.fullmatch(commit) else ""


def _of_snapshot(snapshot: Path, is_main: bool, problems: list[str]) -> list[FoundModel]:
    return [_found(snapshot, path, is_main=is_main) for path in gguf_files(snapshot, problems)]


def _found(snapshot: Path, path: Path, *, is_main: bool) -> FoundModel:
    folder = snapshot.parents[1]
    size, problem = size_and_problem(path, folder)
    hashes = [
        name if _SHA256.fullmatch(name := real_path(one).name) else None for one in (path, *other_files(path))
    ]
    repo = folder.name.removeprefix("models--").replace("--", "/")
    return FoundModel(
        name=f"hf:{repo}/{path.relative_to(snapshot).as_posix()}" + ("" if is_main else f"@{snapshot.name}"),
        source="hub",
        path=path,
        size=size,
        sha256=hashes[0],
        parts_sha256=tuple(filter(None, hashes[1:])),
        problem=problem,
    )


# ---- the file that the name of a repository means: hf:OWNER/REPO[:QUANTIZATION] ----
# What is here is looked through first, so a model that was pulled needs no network; then the hub is asked.
# Without a quantization it is Q4_K_M, Q8_0 or the first, as in llama.cpp.


def hub_file(ref: str) -> str:
    """Return a hub file's name for a name of `is_hub_name`: itself, or that of the repository's file.

    Raises:
        UsageError: the repository has no such quantization, several files of it, or no GGUF file at all.
        EdgespecError: the hub has no such repository, or cannot be reached.

    """
    repository = hub_repository(ref)
    if repository is None:
        return ref
    chosen = of_quantization(model_files(_files_here(repository)), repository.quantization)
    file = chosen[0] if len(chosen) == 1 else _file_there(ref, repository)
    revision = "" if repository.revision == "main" else f"@{repository.revision}"
    return f"hf:{repository.repo}/{file}{revision}"


def repository_files(repository: HubRepository, *, ask: bool) -> list[str]:
    """Return the files of a repository that are here; if that is none of its image encoders and `ask`, all.

    Raises SourceFailure if the hub has to be asked and cannot be.
    """
    here = _files_here(repository)
    if not ask or any(map(is_projector, here)):
        return here
    return [*_listed(repository.repo, repository.revision, os.environ.get("HF_ENDPOINT", ""))]


def _files_here(repository: HubRepository) -> list[str]:
    names = Store.default().hub_files(repository.repo, repository.revision)
    folder = _folder(repository.repo)
    if repository.revision == "main" and (commit := _commit(folder, "main")):
        snapshot = folder / "snapshots" / commit
        found = _of_snapshot(snapshot, True, [])
        names += [one.path.relative_to(snapshot).as_posix() for one in found if not one.problem]
    return [*dict.fromkeys(names)]


def _file_there(ref: str, repository: HubRepository) -> str:
    repo, wanted = repository.repo, repository.quantization
    try:
        names = model_files(_listed(repo, repository.revision, os.environ.get("HF_ENDPOINT", "")))
    except SourceFailure as failure:
        cure = "" if ref.startswith("hf:") else "; if a file is meant, there is none of this name here"
        raise EdgespecError(f"{ref}: hub {repo}: {failure}{cure}") from None
    if not names:
        raise UsageError(f"{ref}: no GGUF file in this repository; look for {repo}-GGUF on the hub")
    matches = of_quantization(names, wanted)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{ref}: which of {', '.join(f'hf:{repo}/{name}' for name in matches)}?")
    types = list(dict.fromkeys(filter(None, map(quantization_in, names))))
    raise UsageError(f"{ref}: no such quantization{nearest(wanted, types)}; there are {', '.join(types)}")


@functools.lru_cache
def _listed(repo: str, revision: str, _endpoint: str) -> tuple[str, ...]:
    """Return the files of a repository; asked once in a process."""
    return tuple(list_hub_files(repo, revision))


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
    """Whether `ref` has the form of a model in Ollama's store."""
    return ref.startswith(PREFIX)


def is_store(folder: Path) -> bool:
    """Whether a folder is laid out as a store of Ollama."""
    return all(os.path.isdir(folder / name) for name in ("manifests", "blobs"))  # noqa: PTH112 - never raises


def list_ollama(folders: Sequence[Path] = ()) -> Listing:
    """Return all models of Ollama's stores, including those among `folders`."""
    listing = Listing()
    for root in _roots(folders):
        listing.models += [_read(root, name) for name in _names(root, listing.problems)]
    return listing


def ollama_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the names of all models, for completion: no manifest is read."""
    return [_shown(name) for root in _roots(folders) for name in _names(root, [])]


def find_ollama(ref: str, folders: Sequence[Path] = ()) -> FoundModel:
    """Return the model that `ref`, ollama:NAME[:TAG], means; its `problem` may say why it is unusable.

    Without a tag it is `latest`, as in Ollama, or else the only one there is. Raises UsageError for an
    unknown or ambiguous name, and if no store can be read.
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
    """Return HOST/NAMESPACE/NAME/TAG of all models that have a manifest."""
    manifests = root / "manifests"
    names = sorted(file.relative_to(manifests).as_posix() for file in walked(manifests, problems))
    return [name for name in names if _NAME.fullmatch(name)]


def _shown(name: str) -> str:
    """Return a name as `ollama list` shows it."""
    path, _, tag = name.rpartition("/")
    return f"{PREFIX}{path.removeprefix(_HOST).removeprefix(_NAMESPACE)}:{tag}"


def _read(root: Path, name: str) -> FoundModel:
    """Return the model of a manifest; its `problem` says why it is unusable."""
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
    """Return the layer of a manifest that is a GGUF file. Raises EdgespecError unless there is just one."""
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


_USUAL = ("~/.lmstudio/models", "~/.cache/lm-studio/models", "~/.cache/llama.cpp")
"""Where LM Studio and llama.cpp keep files."""


def list_found(folders: Sequence[Path] = ()) -> Listing:
    """Return all models on this disk: edgespec's own, other programs', those of the user's folders.

    `folders`: more folders to look into, which must exist. Raises UsageError if one does not.
    """
    registry, store, listing = load_registry(), Store.default(), Listing()
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
    for entry in registry.entries.values():
        if store.is_present(entry, registry):
            path, sha256 = store.file(entry), store.expected_sha256(entry)
            size = path.stat().st_size
            listing.models.append(
                FoundModel(name=entry.name, source="edgespec", path=path, size=size, sha256=sha256)
            )
    more = [*registry.folders, *folders]
    for part in (list_ollama(more), list_hub()):
        listing.models += part.models
        listing.problems += part.problems
    usual = map(expand_user, filter(None, (*_USUAL, os.environ.get("LLAMA_CACHE"))))
    for folder in dict.fromkeys([*usual, *(one for one in more if not is_store(one))]):
        for path in gguf_files(folder, listing.problems):
            size, problem = size_and_problem(path)
            listing.models.append(
                FoundModel(name=str(path), source="folder", path=path, size=size, problem=problem)
            )
    listing.problems += [
        f"{folder}: no such folder; correct `folders` in models.toml"
        for folder in registry.folders
        if not folder.exists()
    ]
    return listing


def other_names() -> list[str]:
    """Return the names of other programs' readable models, for shell completion."""
    try:
        of_hub = [model.name for model in list_hub().models if not model.problem]
        return ollama_names(load_registry().folders) + of_hub
    except (EdgespecError, OSError):
        return []
