"""The hub: its models as users name them, and downloads that can be resumed.

    hf:OWNER/REPO/FILE.gguf[@REVISION]           a file, also as its page or link
    [hf:]OWNER/REPO[:QUANTIZATION][@REVISION]    a repository, or its page (on_disk.py)

Whisper models have other forms too, which are converted: whisper.cpp's ggml-NAME.bin, CTranslate2's
model.bin, and model.safetensors.

`fetch_hub`, like pull.py's `fetch_wheels`, fills a partial file, NAME.gguf.part, and can continue it later. A
source that cannot deliver raises SourceFailure with one line, and the next source is tried. An EdgespecError
is for failures that no other source can cure (a full disk). The caller hashes the result.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec.structs import asdict

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.registry import REPO, REVISION, Entry, HubSource, other_parts
from edgespec.platform.files import write_atomically

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata


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


class HubRepository(msgspec.Struct, frozen=True):
    """A repository of the hub that was named without a file."""

    repo: str
    quantization: str
    """In capitals; "": none was named."""
    revision: str


def is_hub_name(ref: str) -> bool:
    """Whether `ref` has the form of a model on the hub.

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
    """Return the hf:... name of an entry for a file of the hub; the name of any other entry."""
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
    """Return the hf:... name for the URL of a file or of a repository's page."""
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


# ---- partial files, and their sources ----


Report = Callable[[int, int | None], None]
"""Takes the bytes of the file that are here and their total (None: unknown), if possible several times a
second; an exception from it ends the work."""

_DISK_MARGIN = 64 << 20  # bytes to leave free: a full disk harms other programs
_REASON_LIMIT = 240  # characters of another program's error message


class SourceFailure(Exception):  # noqa: N818 - not an error of edgespec: the next source may do
    """A source did not deliver; `str()` is the reason in one line."""


class PartState(msgspec.Struct, frozen=True):
    """The state of a partial file."""

    source: str
    """Label of the source of its bytes."""
    version: str = ""
    """The hub's ETag of the file: only bytes of the same version can continue it."""


class PartFile:
    """A partial file NAME.gguf.part, and NAME.gguf.part.json with its state."""

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f"{final.name}.part")
        self._state_path = final.with_name(f"{final.name}.part.json")

    @property
    def beside(self) -> Path:
        """The folder of small files that belong to it, for a model that is to be converted."""
        return self.path.with_name(f"{self.path.name}.beside")

    def size(self) -> int:
        """Return the number of bytes downloaded so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def state(self) -> PartState | None:
        """Return the recorded state; None if there is nothing to continue."""
        try:
            state = PartState(**json.loads(self._state_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return state if self.path.exists() else None

    def save(self, state: PartState) -> None:
        """Record how much was downloaded, so that a later pull resumes there."""
        write_atomically(self._state_path, json.dumps(asdict(state)) + "\n")

    def discard(self) -> None:
        """Delete the partial file and its state."""
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def forget_state(self) -> None:
        """Delete the state, after the complete file got its final name."""
        self._state_path.unlink(missing_ok=True)


def format_size(size: float) -> str:
    """Return a size in bytes as people write it, in powers of 1000: "1.12 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def check_disk(
    directory: Path,
    needed: int,
    what: str,
    cure: str = "free some, or set EDGESPEC_MODELS_DIR to another disk",
) -> None:
    """Raise an EdgespecError with the figures and a cure if `directory` lacks room for `needed` bytes."""
    here = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(here).free
    if free < needed + _DISK_MARGIN:
        raise EdgespecError(
            f"no disk space for {what}: it needs {format_size(needed + _DISK_MARGIN)} in {directory}, "
            f"{format_size(free)} are free; {cure}"
        )


