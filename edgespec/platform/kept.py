"""Everything that edgespec keeps between runs, a row each, and the two forms of storage.

A module that keeps something asks its row for the place, such as `HISTORY.path()`. `edgespec cache` lists and
deletes by these rows, and docs/start.md shows them. `StateFile` is one small file, `BoundedFolder` a folder
of files within a limit of bytes; any number of processes may read and write them at once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeAlias, TypeVar

import msgspec

from edgespec.errors import MessageFn, once, silent
from edgespec.platform.files import (
    TEMPORARY,
    begins_with,
    cache_root,
    config_root,
    expand_user,
    locked,
    own_file,
    replacing,
    temporary_path,
)


class Kept(msgspec.Struct, frozen=True):
    """One kind of thing that is kept on disk: where, what for, and whether it may be deleted."""

    name: str
    """The word for it in `edgespec cache`."""
    places: tuple[str, ...]
    """Paths below the root, each with one * at most, which no slash matches; a folder's ends in a slash.

    (): wherever the user wants it.
    """
    holds: str
    deleted: Literal["always", "all", "named", "never"] = "all"
    """Deleted by `cache clear`, by `cache clear all`, only by `cache clear NAME`, or not by any of them."""
    names: str = ".*"
    """Paths of its files below a folder of `places`, as a regular expression: others are not ours."""
    magics: tuple[bytes, ...] = (b"",)
    """What its files begin with."""
    personal: bool = False
    """Whether there are texts of the user in it."""
    root: Literal["cache", "config", "models", "home"] = "cache"
    where: str = ""
    """The place in Markdown, if `places` do not say it."""
    cure: str = ""
    """The means of deleting it, in Markdown, if there is more than `deleted` to say."""

    def path(self, part: str = "") -> Path:
        """Return where it is or would be; `part` replaces the *.

        Raises UsageError if no home directory is known.
        """
        return self._root() / self.places[0].replace("*", part)

    def _root(self) -> Path:
        roots = {"cache": cache_root, "config": config_root, "models": models_root}
        return roots[self.root]() if self.root in roots else expand_user("~")

    @property
    def deleted_by(self) -> str:
        """The means of deleting it, in Markdown."""
        command = "edgespec cache clear" + ("" if self.deleted == "always" else f" {self.name}")
        return self.cure or f"`{command}`"

    def owns(self, file: Path) -> bool:
        """Whether `file` belongs to this row, or was stored beside it by StateFile."""
        root = self._root()
        if not file.is_relative_to(root):
            return False
        below = file.relative_to(root)
        finished = below.with_name(re.sub(r"^\.(.*)\.new$", r"\1", below.name)).as_posix()
        return any(re.fullmatch(self._pattern(place), finished) for place in self.places)

    def _pattern(self, place: str) -> str:
        names = f"({self.names}|(.*/)?({TEMPORARY}|\\.[^/]*lock))" if _is_folder(place) else ""
        return re.escape(place).replace(r"\*", "[^/]*") + names + r"(\.set-aside(-\d+)?)?"

    def files(self) -> Iterator[Path]:
        """Yield our existing files: ordinary ones with our names and beginnings.

        Locks are left out: processes that wait for one must find it.
        """
        for place in self.places:
            base, is_folder = self._root() / place, _is_folder(place)
            for folder, folders, names in os.walk(base if is_folder else base.parent):
                if not is_folder:
                    folders.clear()
                for name in sorted(names):
                    if name.startswith(".") and name.endswith("lock"):
                        continue
                    if owner_of(file := Path(folder, name)) is self and begins_with(file, *self.magics):
                        yield file

    def bytes(self) -> int:
        """Return the size of all files that exist now."""
        total = 0
        for file in self.files():
            with suppress(OSError):  # deleted by now
                total += file.stat().st_size
        return total


def _is_folder(place: str) -> bool:
    return not place or place.endswith("/")


def models_root() -> Path:
    """Return the models directory: $EDGESPEC_MODELS_DIR, or in the user's cache directory."""
    if root := os.environ.get("EDGESPEC_MODELS_DIR"):
        return expand_user(root).absolute()
    return cache_root() / "models"


_JSON = r"[^/]+\.json"

