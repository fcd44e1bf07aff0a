"""Models of the hub as users name them.

    hf:OWNER/REPO/FILE.gguf[@REVISION]           a file, also as its page or link
    [hf:]OWNER/REPO[:QUANTIZATION][@REVISION]    a repository, or its page (found/hub_cache.py)

Whisper models have other forms too, which are converted: whisper.cpp's ggml-NAME.bin, CTranslate2's
model.bin, and model.safetensors.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgespec.errors import UsageError
from edgespec.models.entries import REPO, REVISION, Entry, HubSource

_HF_REF = re.compile(
    r"hf:(?P<repo>[^/@]+/[^/@]+)/"
    r"(?P<file>[^@]+\.gguf|(?:[^@]+/)?(?:ggml-[^@/]+\.bin|model\.bin|model\.safetensors))(?:@(?P<revision>.+))?",
    re.IGNORECASE,
)
_REPOSITORY_REF = re.compile(
    r"(?:hf:)?(?P<repo>[^/@:]+/[^/@:]+)(?::(?P<quantization>[^/@:]+))?(?:@(?P<revision>.+))?"
)
_FILE_ENDINGS = (".gguf", ".bin", ".safetensors")
_CONVERTED_TYPE = "q8_0"
_BESIDE = {
    "model.bin": ("config.json", "vocabulary.txt?", "vocabulary.json?"),
    "model.safetensors": ("config.json", "vocab.json", "generation_config.json?"),
}
_URL = re.compile(r"https?://", re.IGNORECASE)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# huggingface.co/OWNER/REPO/resolve/REVISION/FILE; a pull request's revision is refs/pr/NUMBER.
_FILE = re.compile(
    r"/(?P<repo>[^/]+/[^/]+)/(?:resolve|blob|raw)/(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)/(?P<file>.+)"
)
_PAGE = re.compile(r"/(?P<repo>[^/]+/[^/]+)(?:/tree/(?P<revision>[^/]+))?/?")


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository of the hub that was named without a file."""

    repo: str
    quantization: str
    """In capitals; "": none was named."""
    revision: str


def is_hub_name(ref: str) -> bool:
    """Whether `ref` is meant as a model of the hub, by its form.

    OWNER/REPO alone is, unless there is a folder OWNER here.
    """
    if ref.startswith("hf:") or bool(_URL.match(ref)) or ref.startswith(tuple(f"{h}/" for h in _HOSTS)):
        return True
    match = _REPOSITORY_REF.fullmatch(ref)
    if match is None or ref.lower().endswith(_FILE_ENDINGS) or not re.fullmatch(REPO, match["repo"]):
        return False
    return not Path(ref.partition("/")[0]).exists()


def hub_repository(ref: str) -> HubRepository | None:
    """Return the repository that a name of `is_hub_name` means; None for a file. Raises UsageError."""
    match = _REPOSITORY_REF.fullmatch(ref if is_plain(ref) else _from_url(ref))
    if match is None:
        return None
    revision = match["revision"] or "main"
    if not re.fullmatch(REPO, match["repo"]) or not re.fullmatch(REVISION, revision):
        raise UsageError(f"{ref}: expected hf:OWNER/REPO, optionally with :QUANTIZATION or /FILE.gguf")
    quantization = (match["quantization"] or "").upper()
    return HubRepository(match["repo"], "" if quantization == "LATEST" else quantization, revision)


def is_plain(ref: str) -> bool:
    """Whether a name of `is_hub_name` is no URL."""
    return not (_URL.match(ref) or ref.startswith(tuple(f"{host}/" for host in _HOSTS)))


def hub_entry(ref: str) -> Entry:
    """Return an unverified entry for a file of the hub. Raises UsageError."""
    written = ref if is_plain(ref) else _from_url(ref)
    match = _HF_REF.fullmatch(written)
    if not match or not re.fullmatch(REPO, match["repo"]) or ".." in match["file"].split("/"):
        raise UsageError(
            f"{ref}: expected hf:OWNER/REPO[:QUANTIZATION] or hf:OWNER/REPO/FILE.gguf, maybe @REVISION"
        )
    repo, file, revision = match["repo"], match["file"], match["revision"] or "main"
    if not re.fullmatch(REVISION, revision):
        raise UsageError(f"{ref}: {revision!r} is not a revision")
    # The hub allows no "--" inside its names, so "--" separates them unambiguously.
    parts = ["hf", repo, re.sub(r"\.gguf$", "", file, flags=re.IGNORECASE)]
    name = "--".join(parts) + ("" if revision == "main" else f"@{revision}")
    name = re.sub(r"[^A-Za-z0-9._+@-]", "_", name.replace("/", "--"))
    if file.lower().endswith(".gguf"):
        return Entry(name=name, sources=(HubSource(repo, file, revision),))
    folder, slash, last = file.rpartition("/")
    beside = tuple(f"{folder}{slash}{one}" for one in _BESIDE.get(last, ()))
    source = HubSource(repo, file, revision, beside=beside)
    return Entry(name=name, sources=(source,), converted=_CONVERTED_TYPE)


def hub_name(entry: Entry) -> str:
    """Return how the entry of a file of the hub is named; the name itself for one of the registry."""
    source = entry.sources[0] if entry.sources else None
    if not isinstance(source, HubSource) or not entry.name.startswith("hf--"):
        return entry.name
    return f"hf:{source.repo}/{source.file}" + ("" if source.revision == "main" else f"@{source.revision}")


def hub_entries(ref: str) -> list[Entry]:
    """Return the entries of a file of the hub, and for the first part of a split model those of all parts."""
    first = hub_entry(ref)
    entries = [first]
    for source in first.sources:
        assert isinstance(source, HubSource)  # noqa: S101 - made above, for the type checker
        entries += [
            hub_entry(f"hf:{source.repo}/{file}@{source.revision}") for file in other_parts(source.file)
        ]
    return entries


def _from_url(url: str) -> str:
    """Return the URL of a file, or of a repository's page, as the hf:... that names the same."""
    parts = urlsplit(url if _URL.match(url) else f"https://{url}")
    if parts.netloc.lower() not in (*_HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()):
        raise UsageError(f"{url}: only URLs of huggingface.co are known; download it, and name the file here")
    path = unquote(parts.path)
    if file := _FILE.fullmatch(path):
        revision = "" if file["revision"] == "main" else f"@{file['revision']}"
        return f"hf:{file['repo']}/{file['file']}{revision}"
    if page := _PAGE.fullmatch(path):
        return f"hf:{page['repo']}" + (f"@{page['revision']}" if page["revision"] else "")
    raise UsageError(f"{url}: no URL of a repository or a file; name one: hf:OWNER/REPO[/FILE.gguf]")


# ---- models split over several files: NAME-00001-of-00003.gguf is the first, and stands for all ----

_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def other_parts(first: str) -> list[str]:
    """Return the names of the files that complete the first part of a split model; [] for any other file."""
    match = _FIRST.fullmatch(first)
    n = int(match[2]) if match else 1
    return [f"{match[1]}-{no:05}-of-{n:05}.gguf" for no in range(2, n + 1)] if match else []


def other_files(first: Path) -> list[Path]:
    """Return the paths of those files, which may not exist."""
    return [first.with_name(name) for name in other_parts(first.name)]
