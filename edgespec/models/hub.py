"""Download a model file from the hub, continuing a download that was stopped."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry, HubSource
from edgespec.models.sources import PartFile, PartState, Report, SourceFailure, check_disk, one_line

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_log = logging.getLogger("huggingface_hub.file_download")
_TIMEOUT_S = 5.0  # to the first answer: if the hub is unreachable, go on to the next source soon


def _is_no_retry(record: logging.LogRecord) -> bool:
    """Whether a line of the library's is not about a retry, which the caller's progress shows."""
    return "Error while downloading" not in record.getMessage()


class _Progress:
    """Takes the place of the library's progress bar, which is told of each chunk before it is written."""

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