HISTORY = Kept(
    "history",
    ("history/",),
    "prompts and answers of `run` and `chat` (not with `--no-cache`), imported texts",
    deleted="always",
    names=r"texts\.db(-journal)?|[^/]+-[0-9a-f]{16}\.tokens",
    personal=True,
)
REJECTED = Kept(
    "rejected",
    ("rejected/",),
    "where drafts were rejected, with the texts, for `draft make --from-history` (not with `--no-cache`)",
    deleted="always",
    names=r"texts\.db(-journal)?|[^/]+-[0-9a-f]{16}\.rejected",
    personal=True,
)
CHAT_LINES = Kept(
    "chat-lines",
    ("chat-lines",),
    "lines typed in `chat`, and when (not with `--no-cache`)",
    deleted="always",
    personal=True,
)
FORGE = Kept(
    "forge",
    ("forge/",),
    "texts that drafts are made from, yours too; what is left of trainings",
    names="[0-9a-f]{16}/.*",
    personal=True,
    cure="`edgespec cache clear`: your texts; `edgespec cache clear forge`: all",
)
CONVERSATIONS = Kept(
    "chats",
    ("chats/",),
    "the last conversation of `chat` with each model (not with `--no-cache`)",
    deleted="always",
    names=_JSON,
    personal=True,
)
STATES = Kept(
    "states",
    ("states/",),
    "states of conversations of `chat --continue`, at most `--state-limit` (not those of `--state-dir`)",
    deleted="always",
    names=r"[0-9a-f]{16}(-[0-9a-f]{32}){1,2}\.state",
    magics=tuple(b"edgespec prompt state %d\n" % n for n in (3, 2, 1)),  # only the first is used
    personal=True,
)
PROFILES = Kept(
    "profiles",
    ("profiles/",),
    "costs and acceptance learnt on this machine, thresholds of `calibrate`; no text",
    names=_JSON,
)
IDLE_POWER = Kept("idle-power", ("energy.json",), "the idle power of this machine")
SELF_TESTS = Kept("self-tests", ("selftest-*.json",), "the kernels' self-test, and how far they prefetch")
HASHES = Kept("hashes", ("hashes.json",), "paths and hashes of model files")
MODEL_FACTS = Kept("model-facts", ("model_facts.json",), "paths and facts of other programs' models")
PACKED_WEIGHTS = Kept(
    "packed-weights",
    ("packed/",),
    "weights packed for the kernels, at most 16 GB; a tenth of the disk stays free "
    "(`EDGESPEC_PACKED_WEIGHTS=off`: none)",
    names=r"[0-9a-f]{16}-[a-z0-9-]+-[0-9a-f]{16}\.weights",
    magics=(b"edgespec packed weights 2\n", b'{"tensors":'),  # the second: without checksums, not used
)
SERVERS = Kept(
    "servers",
    ("servers/",),
    "addresses and keys of running servers",
    deleted="never",
    names=_JSON,
    cure="the server, when it ends",
)
BUILDS = Kept("builds", ("pip/",), "llama.cpp as `make run` compiled it")
QUANTIZED = Kept(
    "quantized",
    ("quantized/",),
    "quantizations that `compare` made",
    names=r"[^/]+-of-[0-9a-f]{12}\.gguf(\.part\.[^/]+)?",
    magics=(b"GGUF", bytes(4), b"PK\3\4"),  # a model, one that is not finished, importances
    root="models",
)
MODELS = Kept(
    "models",
    ("",),
    "models pulled or converted, unfinished pulls, drafts made here",
    deleted="named",
    root="models",
    where="`~/.cache/edgespec/models`, or `EDGESPEC_MODELS_DIR`",
    cure="`edgespec models remove`, `edgespec draft remove`; `edgespec cache clear models`: all but drafts",
)
OWN_MODELS = Kept(
    "models.toml",
    ("models.toml",),
    "names of your own models and pairs",
    deleted="never",
    root="config",
    cure="`edgespec models remove`",
)
COMPLETION = Kept(
    "completion",
    (".bash_completions/edgespec.sh", ".zfunc/_edgespec", ".config/fish/completions/edgespec.fish"),
    "completion of commands in a shell, if you installed it",
    deleted="never",
    root="home",
    cure="by hand",
)
COMPARISONS = Kept(
    "comparisons",
    (),
    "raw runs of `compare`",
    deleted="never",
    where="DIR of `compare -o`: `edgespec-compare`",
    cure="by hand",
)
BATCHES = Kept(
    "batches",
    (),
    "answers of a `batch` that was stopped",
    deleted="never",
    personal=True,
    where="`OUT.partial`, beside OUT of `batch -o`",
    cure="the batch, when it ends",
)
LOCKS = Kept(
    "locks",
    (".*lock",),
    "nothing: empty files held while another is written",
    deleted="never",
    cure="by hand",
)

EVERYTHING = (
    *(HISTORY, REJECTED, CHAT_LINES, FORGE, CONVERSATIONS, STATES),
    *(PROFILES, IDLE_POWER, SELF_TESTS, HASHES, MODEL_FACTS),
    *(PACKED_WEIGHTS, SERVERS, BUILDS, QUANTIZED, MODELS, OWN_MODELS),
    *(COMPLETION, COMPARISONS, BATCHES, LOCKS),
)
"""All rows; of two that own a file, it is the first one's."""


