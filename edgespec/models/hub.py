"""Download a model file from the hub, continuing a download that was stopped."""

from __future__ import annotations

import io
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry, HubSource
from edgespec.models.sources import PartFile, PartState, Report, SourceFailure, check_disk, one_line

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_TIMEOUT_S = 5.0  # to the first answer: if the hub is unreachable, go on to the next source soon


class _ReportingFile(io.BufferedRandom):
    """The partial file that the hub library writes to: reports progress after each chunk."""

    def __init__(self, path: Path, report: Report, total: int | None) -> None:
        super().__init__(io.FileIO(path, "r+" if path.exists() else "w+"))
        self._report, self._total = report, total

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        try:
            written = super().write(chunk)
        except OSError as error:  # else it would look like a network failure, which may be an OSError too
            raise EdgespecError(f"{self.raw.name}: {error.strerror}") from error  # type: ignore[attr-defined]
        self._report(self.tell(), self._total)
        return written


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

    with _hub_failures(), _quiet:
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
        with _ReportingFile(part.path, report, metadata.size) as file:
            part.save(state)
            start = file.seek(0, io.SEEK_END)
            report(start, metadata.size)
            http_get(metadata.location, file, resume_size=start, headers=headers, expected_size=metadata.size)


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
        kind = type(error).__name__
        network = any(word in kind for word in ("Connect", "Timeout", "Proxy"))
        what = "the hub cannot be reached: " if network else ""
        raise SourceFailure(one_line(what + (str(error) or kind))) from None


class _HubSilence:
    """Silences the hub library's progress bars and warnings of retries: the caller shows progress.

    A context manager for several threads at once: it lasts until the last one leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._silence = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._silence.enter_context(_silence())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._silence.close()


@contextmanager
def _silence() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    bars, logger = "huggingface_hub.http_get", logging.getLogger("huggingface_hub.file_download")
    level, hidden = logger.level, are_progress_bars_disabled(bars)
    logger.setLevel(logging.ERROR)
    if not hidden:
        disable_progress_bars(bars)
    try:
        yield
    finally:
        logger.setLevel(level)
        if not hidden:
            enable_progress_bars(bars)


_quiet = _HubSilence()