def one_line(text: str) -> str:
    """Return the first line that is not blank, shortened to fit into a message."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= _REASON_LIMIT else line[: _REASON_LIMIT - 3] + "..."


_log = logging.getLogger("huggingface_hub.file_download")
_TIMEOUT_S = 5.0  # to the first answer: if the hub is unreachable, try the next source soon


def _is_no_retry(record: logging.LogRecord) -> bool:
    """Whether a line of the library's log is not about a retry, which the caller's progress shows."""
    return "Error while downloading" not in record.getMessage()


class _Progress:
    """Replaces the library's progress bar, which gets each chunk's size before it is written."""

    def __init__(self, report: Report, done: int, total: int | None) -> None:
        self._report, self._done, self._total = report, done, total
        report(done, total)

    def update(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._report(self._done, self._total)


def fetch_hub(source: HubSource, entry: Entry, part: PartFile, report: Report) -> None:
    """Complete the entry's partial file, continuing where an earlier attempt stopped.

    Raises:
        SourceFailure: the hub did not deliver all; the bytes that came are kept for the next attempt.
        EdgespecError: no room on the disk.

    """
    # `hf_hub_download` begins each time with an empty temporary file, so it cannot continue a stopped
    # download; the two functions inside it, called one by one, can.
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    _log.addFilter(_is_no_retry)
    with _hub_failures():
        url, metadata = _hub_metadata(source)
        version = metadata.etag or ""
        if entry.size and metadata.size and metadata.size != entry.size:
            raise SourceFailure(f"wrong size: {metadata.size} bytes, expected {entry.size}")
        if entry.sha256 and re.fullmatch(r"[0-9a-f]{64}", version) and version != entry.sha256:
            raise SourceFailure(f"wrong SHA-256: {version}, expected {entry.sha256}")
        state = PartState(source.label, version)
        if part.state() != state or part.size() > (metadata.size or 0):
            part.discard()
        check_disk(part.path.parent, (metadata.size or 0) - part.size(), entry.name)
        headers = build_hf_headers()
        if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)  # a user's token is for the hub, not for its file servers
        part.path.touch()
        part.save(state)
        with part.path.open("r+b") as file:
            start = file.seek(0, io.SEEK_END)
            http_get(
                metadata.location,
                file,
                resume_size=start,
                headers=headers,
                expected_size=metadata.size,
                _tqdm_bar=cast("Any", _Progress(report, start, metadata.size)),
            )


def list_hub_files(repo: str, revision: str) -> list[str]:
    """Return the paths of all files of a repository. Raises SourceFailure."""
    from huggingface_hub import HfApi

    with _hub_failures():
        api = HfApi(endpoint=_endpoint())
        found = api.model_info(repo, revision=None if revision == "main" else revision, timeout=_TIMEOUT_S)
    return [file.rfilename for file in found.siblings or ()]


def _endpoint() -> str | None:
    # The library reads HF_ENDPOINT only when it is imported.
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _hub_metadata(source: HubSource) -> tuple[str, HfFileMetadata]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    endpoint = _endpoint()
    url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint)
    return url, get_hf_file_metadata(url, timeout=_TIMEOUT_S, endpoint=endpoint)


@contextmanager
def _hub_failures() -> Iterator[None]:
    """Turn the hub library's exceptions into SourceFailure."""
    from huggingface_hub import errors

    try:
        yield
    except (SourceFailure, EdgespecError):
        raise
    except errors.OfflineModeIsEnabled:
        raise SourceFailure("offline mode is on (HF_HUB_OFFLINE)") from None
    except errors.GatedRepoError:
        raise SourceFailure(
            "gated: accept its licence on the hub and log in there (`hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceFailure("no such repository, or a private one") from None
    except errors.RevisionNotFoundError:
        raise SourceFailure("no such revision") from None
    except errors.EntryNotFoundError:
        raise SourceFailure("no such file") from None
    except Exception as error:  # noqa: BLE001 - the errors of whichever HTTP library the hub library uses
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # no other source would help
            raise EdgespecError(f"the disk is full: {error}") from None
        kind = type(error).__name__
        network = any(word in kind for word in ("Connect", "Timeout", "Proxy"))
        what = "the hub cannot be reached: " if network else ""
        raise SourceFailure(one_line(what + (str(error) or kind))) from None