def owner_of(file: Path) -> Kept | None:
    """Return the row that `file` belongs to; None: edgespec keeps no such file."""
    return next((row for row in EVERYTHING if row.owns(file)), None)


T = TypeVar("T")


class DamagedFileError(Exception):
    """A file is invalid; `str(error)` says why."""


class StateFile(Generic[T]):
    """A file that stores a value of type T. It is not kept open between calls.

    NAME            written whole or not at all, readable by the user only
    NAME.set-aside  the last damaged file, kept so that the user can look into it
    .lock           held by the process that writes

    edgespec works without these files: one that is damaged, or of another format, is set aside. One line
    reports it, and the run continues as if there were no file.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        lock: str = ".lock",
        on_message: MessageFn = silent,
    ) -> None:
        """Name the file; it is not opened yet.

        `parse` turns the file's bytes into a T, and raises DamagedFileError. `lock`: the name of the lock
        file in the same folder; several files may share one. `on_message` gets each line once.
        """
        self.path = path
        self._parse = parse
        self._lock = path.with_name(lock)
        self.warn_once = once(on_message)
        """Reports a line to the user, unless it was reported before."""

    def peek(self) -> T | None:
        """Return the file's value, None if there is no file; a damaged file is not touched.

        Raises DamagedFileError and OSError.
        """
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a pipe would be waited for
                raise OSError(errno.EINVAL, "no ordinary file", str(self.path))
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        return self._parse(data)

    def read(self) -> T | None:
        """Return the file's value; None if there is no usable file. Raises OSError."""
        try:
            return self.peek()
        except DamagedFileError as error:
            problem = str(error)
        # Read again under the lock: another process may have replaced the damaged file by now.
        try:
            with self._locked():
                return self._usable()
        except OSError:  # the file cannot be set aside
            self.warn_once(f"{self.path}: {problem}; it is not used")
        return None

    def update(self, change: Callable[[T | None], bytes]) -> None:
        """Replace the file's value, under the lock: `change` takes the old value and returns the new bytes.

        The old value is None if there is no usable one. Raises OSError; the file is then
        unchanged.
        """
        with self._locked():
            data = change(self._usable())
            with replacing(self.path) as stream:
                os.fchmod(stream.fileno(), 0o600)
                stream.write(data)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, which is freed even if the process is killed. Makes the folder. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._lock, mode=0o600):
            yield

    def _usable(self) -> T | None:
        """Return the file's value, or set a damaged file aside and return None. Raises OSError."""
        try:
            return self.peek()
        except DamagedFileError as error:
            set_aside(self.path, str(error), self.warn_once)
            return None


def set_aside(path: Path, why: str, on_message: MessageFn) -> None:
    """Rename an unusable file, replacing an earlier one, and report it. Raises OSError."""
    aside = path.with_name(f"{path.name}.set-aside")
    path.replace(aside)
    on_message(f"{path}: {why}; set aside as {aside.name}")


def write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError, perhaps with a part written, if the disk is full."""
    rest = memoryview(data)
    while rest:
        n = os.pwrite(file, rest, offset)
        if n == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest, offset = rest[n:], offset + n


# --- JSON ---------------------------------------------------------------------------------------


def parse_struct(data: bytes, type_: type[T]) -> T:
    """Parse the JSON `data` as the dataclass `type_`. Raises DamagedFileError."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFileError(f"damaged: {error}") from None


FileIdentity: TypeAlias = tuple[tuple[int, int, int, int], ...]
"""Size, times of change in ns and inode of files: another one once anything was written to one of them."""


def identity_of(*files: Path) -> FileIdentity:
    """Return the identity of a model's files. Raises OSError.

    It includes the time of the inode's last change, which `cp -p` and `touch` cannot set.
    """
    facts = (file.stat() for file in files)
    return tuple((one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in facts)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a `FileTable`; subclasses add the facts that are stored."""

    files: FileIdentity = ()
    """Of the file, and of the others of a split model."""


E = TypeVar("E", bound=FileEntry)


class StoredFiles(msgspec.Struct, Generic[E]):
    """The JSON of a `FileTable`."""

    files: dict[str, E]


class FileTable(Generic[E]):
    """A state file with entries by the path of a file; empty if nothing can be stored."""

    def __init__(self, path: Path, kind: type[StoredFiles[E]], most: int) -> None:
        """Name the state file. It keeps the newest `most` entries."""
        self._state = StateFile(path, lambda data: parse_struct(data, kind), lock=f".{path.stem}.lock")
        self._most = most

    def read(self) -> dict[str, E]:
        """Return the entries, the oldest first."""
        with suppress(OSError):
            if stored := self._state.read():
                return stored.files
        return {}

    def add(self, new: dict[str, E]) -> None:
        """Store entries as the newest."""

        def added(old: StoredFiles[E] | None) -> bytes:
            kept = [(path, entry) for path, entry in old.files.items() if path not in new] if old else []
            return msgspec.json.encode(StoredFiles(dict([*kept, *new.items()][-self._most :])))

        with suppress(OSError):
            self._state.update(added)


def parse_json(data: bytes, *, form: str, version: int) -> dict[str, Any]:
    """Parse a JSON object {"format": form, "version": version, ...} whose numbers are all finite.

    Raises DamagedFileError.
    """
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        raise DamagedFileError("damaged: not JSON") from None
    if not isinstance(document, dict) or document.get("format") != form:
        raise DamagedFileError(f"not of {form}")
    found = document.get("version")
    if type(found) is not int or found != version:
        raise DamagedFileError(f"of format {found!a}, and this edgespec has {version}")
    return document


def _finite(text: str) -> float:
    """Parse a number, but not NaN, Infinity or 1e999, all of which Python's JSON parser accepts."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class BoundedFolder:
    """The files of one kind in a folder: the least recently used are deleted, and only our own.

    FOLDER/                       0700, made here or the user's own
        NAME                      0600, of our form; begins with our magic
        .edgespec-PID-THREAD.tmp  a file being written
        .lock                     held by the process that writes or deletes

    Anything else (another name or beginning, a folder, a link, a pipe, another user's file) is not ours: it
    is not used, counted or deleted. Readers need no lock: a deleted file stays mapped.
    """

    def __init__(
        self,
        path: Path,
        names: str,
        magic: bytes,
        used_ns: Callable[[os.stat_result], int] = lambda found: found.st_mtime_ns,
    ) -> None:
        """Name the folder. `names`: a regular expression; `magic`: the bytes that files begin with.

        `used_ns`: returns when a file was last used.
        """
        self.path = path
        self._form, self._magic, self._used_ns = re.compile(names), magic, used_ns
        self._ours: set[str] = set()  # names whose beginning was looked at

    def make(self) -> None:
        """Make the folder if there is none. Raises OSError if it cannot be made or read."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.scandir(self.path).close()

    def names(self) -> list[str]:
        """Return the names of our files, in no order; none if the folder cannot be read."""
        try:
            with os.scandir(self.path) as found:
                named = {one.name for one in found if self._form.fullmatch(one.name)}
        except OSError:
            return []
        known = self._ours & named
        self._ours = known | {name for name in named - known if self._is_ours(name)}
        return [*self._ours]

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Open a file that only this user could have written or read. Raises OSError; never waits."""
        with own_file(self.path / name) as file:
            if os.fstat(file).st_mode & 0o077:
                raise PermissionError(errno.EPERM, "others can read or write it")
            yield file

    def delete(self, name: str) -> bool:
        """Delete a file if it is ours; return whether it is gone."""
        if self._is_ours(name):
            with suppress(OSError):
                (self.path / name).unlink()
                self._ours.discard(name)
                return True
        return False

    def locked(self, on_busy: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Hold the folder's lock, as `locked` does."""
        return locked(self.path / ".lock", on_busy, mode=0o600)

    def make_room(self, n_bytes: int, limit: int, before_ns: int) -> bool:
        """Delete files used before `before_ns` until `n_bytes` more fit; return whether they do."""
        found = []
        for name in self.names():
            with suppress(OSError):
                facts = (self.path / name).lstat()
                found.append((self._used_ns(facts), facts.st_size, name))
        total = n_bytes + sum(size for _, size, _ in found)
        for used_ns, size, name in sorted(found):  # those unused for longest first
            if total <= limit or used_ns >= before_ns:
                break
            if self.delete(name):
                total -= size
        return total <= limit

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file that is called `name` after the block; on an error nothing is left.

        Needs the lock. Raises OSError, even for an existing name that is no ordinary file.
        """
        file, new = self.path / name, temporary_path(self.path / name)
        for left in self.path.iterdir():  # by a process that was killed
            if re.fullmatch(TEMPORARY, left.name) and self._is_ours(left.name):
                left.unlink(missing_ok=True)
        try:
            with open(new, "xb", opener=partial(os.open, mode=0o600)) as stream:
                yield stream
            if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
                raise FileExistsError(errno.EEXIST, f"{name} is no ordinary file")
            new.replace(file)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _is_ours(self, name: str) -> bool:
        file = self.path / name
        is_named = self._form.fullmatch(name) or re.fullmatch(TEMPORARY, name)
        return begins_with(file, self._magic) or (
            bool(is_named) and begins_with(file, b"") and not file.stat().st_size
        )
